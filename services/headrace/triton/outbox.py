"""What waits to be told to an engine, and how it is put together into as few operations as there may be."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.control.deadlines import Budget
from headrace.control.errors import Reason

GENERATES_PER_OPERATION = 64
GENERATE_BYTES_MAX = 4 * 1024 * 1024
"""Input after which no further REQUEST joins an operation; one alone may be larger."""

Answer = asyncio.Future[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the engine contract, ready to be written."""

    op: str
    document: Mapping[str, Any] | None
    tokens: Sequence[int] = ()
    seqs: tuple[int, ...] = ()
    """Sequences that it submits."""
    answered: Answer | None = None


@dataclass(frozen=True, slots=True)
class _Generate:
    """A REQUEST that waits to be sent."""

    request: Mapping[str, Any]
    tokens: Sequence[int]
    input_bytes: int
    budget: Budget | None


class Outbox:
    """What waits for one engine.

    Args:
        on_refused: told of sequences whose time was gone before they could be written, with an ERROR of the contract.
    """

    def __init__(self, on_refused: Callable[[Sequence[int], Mapping[str, Any]], None]) -> None:
        self.calls: list[tuple[str, Answer | None]] = []
        """Operations without a document, with who waits for the answer, if anybody does."""
        self._on_refused = on_refused
        self._generates: deque[_Generate] = deque()
        self._credits: dict[int, int] = {}
        self._cancels: dict[str, list[int]] = {}

    def generate(
        self, request: Mapping[str, Any], tokens: Sequence[int], input_bytes: int, budget: Budget | None
    ) -> None:
        """Add a REQUEST; see EngineClient.generate."""
        self._generates.append(_Generate(request, tokens, input_bytes, budget))

    def credit(self, seq: int, limit: int) -> bool:
        """Raise the limit of a sequence; False when that is nothing new."""
        if limit <= self._credits.get(seq, -1):
            return False
        self._credits[seq] = limit
        return True

    def cancel(self, seqs: Sequence[int], reason: str) -> None:
        """End sequences; they need no credit any more."""
        self._cancels.setdefault(reason, []).extend(seqs)
        for seq in seqs:
            self._credits.pop(seq, None)

    def forget(self, seq: int) -> None:
        """A sequence is over: nobody is left to take its credit."""
        self._credits.pop(seq, None)

    def next(self, now: float) -> Operation | None:
        """Take what waits longest in effect: sequences before their credits and cancels; None when nothing waits.

        Args:
            now: monotonic seconds, the clock of the budgets.
        """
        operation = self._next_generate(now) if self._generates else None
        if operation is not None:
            return operation
        if self._credits:
            limits, self._credits = self._credits, {}
            return Operation("credit", {"limits": list(limits.items())})
        if self._cancels:
            reason, seqs = self._cancels.popitem()
            return Operation("cancel", {"seqs": seqs, "reason": reason})
        if self.calls:
            op, answered = self.calls.pop(0)
            return Operation(op, None, answered=answered)
        return None

    def _next_generate(self, now: float) -> Operation | None:
        """The REQUESTs that go out together; None when the time of all that waited is gone."""
        batch: list[_Generate] = []
        size = 0
        while self._generates and len(batch) < GENERATES_PER_OPERATION:
            first = self._generates[0]
            passed = first.budget.passed(now) if first.budget is not None else None
            if passed is not None:
                self._generates.popleft()
                self._on_refused((int(first.request["seq"]),), _expired(passed))
                continue
            size += first.input_bytes
            if batch and size > GENERATE_BYTES_MAX:
                break
            batch.append(self._generates.popleft())
        if not batch:
            return None
        return Operation(
            "generate",
            {"requests": [_with_times(generate, now) for generate in batch]},
            [token for generate in batch for token in generate.tokens],
            seqs=tuple(int(generate.request["seq"]) for generate in batch),
        )


def _with_times(generate: _Generate, now: float) -> Mapping[str, Any]:
    """The REQUEST with the time that is left now; rounded down, as no hop grants time afresh."""
    budget = generate.budget
    if budget is None:
        return generate.request
    times = {}
    if math.isfinite(budget.deadline_at):
        times["deadline_ms"] = max(1, int(budget.remaining_s(now) * 1000))
    queue_s = budget.queue_remaining_s(now)
    if queue_s is not None:
        times["queue_ms"] = max(1, int(queue_s * 1000))
    return {**generate.request, **times}


def _expired(passed: Reason) -> Mapping[str, Any]:
    """ERROR for a REQUEST whose time was gone before it could be written."""
    if passed is Reason.DEADLINE_EXCEEDED:
        sentence = "The deadline passed before the engine could be asked."
    else:
        sentence = "It waited too long for the engine to be asked."
    return {"reason": passed.value, "message": sentence, "field": "", "metadata": {"stage": "queue"}}
