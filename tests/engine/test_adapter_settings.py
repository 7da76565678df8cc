"""A revision's settings on their way into the GPU engines' libraries, which are FAKES here; see test_adapters.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.engine.config import MANAGED_ENGINES, ConfigError, EngineConfig, Speculative, parse_config
from headrace.engine.signatures import parameters
from support import fake_model, fake_tensorrt_llm
from support.served_adapter import Served, own_environment

Start = Callable[..., Served]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    with own_environment():
        yield


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    up: list[Served] = []

    def begin(kind: str, **settings: Any) -> Served:
        up.append(Served(kind, fake_model.write_folder(tmp_path / "model"), **settings))
        return up[-1]

    yield begin
    for one in up:
        one.engine.stop()


@pytest.mark.parametrize(
    ("kind", "method", "expected"),
    [
        ("vllm", "ngram",
         {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 5}),
        ("vllm", "draft_model", {"method": "draft_model", "num_speculative_tokens": 3, "model": "/d"}),
        ("vllm", "eagle3", {"method": "eagle3", "num_speculative_tokens": 3, "model": "/d"}),
        ("sglang", "draft_model",
         {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "/d", "speculative_num_steps": 3,
          "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}),
        ("sglang", "eagle3",
         {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/d", "speculative_num_steps": 3,
          "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}),
        ("tensorrt_llm", "ngram", {"max_draft_len": 3, "max_matching_ngram_size": 5, "is_public_pool": False}),
        ("tensorrt_llm", "draft_model", {"max_draft_len": 3, "speculative_model": "/d"}),
        ("tensorrt_llm", "eagle3", {"max_draft_len": 3, "speculative_model_dir": "/d"}),
    ],
)  # fmt: skip
def test_who_drafts_is_said_in_the_library_s_own_words(
    start: Start, kind: str, method: str, expected: dict[str, Any]
) -> None:
    asked = Speculative(method, 3, "" if method == "ngram" else "/d", 5)
    args = start(kind, speculative=asked).library.args
    if kind == "vllm":
        assert args.speculative_config == expected
    elif kind == "sglang":
        assert {name: value for name, value in args.given.items() if name.startswith("speculative")} == expected
    else:
        assert args["speculative_config"].given == expected
        assert args.get("disable_overlap_scheduler", False) is (method == "ngram")


def test_a_later_release_s_name_for_eagle_is_taken_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    install = fake_tensorrt_llm.install

    def later() -> None:
        install()
        sys.modules["tensorrt_llm.llmapi"].Eagle3DecodingConfig = (  # type: ignore[attr-defined]
            fake_tensorrt_llm.Eagle3DecodingConfig
        )

    monkeypatch.setattr(fake_tensorrt_llm, "install", later)
    args = start("tensorrt_llm", speculative=Speculative("eagle3", 2, "/d")).library.args
    assert isinstance(args["speculative_config"], fake_tensorrt_llm.Eagle3DecodingConfig)
    assert args["speculative_config"].given == {"max_draft_len": 2, "speculative_model": "/d"}


def test_drafts_out_of_what_others_said_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must not be ngram on sglang"):
        Served("sglang", fake_model.write_folder(tmp_path), speculative=Speculative("ngram", 2))


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"method": "magic", "draft_tokens": 2}, "method must be one of ngram, draft_model, eagle3"),
        ({"method": "ngram"}, "must have draft_tokens"),
        ({"method": "ngram", "draft_tokens": 0}, "draft_tokens must be an integer of at least 1"),
        ({"method": "ngram", "draft_tokens": True}, "draft_tokens must be an integer of at least 1"),
        ({"method": "ngram", "draft_tokens": 2, "draft_path": "/d"}, "draft_path must name the folder"),
        ({"method": "eagle3", "draft_tokens": 2}, "draft_path must name the folder"),
        ({"method": "ngram", "draft_tokens": 2, "depth": 1}, "no depth"),
        ([], "must be an object or null"),
    ],
)
def test_a_wrong_document_is_one_sentence(document: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"engine": "vllm", "model_path": "/m", "speculative": document})


def test_a_right_document_is_a_value() -> None:
    document = {"method": "draft_model", "draft_tokens": 4, "draft_path": "/d"}
    config = parse_config({"engine": "vllm", "model_path": "/m", "speculative": document})
    assert config.speculative == Speculative("draft_model", 4, "/d")
    assert EngineConfig("synthetic").speculative is None


@pytest.mark.parametrize("has_moved", [False, True])
def test_lora_s_configuration_is_found_where_the_release_has_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_moved: bool
) -> None:
    adapter = tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 20}')
    install = fake_tensorrt_llm.install

    def moved() -> None:
        install()
        for name in ("_torch", "_torch.peft", "_torch.peft.lora", "_torch.peft.lora.config"):
            sys.modules[f"tensorrt_llm.{name}"] = ModuleType(name)
        where = sys.modules["tensorrt_llm._torch.peft.lora.config"]
        where.LoraConfig = fake_tensorrt_llm.MovedLoraConfig  # type: ignore[attr-defined]
        del sys.modules["tensorrt_llm.lora_helper"]

    if has_moved:
        monkeypatch.setattr(fake_tensorrt_llm, "install", moved)
    config = start("tensorrt_llm", adapter_path=str(adapter)).library.args["lora_config"]
    assert type(config) is (fake_tensorrt_llm.MovedLoraConfig if has_moved else fake_tensorrt_llm.LoraConfig)
    assert config.given == {"lora_dir": [str(adapter)], "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 20}


def test_a_release_with_neither_place_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tmp_path / "lora"
    adapter.mkdir()
    install = fake_tensorrt_llm.install

    def neither() -> None:
        install()
        del sys.modules["tensorrt_llm.lora_helper"]

    monkeypatch.setattr(fake_tensorrt_llm, "install", neither)
    with pytest.raises(ConfigError, match="LoraConfig in a place that is not known"):
        Served("tensorrt_llm", fake_model.write_folder(tmp_path / "model"), adapter_path=str(adapter))


@pytest.mark.parametrize("kind", MANAGED_ENGINES)
def test_types_and_eagerness_reach_the_library(start: Start, kind: str) -> None:
    args = start(kind, dtype="float16", eager=True, gpus="3,4").library.args
    given = args if isinstance(args, dict) else args.given
    assert given["dtype"] == "float16"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,4"
    eager = {"vllm": "enforce_eager", "sglang": "disable_cuda_graph"}
    assert given[eager[kind]] is True if kind in eager else given["cuda_graph_config"] is None


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("vllm", [1000, 750, 500, 500, 250]),
        ("sglang", [1000, 750, 500, 500, 250]),
        ("tensorrt_llm", [0.0, 0.25, 0.5, 0.5, 0.75]),
    ],
)
def test_a_priority_of_the_contract_is_one_of_the_library_s(
    start: Start, monkeypatch: pytest.MonkeyPatch, kind: str, numbers: list[float]
) -> None:
    """vLLM and SGLang serve the lower number first, TensorRT-LLM the higher one, in releases that take one."""
    if kind == "tensorrt_llm":
        call = fake_tensorrt_llm.LLM.generate_async

        def later(self: Any, priority: float = 0.5, **given: Any) -> Any:
            output = call(self, **given)
            self.requests[-1] = {**given, "priority": priority}
            return output

        names = call.__signature__.parameters  # type: ignore[attr-defined]
        one = next(iter(names.values())).replace(name="priority", default=0.5)
        later.__signature__ = call.__signature__.replace(  # type: ignore[attr-defined]
            parameters=[*names.values(), one.replace(kind=one.KEYWORD_ONLY)]
        )
        monkeypatch.setattr(fake_tensorrt_llm.LLM, "generate_async", later)
        parameters.cache_clear()
    served = start(kind)
    for seq, priority in enumerate((1, 2, 3, None, 4), 1):
        served.answer(seq, prompt=" the", max_tokens=1, priority=priority)
    assert [request["priority"] for request in served.library.requests] == numbers
    if kind == "vllm":
        assert served.library.args.scheduling_policy == "priority"
    elif kind == "sglang":
        given = served.library.args.given
        assert given["enable_priority_scheduling"] is given["schedule_low_priority_values_first"] is True
        assert (given["retraction_policy"], given["disable_priority_preemption"]) == ("priority", True)
    parameters.cache_clear()
