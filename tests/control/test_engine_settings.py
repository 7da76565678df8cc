"""Settings of the engines that schedule by themselves: each rule refuses what breaks it, all reasons at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.control.compatibility import incompatibilities
from headrace.control.engine_settings import draft_violations, violations
from headrace.control.resources import (
    Abort,
    Artifact,
    ArtifactFile,
    DraftMethod,
    Engine,
    Execution,
    FileKind,
    ModelFacts,
    Speculative,
)

NGRAM = Speculative(DraftMethod.NGRAM, 4)
DRAFT = Speculative(DraftMethod.DRAFT_MODEL, 4, "artifacts/0123456789ab")
AT = "execution."
FILES = (
    ArtifactFile("model.safetensors", 1, "0" * 64, FileKind.WEIGHTS),
    ArtifactFile("config.json", 1, "1" * 64, FileKind.CONFIG),
    ArtifactFile("tokenizer.json", 1, "2" * 64, FileKind.TOKENIZER),
)
EVERY: dict[str, Any] = {
    "gpus": 2, "gpu_memory_fraction": 0.5, "dtype": "float16", "kv_events": True, "abort": Abort.OFF,
    "speculative": NGRAM, "eager": True,
}  # fmt: skip


def run(engine: Engine = Engine.VLLM, device: str = "cuda-sm90", **change: Any) -> Execution:
    return dataclasses.replace(Execution(engine, 4096, 8, 16384, device=device), **change)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({}, []),
        (EVERY, []),
        ({"gpus": 4, "tensor_parallel": 2}, []),
        ({"gpus": 1, "tensor_parallel": 2}, ["gpus"]),
        ({"gpus": 2000}, ["gpus"]),
        ({"gpus": 2, "device": ""}, ["gpus"]),
        ({"gpu_memory_fraction": 1.0}, []),
        ({"gpu_memory_fraction": 1.01}, ["gpu_memory_fraction"]),
        ({"gpu_memory_fraction": -0.1}, ["gpu_memory_fraction"]),
        ({"gpu_memory_fraction": float("nan")}, ["gpu_memory_fraction"]),
        ({"dtype": "bfloat16"}, []),
        ({"dtype": "fp8"}, ["dtype"]),
        ({"speculative": DRAFT}, []),
        ({"speculative": Speculative(None, 4)}, ["speculative.method"]),
        ({"speculative": Speculative(None, 0)}, ["speculative.method", "speculative.draft_tokens"]),
        ({"speculative": Speculative(DraftMethod.NGRAM, 65)}, ["speculative.draft_tokens"]),
        ({"speculative": Speculative(DraftMethod.NGRAM, 4, DRAFT.draft_artifact)}, ["speculative.draft_artifact"]),
        ({"speculative": Speculative(DraftMethod.EAGLE3, 4)}, ["speculative.draft_artifact"]),
        ({"speculative": Speculative(DraftMethod.EAGLE3, 4, "drafts")}, ["speculative.draft_artifact"]),
        ({"speculative": Speculative(DraftMethod.NGRAM, 4, "", 32)}, []),
        ({"speculative": Speculative(DraftMethod.NGRAM, 4, "", 33)}, ["speculative.ngram_max"]),
        ({"speculative": dataclasses.replace(DRAFT, ngram_max=2)}, ["speculative.ngram_max"]),
        ({"speculative": NGRAM, "engine": Engine.SGLANG}, ["speculative.method"]),
        ({"speculative": DRAFT, "engine": Engine.SGLANG}, []),
    ],
    ids=str,
)
def test_rules(change: dict[str, Any], fields: list[str]) -> None:
    assert [found.field for found in violations(run(**change))] == [AT + field for field in fields]


@pytest.mark.parametrize("engine", [one for one in Engine if not one.schedules_itself])
def test_the_others_have_none_of_them_and_each_is_named(engine: Engine) -> None:
    found = violations(run(engine, device="", **EVERY))
    assert [one.field for one in found] == [AT + name for name in EVERY]
    assert not violations(run(engine, device=""))


def test_all_reasons_come_with_those_of_the_files() -> None:
    wrong = run(gpus=1, tensor_parallel=3, dtype="int4", speculative=Speculative(DraftMethod.EAGLE3, 0))
    found = incompatibilities(Artifact(FILES, "/m", facts=ModelFacts(heads=32, kv_heads=8)), wrong)
    assert {one.field for one in found} == {
        AT + "gpus", AT + "dtype", AT + "speculative.draft_tokens", AT + "speculative.draft_artifact",
        AT + "tensor_parallel",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "vocabulary", "speculative", "text"),
    [
        (FILES, 100, DRAFT, ""),
        (FILES, 0, DRAFT, ""),
        (FILES, 99, DRAFT, "has a vocabulary of 99 tokens and the model one of 100"),
        (FILES, 99, dataclasses.replace(DRAFT, method=DraftMethod.EAGLE3), ""),
        (FILES[1:], 100, DRAFT, "must name an artifact with weights"),
        (FILES[:1], 100, DRAFT, "has no config.json beside its weights"),
        (FILES, 99, None, ""),
    ],
)
def test_what_drafts_must_fit_the_model(
    files: tuple[ArtifactFile, ...], vocabulary: int, speculative: Speculative | None, text: str
) -> None:
    draft = Artifact(files, "/d", facts=ModelFacts(vocabulary=vocabulary))
    found = draft_violations(ModelFacts(vocabulary=100), speculative, draft)
    assert [one.field for one in found] == [AT + "speculative.draft_artifact"] * bool(text)
    assert not text or text in found[0].description


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({}, 1),
        ({"tensor_parallel": 4}, 4),
        ({"gpus": 8, "tensor_parallel": 4}, 8),
        ({"device": ""}, 0),
        ({"engine": Engine.LLAMACPP, "device": ""}, 0),
        ({"engine": Engine.SYNTHETIC}, 0),
    ],
    ids=str,
)
def test_how_many_gpus_a_worker_gets(change: dict[str, Any], needed: int) -> None:
    assert run(**change).gpus_needed == needed
