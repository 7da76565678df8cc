"""The tiny Llama that other tests rely on, in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.harness import Hand, prepared
from headrace.engine.config import parse_config
from headrace.engine.llamacpp import LlamaBackend
from support import tiny_llama


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LlamaBackend]:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_llama.model_gguf())
    settings = {"engine": "llamacpp", "model_path": str(path), "context_tokens": 512, "slots": 1, "threads": 1}
    backend = LlamaBackend(parse_config(settings), lanes=2)
    yield backend
    backend.close()


def test_each_byte_is_followed_by_its_successor(backend: LlamaBackend) -> None:
    hand = Hand(backend, slots=1, kv_cells=512)
    hand.submit(prepared(backend, 1, "ab", max_tokens=2 * len(tiny_llama.CYCLE)))
    hand.run()
    ids, text = hand.output(1)
    token = tiny_llama.token_of(ord("b"))
    for found in ids:
        token = tiny_llama.following(token)
        assert found == token
    assert text.encode() == (tiny_llama.CYCLE * 3)[2 : 2 + len(ids)]


def test_it_ends_behind_the_end_of_a_line(backend: LlamaBackend) -> None:
    hand = Hand(backend, slots=1, kv_cells=512)
    hand.submit(prepared(backend, 1, "x\n", max_tokens=5))
    hand.run()
    assert hand.finished(1)["stop"] == {"kind": "eos", "value": tiny_llama.END}


def test_a_text_may_have_more_tokens_than_bytes(backend: LlamaBackend) -> None:
    """The vocabulary has no blank, so each is three tokens."""
    assert len(backend.tokenize(" " * 50)) == 1 + 150
