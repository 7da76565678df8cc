"""How long a request may take, and which of its limits passed first.

Time travels as what remains, never as an instant: each process counts down on its own monotonic clock, and hands the
next hop a little less. No hop grants a fresh timeout.

    deadline    the caller's, or the service's default: from receipt to the end
    queue       the service's: longest wait for a slot of an engine, over all attempts; by priority
    execution   the service's: longest run of one attempt, from the engine's admission

Sans-io.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.control.errors import Reason
from headrace.control.priority import Priority

HOP_MARGIN_S = 0.05
"""What a hop keeps for itself of the remaining time, so that it hears the end before its own timer fires..."""
HOP_SHARE = 0.1
"""...but never more than this share of it."""

WAIT_SHARE = 0.8
"""Of the time to a first token, what may be spent in the queue; the rest is for the prompt."""


def longest_wait_s(priority: Priority, *, queue_timeout_s: float, ttft_target_s: float) -> float | None:
    """How long a request may wait for a slot; None: until its deadline.

    Somebody waits for the first token of what is STANDARD or CRITICAL. What is below may wait for its turn.

    Args:
        priority: of the request.
        queue_timeout_s: the longest wait of any; 0: none is set.
        ttft_target_s: when the first token should be there where somebody waits for it; 0: nothing is promised.
    """
    limits_s = [queue_timeout_s] if queue_timeout_s else []
    if ttft_target_s and priority >= Priority.STANDARD:
        limits_s.append(WAIT_SHARE * ttft_target_s)
    return min(limits_s, default=None)


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one request."""

    received_at: float
    """Monotonic seconds, like every time here."""
    deadline_at: float
    queue_s: float | None = None
    execution_s: float | None = None

    def remaining_s(self, now: float) -> float:
        """Seconds to the deadline; 0 once it has passed."""
        return max(0.0, self.deadline_at - now)

    def for_next_hop_s(self, now: float) -> float:
        """Seconds that the next hop gets."""
        remaining_s = self.remaining_s(now)
        return remaining_s - min(HOP_MARGIN_S, HOP_SHARE * remaining_s)

    def queue_remaining_s(self, now: float) -> float | None:
        """Seconds that it may still wait for a slot; None: no limit but the deadline."""
        return None if self.queue_s is None else max(0.0, self.received_at + self.queue_s - now)

    def passed(self, now: float, *, admitted_at: float | None = None) -> Reason | None:
        """Which limit has passed, the caller's first; None: go on.

        Args:
            now: monotonic seconds.
            admitted_at: when an engine began with the current attempt; None while it waits.
        """
        if now >= self.deadline_at:
            return Reason.DEADLINE_EXCEEDED
        if admitted_at is None:
            if self.queue_s is not None and now >= self.received_at + self.queue_s:
                return Reason.QUEUE_TIMEOUT
        elif self.execution_s is not None and now >= admitted_at + self.execution_s:
            return Reason.EXECUTION_TIMEOUT
        return None
