"""A LoRA adapter on the real model in llama.cpp: it changes the output, and switched off it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.harness import Hand, prepared
from headrace.cli.weights import default_model
from headrace.engine.config import ConfigError, EngineConfig, parse_config
from headrace.engine.llamacpp import LlamaBackend
from support.gguf import gguf, lora, lora_of

PROMPT = "1\n2\n3\n4\n5\n6\n"
RANK = 2


@pytest.fixture(scope="module")
def model() -> Path:
    return default_model(lambda text: None)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("lora") / "lora.gguf"
    path.write_bytes(lora_of(model, layer=2))
    return path


def config(model: Path, **changes: object) -> EngineConfig:
    settings = {"engine": "llamacpp", "model_path": str(model), "context_tokens": 128, "slots": 1, "threads": 1}
    return parse_config({**settings, **changes})


def answer(settings: EngineConfig) -> list[int]:
    backend = LlamaBackend(settings, lanes=2)
    hand = Hand(backend, slots=1, kv_cells=settings.kv_cells)
    hand.submit(prepared(backend, 1, PROMPT, max_tokens=12, ignore_eos=True))
    hand.run()
    ids, _ = hand.output(1)
    hand.loop.close()
    backend.close()
    return ids


@pytest.fixture(scope="module")
def base(model: Path) -> Iterator[list[int]]:
    return answer(config(model))


def test_the_adapter_changes_the_answer(model: Path, adapter: Path, base: list[int]) -> None:
    tuned = answer(config(model, adapter_path=str(adapter)))
    assert len(tuned) == len(base) == 12
    assert tuned != base
    assert answer(config(model, adapter_path=str(adapter))) == tuned


def test_an_adapter_of_scale_0_gives_the_bases_answer(model: Path, adapter: Path, base: list[int]) -> None:
    assert answer(config(model, adapter_path=str(adapter), adapter_scale=0.0)) == base


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "not a file"),
        (b"GGUF but not really", "no LoRA adapter of this model"),
        (gguf({"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}), "of this model"),
    ],
    ids=["missing", "no adapter", "of another architecture"],
)
def test_what_is_no_adapter_of_this_model_fails_the_load(
    model: Path, tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "lora.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        LlamaBackend(config(model, adapter_path=str(path)), lanes=2)


def test_an_adapter_of_another_shape_fails_the_load(model: Path, tmp_path: Path) -> None:
    a, b = np.ones((RANK, 64), np.float32), np.ones((64, RANK), np.float32)
    path = tmp_path / "lora.gguf"
    path.write_bytes(lora("gemma3", {"blk.2.ffn_down.weight": (a, b)}, alpha=16.0))
    with pytest.raises(ConfigError, match="no LoRA adapter of this model"):
        LlamaBackend(config(model, adapter_path=str(path)), lanes=2)


def test_an_engine_without_weights_takes_none() -> None:
    with pytest.raises(ConfigError, match="no weights to adapt"):
        parse_config({"engine": "synthetic", "adapter_path": "/a.gguf"})
