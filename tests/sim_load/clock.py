"""A virtual clock: what is to happen, in order of time and, at one instant, in the order in which it was asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Seconds from 0. Nothing here knows the real time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Calls made."""
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call then, or at once where that is past."""
        self._number += 1
        heapq.heappush(self._due, (max(when, self.now), self._number, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call so much later."""
        self.at(self.now + delay_s, call, *arguments)

    def run(self, until: float) -> None:
        """Let everything happen up to then."""
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(due)
            self.events += 1
            call(*arguments)
        self.now = max(self.now, until)
