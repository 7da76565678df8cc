"""Keeps Python's collector of cyclic garbage away from what lives as long as the process, or nearly so.

A full collection looks at every container there is: at ten thousand replicas that takes a tenth of a second, in which
nobody is answered. What is frozen is not looked at, and still freed as soon as nobody refers to it, unless it is part
of a cycle; so it is collected once before.
"""

from __future__ import annotations

import gc

from headrace.control.snapshot import RoutingSnapshot

GROWTH = 2.0
"""Frozen again once there is so many times as much."""
SIZE_MIN = 1_000
"""Replicas below which a full collection costs little."""


def keep_start() -> None:
    """Freeze what was made until now, modules above all: looking through it takes 30 ms, now and then, in a Router."""
    gc.collect()
    gc.freeze()


class LongLived:
    """What one process keeps of snapshots; give it each of them, once it is used."""

    def __init__(self) -> None:
        self._frozen = 0

    def take(self, snapshot: RoutingSnapshot) -> None:
        """Freeze what there is if it is much more than at the last time."""
        size = len(snapshot.replicas)
        if size >= max(SIZE_MIN, GROWTH * self._frozen):
            self._frozen = size
            gc.collect()
            gc.freeze()
