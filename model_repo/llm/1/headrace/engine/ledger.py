"""Decides who gets a slot and KV cells, and what has to be forgotten for it.

Sans-io. A *lane* is one sequence id of the backend. It is free, active (reserved for prompt + max_tokens, or for less
where cells are over-committed, and then extended), or retained (a finished sequence kept as prefix cache).

    free --reserve--> active --retain--> retained --evict--> free
                        |                   |
                        +--release--> free  +--reserve (adopted)--> active

Invariant: reserved + retained cells never exceed `cells`, so an active sequence can always store its next token.
Cells that lanes share by a copied prefix are counted once for each lane: too many, never too few.
"""

from __future__ import annotations

from dataclasses import dataclass


class LedgerError(AssertionError):
    """The engine broke the ledger's rules: a bug, never a caller's mistake."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A lane for a new sequence; `evicted` lanes must be cleared first. `adopted`: it is the source lane itself."""

    lane: int
    evicted: tuple[int, ...] = ()
    adopted: bool = False


class Ledger:
    """Slots, lanes and cells of one engine."""

    def __init__(self, *, slots: int, cells: int, lanes: int) -> None:
        if lanes < slots:
            raise LedgerError("fewer lanes than slots")
        self.slots = slots
        self.cells = cells
        self._free = list(range(lanes - 1, -1, -1))
        self._active: dict[int, int] = {}
        self._retained: dict[int, int] = {}  # in the order of their last use, the oldest first
        self.reserved_cells = 0
        self.retained_cells = 0
        self._reused: dict[int, int] = {}  # of active lanes that were retained before: what of it they went on with
        self.stored = self.removed = 0
        """Cells that became prefix cache, and that were forgotten, since the start."""

    @property
    def active(self) -> int:
        """Slots in use."""
        return len(self._active)

    def stats(self) -> dict[str, int]:
        """What the contract's `stats` say of slots and cells."""
        return {
            "active": self.active,
            "slots": self.slots,
            "kv_cells": self.cells,
            "kv_reserved": self.reserved_cells,
            "kv_cached": self.retained_cells,
            "kv_stored": self.stored,
            "kv_removed": self.removed,
            "kv_events_lost": 0,
        }

    @property
    def retained(self) -> tuple[int, ...]:
        """The retained lanes, the least recently used first."""
        return tuple(self._retained)

    def reserve(self, cells: int, source: int | None = None) -> Reservation | None:
        """A lane with `cells` cells, or None while there is no slot or are no cells; evicts as needed.

        `source` is the lane whose prefix is wanted: it is evicted last, and if only its own cells are missing then
        the lane itself is handed over. So what is retained never makes an admission fail.
        """
        if len(self._active) >= self.slots or self.reserved_cells + cells > self.cells:
            return None
        evicted = []
        adopted = False
        for lane in [*(lane for lane in self._retained if lane != source), source]:
            fits = self.reserved_cells + self.retained_cells + cells <= self.cells
            if fits and self._free:
                break
            if lane is None or lane not in self._retained:
                continue
            adopted = lane == source
            if adopted:
                self._reused[lane] = self._forget(lane)
            else:
                self.removed += self._forget(lane)
                evicted.append(lane)
                self._free.append(lane)
        if source is not None and adopted:
            lane = source
        elif self._free:
            lane = self._free.pop()
        else:
            raise LedgerError("no lane is free although a slot is")
        if source is not None and source in self._retained:
            self._retained[source] = self._retained.pop(source)  # used just now
        self._active[lane] = cells
        self.reserved_cells += cells
        return Reservation(lane, tuple(evicted), adopted)

    def extend(self, lane: int, cells: int) -> tuple[int, ...] | None:
        """Reserves `cells` in all for an active lane; the lanes evicted for it, or None while they cannot be had."""
        more = cells - self._active[lane]
        if self.reserved_cells + more > self.cells:
            return None
        evicted = []
        while self.reserved_cells + self.retained_cells + more > self.cells:
            oldest = next(iter(self._retained))
            self.evict(oldest)
            evicted.append(oldest)
        self._active[lane] = cells
        self.reserved_cells += more
        return tuple(evicted)

    def cut(self, lane: int, cells: int) -> None:
        """Of what an adopted lane held, it goes on with the first `cells`."""
        self.removed += self._reused[lane] - cells
        self._reused[lane] = cells

    def release(self, lane: int) -> None:
        """Gives an active lane and its cells back. Raises `LedgerError` when it is not active: exactly once."""
        self._end(lane)
        self.removed += self._reused.pop(lane, 0)
        self._free.append(lane)

    def retain(self, lane: int, cells: int) -> None:
        """Ends an active lane but keeps `cells` cells of it as prefix cache."""
        if not 0 < cells <= self._active.get(lane, 0):
            raise LedgerError(f"lane {lane} cannot retain {cells} cells")
        self._end(lane)
        self.stored += cells - self._reused.pop(lane, 0)
        self._retained[lane] = cells
        self.retained_cells += cells

    def evict(self, lane: int) -> None:
        """Forgets a retained lane."""
        self.removed += self._forget(lane)
        self._free.append(lane)

    def _end(self, lane: int) -> None:
        cells = self._active.pop(lane, None)
        if cells is None:
            raise LedgerError(f"lane {lane} is not active")
        self.reserved_cells -= cells

    def _forget(self, lane: int) -> int:
        cells = self._retained.pop(lane, None)
        if cells is None:
            raise LedgerError(f"lane {lane} is not retained")
        self.retained_cells -= cells
        return cells
