"""How often something happened lately, in constant space and time. Sans-io: clock readings are arguments."""

from __future__ import annotations

from collections import deque

BUCKETS = 20
"""A window is cut into so many parts; what is forgotten is forgotten by the part."""


class SlidingCount:
    """Events of the last `window_s` seconds, rounded up to a whole part: never fewer than there were.

    Args:
        window_s: length of the window, seconds.
    """

    __slots__ = ("_parts", "_total", "_width_s", "window_s")

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._width_s = window_s / BUCKETS
        self._parts: deque[list[int]] = deque()
        """(number of the part, events), oldest first."""
        self._total = 0

    def add(self, now: float, count: int = 1) -> None:
        """`count` more happened. `now`, monotonic seconds, never goes back by more than a part."""
        part = self._forget(now)
        if self._parts and self._parts[-1][0] >= part:
            self._parts[-1][1] += count
        else:
            self._parts.append([part, count])
        self._total += count

    def total(self, now: float) -> int:
        """Events in the window that ends at `now`."""
        self._forget(now)
        return self._total

    def _forget(self, now: float) -> int:
        part = int(now // self._width_s)
        parts = self._parts
        while parts and parts[0][0] < part - BUCKETS:
            self._total -= parts.popleft()[1]
        return part
