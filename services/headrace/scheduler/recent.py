"""How many things happened of late: what load reports share between Routers."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
_STEP_S = 0.5


class Recent:
    """A count over the last `WINDOW_S` seconds, in steps of half a second."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        """One more happened."""
        step = int(now / _STEP_S)
        if self._steps and self._steps[-1][0] == step:
            self._steps[-1] = step, self._steps[-1][1] + 1
        else:
            self._steps.append((step, 1))
        self._total += 1

    def count(self, now: float) -> int:
        """How many."""
        oldest = int((now - WINDOW_S) / _STEP_S)
        while self._steps and self._steps[0][0] <= oldest:
            self._total -= self._steps.popleft()[1]
        return self._total
