"""Compatibility: every rule refuses what breaks it, all reasons come at once, and silence is no reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.compatibility import (
    CUDA_TYPES,
    LLAMACPP_TYPES,
    Device,
    check,
    device,
    incompatibilities,
    misfit,
    notes,
    replication,
)
from headrace.control.resources import Artifact, ArtifactFile, Engine, Execution, FileKind, ModelFacts

FACTS = ModelFacts("llama", 32, 32, 8, 4096, 128256, 8192, "bf16", True, "", 128256)
HOPPER = Device("cuda", 90)


def run(**change: Any) -> Execution:
    return dataclasses.replace(Execution(Engine.SYNTHETIC, 4096, 8, 16384), **change)


@pytest.mark.parametrize(
    ("facts", "execution", "place", "fields"),
    [
        ({}, {}, HOPPER, []),
        ({}, {"tensor_parallel": 8}, HOPPER, []),
        ({}, {"tensor_parallel": 16}, HOPPER, []),
        ({}, {"tensor_parallel": 3}, HOPPER, ["execution.tensor_parallel"] * 2),
        ({"heads": 36, "kv_heads": 9}, {"tensor_parallel": 6}, HOPPER, ["execution.tensor_parallel"]),
        ({"heads": 30, "kv_heads": 2}, {"tensor_parallel": 4}, HOPPER, ["execution.tensor_parallel"]),
        ({}, {"pipeline_parallel": 4}, HOPPER, []),
        ({}, {"pipeline_parallel": 5}, HOPPER, ["execution.pipeline_parallel"]),
        ({"tokenizer_vocabulary": 128257}, {}, HOPPER, ["artifact"]),
        ({"tokenizer_vocabulary": 100000}, {}, HOPPER, []),
        ({"vocabulary": 0}, {}, HOPPER, []),
        ({}, {"context_tokens": 8192}, HOPPER, []),
        ({}, {"context_tokens": 8193}, HOPPER, ["execution.context_tokens"]),
        ({"context_tokens": 0}, {"context_tokens": 99999}, HOPPER, []),
        ({"weight_type": "fp8"}, {}, HOPPER, []),
        ({"weight_type": "fp8"}, {}, Device("cuda", 86), ["execution.device"]),
        ({"weight_type": "fp8"}, {}, Device(), ["execution.device"]),
        ({"weight_type": "nvfp4"}, {}, HOPPER, ["execution.device"]),
        ({"weight_type": "nvfp4"}, {}, Device("cuda", 100), []),
        ({"weight_type": "int8"}, {}, Device("cuda", 100), ["execution.device"]),
        ({"weight_type": "awq"}, {}, Device("cuda", 75), []),
        ({"weight_type": "awq"}, {}, Device("cuda", 70), ["execution.device"]),
        ({"weight_type": "awq"}, {}, Device(), ["execution.device"]),
        ({"weight_type": "bf16"}, {}, Device("cuda", 75), ["execution.device"]),
        ({"weight_type": "q4_k_m"}, {}, Device(), []),
        ({"weight_type": "q4_k_m"}, {}, HOPPER, ["execution.device"]),
        ({"weight_type": "of-tomorrow"}, {}, HOPPER, ["execution.device"]),
        ({"weight_type": ""}, {}, Device(), []),
        ({"weight_type": "nvfp4"}, {}, None, []),
    ],
    ids=str,
)
def test_rules(facts: dict[str, Any], execution: dict[str, Any], place: Device | None, fields: list[str]) -> None:
    found = check(dataclasses.replace(FACTS, **facts), run(**execution), place)
    assert [violation.field for violation in found] == fields


def test_all_reasons_come_at_once() -> None:
    facts = dataclasses.replace(FACTS, weight_type="nvfp4", tokenizer_vocabulary=200000)
    execution = run(tensor_parallel=5, pipeline_parallel=7, context_tokens=10000)
    fields = {violation.field for violation in check(facts, execution, HOPPER)}
    assert fields == {
        "execution.tensor_parallel", "execution.pipeline_parallel", "execution.context_tokens", "execution.device",
        "artifact",
    }  # fmt: skip


COUNT = st.integers(1, 64)


@given(heads=COUNT, kv_heads=COUNT, ranks=COUNT)
def test_heads_are_shared_out_whole(heads: int, kv_heads: int, ranks: int) -> None:
    facts, execution = ModelFacts(heads=heads, kv_heads=kv_heads), run(tensor_parallel=ranks)
    if check(facts, execution, HOPPER):
        return
    times = replication(facts, execution)
    assert heads % ranks == 0
    assert kv_heads * times % ranks == 0, "every GPU has whole KV heads"
    assert bool(notes(facts, execution)) is (times > 1) is (ranks > kv_heads)


@given(
    execution=st.builds(
        run,
        tensor_parallel=st.integers(0, 9),
        pipeline_parallel=st.integers(0, 9),
        context_tokens=st.integers(1, 10**7),
    ),
    place=st.sampled_from([None, Device(), HOPPER]),
)
def test_what_the_files_do_not_say_is_no_reason(execution: Execution, place: Device | None) -> None:
    assert check(ModelFacts(), execution, place) == ()
    assert notes(ModelFacts(), execution) == ()


@given(facts=st.builds(ModelFacts, heads=st.integers(0, 9), kv_heads=st.integers(0, 9), layers=st.integers(0, 9)))
def test_one_device_asks_nothing_of_heads_and_layers(facts: ModelFacts) -> None:
    assert check(facts, run(), Device()) == ()


def test_replicated_kv_heads_are_said() -> None:
    (note,) = notes(FACTS, run(tensor_parallel=16))
    assert "each is kept 2 times" in note


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", Device()),
        ("cpu", Device()),
        ("cuda-sm90", HOPPER),
        ("cuda-sm120", Device("cuda", 120)),
        ("cuda", None),
        ("cuda-sm9", None),
        ("cuda-sm90a", None),
        ("tpu", None),
    ],
)
def test_devices(text: str, found: Device | None) -> None:
    assert device(text) == found
    assert found is None or device(str(found)) == found


def test_tables_hold_together() -> None:
    assert all(lowest <= highest for lowest, highest in CUDA_TYPES.values())
    assert {"f32", "f16", "bf16", "q4_k_m", "q8_0"} <= LLAMACPP_TYPES


def artifact(*files: tuple[str, FileKind], **facts: Any) -> Artifact:
    made = tuple(ArtifactFile(path, 1, "0" * 64, kind) for path, kind in files)
    return Artifact(made, "/x", facts=ModelFacts(**facts))


GGUF = ("m.gguf", FileKind.WEIGHTS)
LORA = ("lora.gguf", FileKind.ADAPTER)
BASE = artifact(GGUF).digest
HF = (("m.safetensors", FileKind.WEIGHTS), ("config.json", FileKind.CONFIG), ("tokenizer.json", FileKind.TOKENIZER))
HF_LORA = ("lora/adapter_config.json", FileKind.ADAPTER)


@pytest.mark.parametrize(
    ("engine", "made", "execution", "fields"),
    [
        (Engine.TENSORRT_LLM, artifact(*HF), {"device": "cuda-sm90"}, []),
        (Engine.TENSORRT_LLM, artifact(*HF), {}, ["execution.device"]),
        (Engine.SGLANG, artifact(*HF), {"device": "cpu"}, ["execution.device"]),
        (Engine.VLLM, artifact(*HF), {}, []),  # it has a CPU build
        (Engine.VLLM, artifact(*HF), {"tensor_parallel": 2}, []),
        (Engine.VLLM, artifact(*HF), {"pipeline_parallel": 2}, ["execution.pipeline_parallel"]),
        (Engine.VLLM, artifact(GGUF), {}, ["artifact"] * 3),
        (Engine.VLLM, artifact(*HF[:2]), {}, ["artifact"]),
        (Engine.VLLM, artifact(*HF, HF_LORA, base_digest=artifact(*HF).digest), {}, []),
        (Engine.VLLM, artifact(*HF, HF_LORA), {}, ["artifact"]),
        (Engine.VLLM, artifact(*HF, LORA, base_digest=artifact(*HF).digest), {}, ["artifact"]),
    ],
)
def test_gpu_engines_load_a_folder(
    engine: Engine, made: Artifact, execution: dict[str, Any], fields: list[str]
) -> None:
    asked = run(engine=engine, **execution)
    assert [reason.field for reason in incompatibilities(made, asked)] == fields


@pytest.mark.parametrize(
    ("made", "execution", "fields"),
    [
        (artifact(GGUF), {}, []),
        (artifact(GGUF), {"device": "cuda-sm90"}, ["execution.device"]),
        (artifact(GGUF), {"tensor_parallel": 2}, ["execution.tensor_parallel"]),
        (artifact(GGUF), {"pipeline_parallel": 2}, ["execution.pipeline_parallel"]),
        (artifact(("m.safetensors", FileKind.WEIGHTS)), {}, ["artifact"]),
        (artifact(GGUF, ("chat_template.json", FileKind.CHAT_TEMPLATE)), {}, ["artifact"]),
        (artifact(GGUF, ("chat_template.jinja", FileKind.CHAT_TEMPLATE)), {}, []),
        (artifact(GGUF, LORA, base_digest=BASE), {}, []),
        (artifact(GGUF, LORA), {}, ["artifact"]),
        (artifact(GGUF, ("adapter_model.safetensors", FileKind.ADAPTER), base_digest=BASE), {}, ["artifact"]),
        (artifact(GGUF, LORA, ("second.gguf", FileKind.ADAPTER), base_digest=BASE), {}, ["artifact"]),
        (artifact(GGUF, LORA, base_digest="f" * 64), {}, ["artifact"]),
        (None, {"tensor_parallel": 2}, ["execution.tensor_parallel"]),
    ],
    ids=str,
)
def test_llamacpp(made: Artifact | None, execution: dict[str, Any], fields: list[str]) -> None:
    found = incompatibilities(made, run(engine=Engine.LLAMACPP, **execution))
    assert [violation.field for violation in found] == fields


def test_an_unknown_device_is_named_beside_other_reasons() -> None:
    made = artifact(GGUF, layers=3)
    found = incompatibilities(made, run(device="tpu", pipeline_parallel=2))
    assert [violation.field for violation in found] == ["execution.device", "execution.pipeline_parallel"]


@pytest.mark.parametrize(
    ("adapter", "base", "fits"),
    [("llama", "llama", True), ("qwen2", "llama", False), ("", "llama", True), ("qwen2", "", True)],
)
def test_an_adapter_of_another_architecture_does_not_fit(adapter: str, base: str, fits: bool) -> None:
    found = misfit(ModelFacts(architecture=adapter), dataclasses.replace(FACTS, architecture=base))
    assert (found is None) == fits
    assert found is None or (found.field, adapter in found.description) == ("artifact", True)
