"""Runs the shapes that an engine declares once, as ordinary sequences through its own path, before it may serve.

The sequences belong to nobody: what is generated is read and dropped. docs/engine-contract.md has the declaration.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.control import warm_shapes
from headrace.control.warm_shapes import WarmSequence
from headrace.engine.contract import StepBatch
from headrace.triton.event_stream import EngineLost

_STRIDE = 7919
"""Prompts take every so-many-th token of the vocabulary: no two begin alike, so that no prefix is reused."""


class Engine(Protocol):
    """What is needed of `EngineClient`."""

    def generate(self, request: Mapping[str, Any], tokens: Sequence[int] = (), *, input_bytes: int = 0) -> None:
        """Submit one REQUEST."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What an engine says in its hello that it will run."""

    chunk: int
    batches: tuple[int, ...]
    context_tokens: int
    vocabulary: int

    @classmethod
    def of(cls, hello: Mapping[str, Any]) -> Declared | None:
        """Read it; None: the engine declares no shapes.

        Raises:
            EngineLost: what it declares is not what the contract says.
        """
        shapes = hello.get("shapes")
        if shapes is None:
            return None
        try:
            batches = tuple(int(size) for size in shapes["decode"])
            found = cls(int(shapes["prefill"]), batches, int(hello["context_tokens"]), int(hello["vocabulary"]))
        except (KeyError, TypeError, ValueError):
            raise EngineLost("the engine's hello declares shapes that cannot be read") from None
        if min(found.chunk, found.context_tokens, found.vocabulary, *batches) < 1:
            raise EngineLost("the engine's hello declares shapes that cannot be run")
        return found


class WarmUp:
    """One warm-up; it is told what the engine says meanwhile."""

    def __init__(self, engine: Engine, declared: Declared) -> None:
        self._engine = engine
        self._declared = declared
        self._prompts = itertools.count(1)
        self._waiting: set[int] = set()
        self._failure = ""
        self._news = asyncio.Event()

    async def run(self) -> str:
        """Run every shape; returns what was run and how long it took, one sentence.

        Raises:
            EngineLost: a shape could not be run, and why.
        """
        told = self._declared
        chunk_s = await self._time("the prefill chunk", warm_shapes.prefill(told.chunk, told.context_tokens))
        said = [f"chunk of {told.chunk} in {_ms(chunk_s)}"]
        batches = warm_shapes.decode(told.batches, told.chunk, told.context_tokens)
        if batches:
            took_s = await self._time("the decoding batches", batches)
            said.append(f"batches of {', '.join(map(str, sorted(set(told.batches))))} in {_ms(took_s)}")
        whole = warm_shapes.full_context(told.context_tokens, chunk=told.chunk, chunk_s=chunk_s)
        if whole:
            took_s = await self._time("the full context", whole)
            said.append(f"context of {told.context_tokens} in {_ms(took_s)}")
        return f"warmed up: {'; '.join(said)}"

    def on_batch(self, batch: StepBatch) -> None:
        """One response of the event stream."""
        for event in batch.events:
            kind, seq = event.get("type"), event.get("seq")
            if kind == "finished" and seq in self._waiting:
                self._end(seq, "" if event.get("reason") == "length" else _why(event))
            elif kind == "refused" and seq in self._waiting:
                self._end(seq, _why(event))

    def on_refused(self, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        """Sequences were refused before the engine began with them."""
        for seq in seqs:
            self._end(seq, str(error.get("message") or "refused"))

    async def _time(self, what: str, group: Sequence[WarmSequence]) -> float:
        started = time.monotonic()
        for one in group:
            self._submit(one)
        while self._waiting and not self._failure:
            self._news.clear()
            await self._news.wait()
        if self._failure:
            raise EngineLost(f"warming up with {what} failed: {self._failure}")
        return time.monotonic() - started

    def _submit(self, one: WarmSequence) -> None:
        seq = secrets.randbits(62) + 1
        self._waiting.add(seq)
        first = next(self._prompts) * (_STRIDE + 2)
        tokens = [(first + n * _STRIDE) % self._declared.vocabulary for n in range(one.prompt_tokens)]
        self._engine.generate(
            {
                "seq": seq,
                "prompt_tokens": len(tokens),
                "max_tokens": one.max_tokens,
                "sampling": {"temperature": 1.0, "top_p": 0.9, "seed": 1},
                "ignore_eos": True,
                "credit": -1,
            },
            tokens,
            input_bytes=4 * len(tokens),
        )

    def _end(self, seq: int, failure: str) -> None:
        self._waiting.discard(seq)
        self._failure = self._failure or failure
        self._news.set()


def _why(event: Mapping[str, Any]) -> str:
    error = event.get("error") or {}
    return str(error.get("message") or f"it ended with {event.get('reason')}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
