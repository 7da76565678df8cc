"""Decides which paused sequences lose their slot and KV to the head of the queue.

Sans-io. The lowest priority is asked first, in it the longest paused: their readers are the least likely to come back
soon. Nobody is preempted
in vain: either the head fits afterwards, or everybody keeps what they have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace.engine.request import PRIORITY


class Paused(NamedTuple):
    """A paused sequence: the cells that it reserves, since when it has been paused (ns), and its priority."""

    seq: int
    cells: int
    since_ns: int
    priority: int = PRIORITY


def choose(paused: Iterable[Paused], *, slots: int, cells: int, ripe_ns: int) -> list[int]:
    """The sequences to preempt for `slots` and `cells` that are missing; empty when that cannot be had.

    Those paused after `ripe_ns` are left alone.
    """
    chosen: list[Paused] = []
    got = 0
    ripe = [one for one in paused if one.since_ns <= ripe_ns]
    for one in sorted(ripe, key=lambda one: (one.priority, one.since_ns)):
        chosen.append(one)
        got += one.cells
        if len(chosen) >= slots and got >= cells:
            return _needed(chosen, slots, got - cells)
    return []


def _needed(chosen: list[Paused], slots: int, spare: int) -> list[int]:
    """Without those that turned out to be too small to matter, the last chosen spared first."""
    kept = list(chosen)
    for one in reversed(chosen):
        if one.cells <= spare and len(kept) > slots:
            kept.remove(one)
            spare -= one.cells
    return [one.seq for one in kept]


def next_look_ns(paused: Iterable[Paused], *, ripe_ns: int, after_ns: int) -> int:
    """When the next of them will have been paused for `after_ns`; 0 when there is none."""
    return min((one.since_ns + after_ns for one in paused if one.since_ns > ripe_ns), default=0)
