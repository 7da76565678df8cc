"""Gives lanes to sequences and takes them back: ledger, prefix index and backend change together, here only."""

from __future__ import annotations

import math

from headrace.engine.backend import Backend
from headrace.engine.ledger import Ledger
from headrace.engine.prefix_cache import MATCH_MIN, PrefixIndex
from headrace.engine.sequence import Sequence

EXTENT = 32
"""Cells by which the booking of a sequence grows where cells are over-committed."""


class Lanes:
    """The lanes of one engine. Invariant: the index knows a lane exactly while the ledger does.

    With no more lanes than slots nothing is retained: the engine has a prefix cache of its own, or none.
    """

    def __init__(self, backend: Backend, *, slots: int, cells: int, lanes: int, over_commit: float = 1.0) -> None:
        self._backend = backend
        self._over_commit = over_commit
        self.ledger = Ledger(slots=slots, cells=cells, lanes=lanes)
        self._index = PrefixIndex()
        self._retains = lanes > slots

    @property
    def is_over_committed(self) -> bool:
        """Whether sequences may reserve less than they may need."""
        return self._over_commit > 1

    def missing(self, sequence: Sequence) -> tuple[int, int]:
        """The slots (0 or 1) and cells that have to be given back before `sequence` fits."""
        ledger = self.ledger
        slots = 0 if ledger.active < ledger.slots else 1
        return slots, max(0, ledger.reserved_cells + self._booking(sequence) - ledger.cells)

    def give(self, sequence: Sequence) -> bool:
        """A lane with everything known of its tokens in the KV; whether there was room for it."""
        request = sequence.request
        prefix = request.prompt + sequence.ids if sequence.ids else request.prompt
        match = self._index.match(prefix, request.cache_salt)
        booked = self._booking(sequence)
        reservation = self.ledger.reserve(booked, match.lane if match else None)
        if reservation is None:
            return False
        sequence.booked = booked
        for evicted in reservation.evicted:
            self._forget(evicted)
        lane = reservation.lane
        cached = 0
        if match is not None and match.lane not in reservation.evicted:
            cached = match.length
            if reservation.adopted:
                self.ledger.cut(lane, cached)
                self._backend.truncate(lane, cached)
            else:
                self._backend.copy_prefix(match.lane, lane, cached)
        self._backend.begin(lane, request.prompt, sequence.ids, request.sampling, request.top_logprobs, request.guide)
        self._index.put(lane, prefix, cached, request.cache_salt)
        sequence.enter(lane, prefix, cached)
        return True

    def grow(self, sequence: Sequence) -> None:
        """More of its prefix is in the KV now."""
        self._index.grow(sequence.lane, sequence.position)

    def extend(self, sequence: Sequence) -> bool:
        """Books more cells for one that is about to need them; whether they could be had."""
        booked = min(sequence.cells, sequence.booked + EXTENT)
        evicted = self.ledger.extend(sequence.lane, booked)
        if evicted is None:
            return False
        for lane in evicted:
            self._forget(lane)
        sequence.booked = booked
        return True

    def _booking(self, sequence: Sequence) -> int:
        """Cells to reserve for it now. One that was preempted gets all that it may need: it is not preempted again."""
        if not self.is_over_committed or sequence.preemptions:
            return sequence.cells
        known = len(sequence.request.prompt) + len(sequence.ids) + 1
        return min(sequence.cells, max(known, math.ceil(sequence.cells / self._over_commit)))

    def take_back(self, sequence: Sequence, *, keep: bool, touch_backend: bool) -> None:
        """Slot and cells are free; with `keep`, what is in the KV serves as prefix cache until others need it."""
        lane, stored = sequence.lane, sequence.stored
        if touch_backend:
            self._backend.end(lane)
        if keep and touch_backend and self._retains and stored >= MATCH_MIN:
            self.ledger.retain(lane, stored)
            self._index.put(lane, sequence.tokens(), stored, sequence.request.cache_salt)
            return
        self.ledger.release(lane)
        self._index.remove(lane)
        if touch_backend:
            self._backend.free(lane)

    def _forget(self, lane: int) -> None:
        self._index.remove(lane)
        self._backend.free(lane)
