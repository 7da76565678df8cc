"""Decides which of a sequence's limits of time has passed: the caller's deadline, the wait, the execution.

Sans-io. `queue_ms` bounds the wait for the first admission, `execution_ms` everything after it; the deadline holds
throughout and is told where another one has passed, too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from headrace.engine.request import DEADLINE_EXCEEDED, QUEUE_TIMEOUT, RefusalError
from headrace.engine.sequence import Sequence


class Limit(enum.Enum):
    """A limit of time; the value is the reason of `finished`, where there is one."""

    DEADLINE = "deadline"
    QUEUE = "queue"
    EXECUTION = "timeout"


def passed(sequence: Sequence, now_ns: int) -> Limit | None:
    """The limit that ends the sequence now."""
    request = sequence.request
    if 0 < request.deadline_ns <= now_ns:
        return Limit.DEADLINE
    if not sequence.is_begun:
        return Limit.QUEUE if 0 < request.queue_until_ns <= now_ns else None
    return Limit.EXECUTION if 0 < _execution_end_ns(sequence) <= now_ns else None


class LimitWatch:
    """When somebody has to be looked at: never too late, at most once in vain."""

    def __init__(self) -> None:
        self.next_ns = 0
        """0: nobody has a limit."""

    def watch(self, sequence: Sequence) -> None:
        """It is new, or a limit of it has begun to count."""
        at = _next_ns(sequence)
        if at and (not self.next_ns or at < self.next_ns):
            self.next_ns = at

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Only these are left."""
        self.next_ns = 0
        for sequence in sequences:
            self.watch(sequence)


def _next_ns(sequence: Sequence) -> int:
    """When the first of its limits passes; 0 when it has none."""
    request = sequence.request
    own = _execution_end_ns(sequence) if sequence.is_begun else request.queue_until_ns
    return min((at for at in (request.deadline_ns, own) if at), default=0)


def refusal(limit: Limit, sequence: Sequence, now_ns: int) -> RefusalError:
    """What is said of a sequence that waited too long to begin."""
    if limit is Limit.DEADLINE:
        return RefusalError(DEADLINE_EXCEEDED, "The deadline passed in the queue.")
    waited = max(0, now_ns - sequence.request.received_ns) // 1_000_000
    return RefusalError(QUEUE_TIMEOUT, "The engine's queue was too long.", metadata={"waitedMs": waited})


def _execution_end_ns(sequence: Sequence) -> int:
    execution = sequence.request.execution_ns
    return sequence.admitted_ns + execution if execution else 0
