"""The order of refusal under load: the lowest priority that is admitted now.

    pressure      < 1      1       2       3           (age of the queue over its target, or use of it)
    admits from   all      BATCH   STANDARD CRITICAL
    refused       none     SHEDDABLE, then BATCH too, then STANDARD too; CRITICAL never by this

A level is entered when the pressure has been over its threshold for `up_s`, and left when it has been under RELEASE of
it for `down_s`: up quickly, down slowly, one level at a time, so that it does not flap. CRITICAL is refused only by
what bounds everything: a full queue.

A priority is refused for the sake of higher ones only: `floor` lowers the level to the highest priority that waits. A
queue of STANDARD alone refuses by its bounds; to refuse all of it, until it has drained, would leave slots idle.

Sans-io: times are arguments, seconds. O(1).
"""

from __future__ import annotations

from headrace.control.priority import Priority

UP_S = 1.0
DOWN_S = 5.0
RELEASE = 0.5
"""A level is left below this share of the pressure that enters it."""
THRESHOLDS = (1.0, 2.0, 3.0)
"""Pressure that enters the levels: of refusing SHEDDABLE, BATCH, STANDARD."""


class Brownout:
    """The level of one queue. Pressure has no unit: 1 is where it begins to hurt.

    Args:
        up_s: how long the pressure has to last to raise the level by one.
        down_s: how long its absence has to last to lower it by one.
    """

    __slots__ = ("_down_s", "_level", "_over_since", "_under_since", "_up_s")

    def __init__(self, *, up_s: float = UP_S, down_s: float = DOWN_S) -> None:
        assert up_s >= 0
        assert down_s >= 0
        self._up_s = up_s
        self._down_s = down_s
        self._level = 0
        self._over_since: float | None = None
        self._under_since: float | None = None

    @property
    def admits_from(self) -> Priority:
        """The lowest priority that is admitted."""
        return Priority(Priority.SHEDDABLE + self._level)

    def observe(self, pressure: float, now: float) -> Priority:
        """The pressure at this moment; a few times a second. Returns `admits_from`."""
        if self._level < len(THRESHOLDS) and pressure >= THRESHOLDS[self._level]:
            self._under_since = None
            if self._over_since is None:
                self._over_since = now
            if now - self._over_since >= self._up_s:
                self._level += 1
                self._over_since = now
        elif self._level and pressure < RELEASE * THRESHOLDS[self._level - 1]:
            self._over_since = None
            if self._under_since is None:
                self._under_since = now
            if now - self._under_since >= self._down_s:
                self._level -= 1
                self._under_since = now
        else:
            self._over_since = self._under_since = None
        return self.admits_from


def floor(admits_from: Priority, highest_waiting: Priority | None) -> Priority:
    """What is admitted where nobody of a higher priority than `highest_waiting` waits; None: nobody waits at all."""
    return Priority.SHEDDABLE if highest_waiting is None else min(admits_from, highest_waiting)


def pressure_of(*, queue_age_s: float, target_s: float, waiting: int, waiting_max: int) -> float:
    """How hard a queue is pressed.

    By age: 1 at twice the target, which a good queue passes only in bursts; 2 at four, 3 at six. By use: nothing below
    three quarters full; 1 there, 2 at 7/8, 3 where it is full.
    """
    by_age = queue_age_s / (2 * target_s)
    share = waiting / waiting_max if waiting_max else 0.0
    by_use = 1 + (share - 0.75) * 8 if share >= 0.75 else 0.0
    return max(by_age, by_use)
