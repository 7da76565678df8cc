"""What has been heard of each sequence, and the rules that hold for every one of them, whatever a test is about.

`Watch` is the engine client's sink. A broken rule is kept and fails the test when it asks for anything, or at its end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.engine.contract import Part, StepBatch

REASONS = frozenset({"stop", "length", "cancelled", "deadline", "timeout", "error"})
ERRORS = frozenset(
    {
        "INVALID_REQUEST",
        "CONTEXT_LENGTH_EXCEEDED",
        "CHAT_TEMPLATE_MISSING",
        "OVERLOADED",
        "DEADLINE_EXCEEDED",
        "QUEUE_TIMEOUT",
        "ENGINE_FAILED",
    }
)
USAGE = frozenset({"prompt", "cached", "generated", "emitted", "proposed", "reasoning"})
FOREVER = 2**62


@dataclass
class Heard:
    """One sequence, as its reader knows it. `credit` is the highest limit that it was sent."""

    seq: int
    credit: int = FOREVER
    wants_logprobs: bool = False
    ids: list[int] = field(default_factory=list)
    text: bytes = b""
    pieces: list[tuple[list[int], bytes]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    admitted: dict[str, Any] | None = None
    preempted: int = 0
    resumed: int = 0
    finished: dict[str, Any] | None = None
    refused: dict[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.refused is not None

    @property
    def reason(self) -> str:
        """Of its end; "" while it has none."""
        return str(self.finished["reason"]) if self.finished is not None else ""


class Watch:
    """`EngineSink` that checks what it is told."""

    def __init__(self) -> None:
        self.heard: dict[int, Heard] = {}
        self.broken: list[str] = []
        self.sequences: list[list[int]] = []
        self.alive: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    def expect(self, request: Mapping[str, Any]) -> Heard:
        """A sequence that is submitted now."""
        credit = request.get("credit", -1)
        heard = Heard(
            request["seq"],
            credit=FOREVER if credit == -1 else credit,
            wants_logprobs=request.get("top_logprobs") is not None,
        )
        self.heard[heard.seq] = heard
        return heard

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        """Wait until it holds; what was broken until then is the test's failure."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.assert_kept()
                self._news.clear()
                await self._news.wait()
        self.assert_kept()

    def assert_kept(self) -> None:
        """Raise the first broken rule."""
        assert not self.broken, self.broken[0]

    def on_lost(self, reading: asyncio.Task[None]) -> None:
        """Nobody who waits will hear more."""
        if not reading.cancelled():
            self.broken.append(f"the engine was lost: {reading.exception()}")
            self._news.set()

    def on_batch(self, batch: StepBatch) -> None:
        try:
            self._take(batch)
        except Exception as error:
            self.broken.append(f"{type(error).__name__}: {error}")
        self._news.set()

    def on_refused(self, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        for seq in seqs:
            self._refuse(seq, dict(error))
        self._news.set()

    def _take(self, batch: StepBatch) -> None:
        """In the order that the contract gives: beginnings, columns, every other event."""
        beginnings = ("hello", "admitted", "resumed")
        for event in batch.events:
            if event["type"] in beginnings:
                self._event(event)
        for part in batch.parts():
            self._part(part)
        for event in batch.events:
            if event["type"] not in beginnings:
                self._event(event)

    def _live(self, seq: int) -> Heard:
        heard = self.heard.get(seq)
        assert heard is not None, f"sequence {seq} is not ours"
        assert not heard.is_over, f"something came of {seq} after its end"
        return heard

    def _part(self, part: Part) -> None:
        heard = self._live(part.seq)
        assert heard.admitted is not None, f"output of {part.seq} came before it was admitted"
        part.text.decode("utf-8")
        heard.ids += part.token_ids
        heard.text += part.text
        heard.pieces.append((part.token_ids, part.text))
        assert len(heard.ids) <= heard.credit, f"{part.seq} has {len(heard.ids)} tokens for a credit of {heard.credit}"
        if heard.wants_logprobs:
            assert part.logprobs is not None or not part.token_ids, "there are no logprobs for one that asked"
            heard.logprobs += part.logprobs or []
            heard.top += part.top or []
        else:
            assert all(math.isnan(value) for value in part.logprobs or []), "logprobs for one that did not ask"

    def _event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "alive":
                self.alive.append(event["stats"])
            case "sequences":
                self.sequences.append(event["seqs"])
            case "admitted":
                heard = self._live(event["seq"])
                assert heard.admitted is None, "admitted twice"
                assert 0 <= event["cached_tokens"] <= event["prompt_tokens"]
                heard.admitted = event
            case "preempted":
                heard = self._live(event["seq"])
                heard.preempted = max(heard.preempted, event["preemptions"])
            case "resumed":
                heard = self._live(event["seq"])
                heard.resumed = max(heard.resumed, event["preemptions"])
            case "refused":
                self._refuse(event["seq"], event["error"])
            case "finished":
                self._finish(event)
            case kind:
                assert kind == "hello", f"the contract has no event {kind}"

    def _refuse(self, seq: int, error: dict[str, Any]) -> None:
        heard = self._live(seq)
        assert heard.admitted is None, "refused after it was admitted"
        assert_error(error)
        heard.refused = error

    def _finish(self, event: dict[str, Any]) -> None:
        heard = self._live(event["seq"])
        heard.finished = event
        reason, usage, timing = event["reason"], event["usage"], event["timing_ns"]
        assert reason in REASONS
        assert (event["stop"] is not None) == (reason == "stop")
        if reason == "error":
            assert_error(event["error"])
        else:
            assert not event["error"]
        assert usage.keys() == USAGE
        assert usage["emitted"] == len(heard.ids), f"{usage['emitted']} told, {len(heard.ids)} came"
        assert usage["generated"] >= usage["emitted"]
        if heard.admitted is not None:
            told = heard.admitted
            assert usage["prompt"] == told["prompt_tokens"], "the prompt has another length in the end"
            # An engine that schedules by itself says only later how much it found.
            assert told["cached_tokens"] <= usage["cached"] <= usage["prompt"], "less was cached than was told"
        order = [timing[name] for name in ("received", "admitted", "first_token", "stopped", "finished")]
        known = [moment for moment in order if moment]
        assert known == sorted(known), f"times are out of order: {timing}"


def assert_error(error: Mapping[str, Any]) -> None:
    """An ERROR of the contract."""
    assert error.keys() == {"reason", "message", "field", "metadata"}
    assert error["reason"] in ERRORS
    assert error["message"].endswith(".")
    assert "Traceback" not in error["message"]
    assert isinstance(error["metadata"], dict)
