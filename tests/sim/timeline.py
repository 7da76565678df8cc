"""Virtual time: events in order of their instant, ties in random order; and pipes that carry messages with delays."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

EVENTS_MAX = 30_000


class Timeline:
    """The only clock. Seconds, in whole milliseconds, so that ties are common."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed * 2 + 1)
        self.now = 0.0
        self.events = 0
        self.newest: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        """What was called last, for a trace."""
        self._heap: list[tuple[int, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._now_ms = 0

    @property
    def now_ns(self) -> int:
        """Nanoseconds, for engines."""
        return self._now_ms * 1_000_000

    def later(self, delay_ms: int, call: Callable[..., None], *args: Any) -> None:
        """Call after a delay. At the same instant anything may come first."""
        self._number += 1
        heapq.heappush(self._heap, (self._now_ms + delay_ms, self.rng.random(), self._number, call, args))

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._heap:
            return False
        self.events += 1
        self._now_ms, _, _, call, args = heapq.heappop(self._heap)
        self.now = self._now_ms / 1_000
        self.newest = (call, args)
        call(*args)
        return True


class Pipe:
    """One direction of a connection: what waits together travels together, in order; cut, it loses what it holds."""

    __slots__ = ("_delay_ms", "_deliver", "_is_due", "_time", "_waiting", "is_cut", "newest", "on_lost")

    def __init__(self, time: Timeline, delay_ms: int, deliver: Callable[[list[Any]], None]) -> None:
        self._time = time
        self._delay_ms = delay_ms
        self._deliver = deliver
        self.newest: list[Any] = []
        """What was delivered last, for a trace."""
        self._waiting: list[Any] = []
        self._is_due = False
        self.is_cut = False
        self.on_lost: Callable[[Any], None] | None = None

    def send(self, message: Any) -> None:
        if self.is_cut:
            if self.on_lost is not None:
                self.on_lost(message)
            return
        self._waiting.append(message)
        if not self._is_due:
            self._is_due = True
            self._time.later(self._time.rng.randrange(self._delay_ms + 1), self._flush)

    def cut(self) -> None:
        self.is_cut = True
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.send(message)

    def _flush(self) -> None:
        self._is_due = False
        waiting, self._waiting = self._waiting, []
        self.newest = waiting
        if waiting:
            self._deliver(waiting)
