"""Whether a queue stands: control of the age of what waits, after CoDel.

A burst makes a queue that drains again: it costs a little time, keeps the engine busy, and is left alone. A queue in
which even the least wait stays above the target over a whole interval stands: everybody waits, and nobody gains. Then
one entry is shed, the oldest of the lowest class, and the next ones ever faster, by the square root as in CoDel, until
a wait has been below the target again.

    waits: of those that leave for the engine, and of the oldest of the highest class that waits
    least of them > target for `interval_s`         -> standing: shed
    one wait <= target, or an empty queue           -> good: leave alone

The measure is the least wait, not the mean: one short wait shows that the queue drained. It is one measure for all
classes: that low ones wait long while high ones are served at once is what priorities are for, and sheds nobody.
Only priorities below SHED_BELOW are shed, and only while a higher one waits: what was accepted is kept where nobody
gains by its end. Where STANDARD stands, new ones are refused at the door (headrace.control.brownout).

Sans-io: times are arguments, seconds. Each decision is O(1).
"""

from __future__ import annotations

import math

from headrace.control.priority import Priority

TARGET_S = 2.0
INTERVAL_S = 10.0
SHED_BELOW = Priority.STANDARD
"""Lowest priority that is never shed."""
SHED_MAX = 4
"""Most entries in one look."""


class QueueAge:
    """The control of one queue.

    Args:
        target_s: a wait that is always good enough.
        interval_s: how long the least wait has to stay above it; several times the target, since it must be longer
            than a burst that is worth keeping.
    """

    __slots__ = ("_above_since", "_count", "_interval_s", "_next_at", "_target_s")

    def __init__(self, *, target_s: float = TARGET_S, interval_s: float = INTERVAL_S) -> None:
        assert target_s > 0
        assert interval_s > 0
        self._target_s = target_s
        self._interval_s = interval_s
        self._above_since: float | None = None
        self._next_at = math.inf
        self._count = 0

    @property
    def is_standing(self) -> bool:
        """Whether the queue has stood for an interval and does still."""
        return self._count > 0

    def departed(self, wait_s: float, now: float) -> None:
        """An entry left the queue for the engine, after `wait_s` in it."""
        self._look(wait_s, now)

    def emptied(self) -> None:
        """Nobody waits."""
        self._above_since, self._next_at, self._count = None, math.inf, 0

    def due(self, head_age_s: float | None, now: float) -> int:
        """How many entries to shed now, the oldest of the lowest class first.

        Args:
            head_age_s: for how long the oldest entry of the highest class that waits has waited; None: nobody waits.
                It stands for a departure where none happens: a queue that does not move must not look good.
            now: monotonic seconds.
        """
        if head_age_s is None:
            self.emptied()
            return 0
        self._look(head_age_s, now)
        due = 0
        while self._next_at <= now and due < SHED_MAX:
            self._count += 1
            self._next_at += self._interval_s / math.sqrt(self._count)
            due += 1
        if due == SHED_MAX:
            self._next_at = max(self._next_at, now)  # after a pause of this process, no avalanche
        return due

    def _look(self, wait_s: float, now: float) -> None:
        if wait_s <= self._target_s:
            self.emptied()
        elif self._above_since is None:
            self._above_since = now
            self._next_at = now + self._interval_s
