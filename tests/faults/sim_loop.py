"""Time for a simulation: it passes only while nothing can run, so a run takes no longer than its work."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing can run."""

    def __init__(self) -> None:
        self._virtual = _Idle()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds since it began."""
        return self._virtual.now


class _Idle(selectors.SelectSelector):
    """Waits by moving the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits for ever"
        self.now += max(timeout, 0.0)
        return []
