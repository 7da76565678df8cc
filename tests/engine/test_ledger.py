"""Slots and KV cells: reserved before use, given back once, never more than there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.ledger import Ledger, LedgerError


def test_a_sequence_waits_for_a_slot_and_for_cells() -> None:
    ledger = Ledger(slots=2, cells=10, lanes=4)
    first = ledger.reserve(6)
    assert first is not None
    assert ledger.reserve(5) is None, "cells"
    second = ledger.reserve(4)
    assert second is not None
    assert ledger.reserve(0) is None, "slots"
    ledger.release(first.lane)
    assert ledger.reserve(6) is not None


def test_what_is_retained_is_evicted_oldest_first_and_never_makes_an_admission_fail() -> None:
    ledger = Ledger(slots=2, cells=10, lanes=4)
    lanes = []
    for _ in range(2):
        reservation = ledger.reserve(4)
        assert reservation is not None
        ledger.retain(reservation.lane, 4)
        lanes.append(reservation.lane)
    reservation = ledger.reserve(5)
    assert reservation is not None
    assert reservation.evicted == (lanes[0],)
    assert ledger.retained == (lanes[1],)


def test_a_source_is_handed_over_when_only_its_own_cells_are_missing() -> None:
    ledger = Ledger(slots=2, cells=10, lanes=4)
    reservation = ledger.reserve(8)
    assert reservation is not None
    ledger.retain(reservation.lane, 8)
    again = ledger.reserve(9, source=reservation.lane)
    assert again is not None
    assert again.adopted
    assert again.lane == reservation.lane
    assert again.evicted == ()


def test_nothing_is_released_twice() -> None:
    ledger = Ledger(slots=1, cells=10, lanes=2)
    reservation = ledger.reserve(3)
    assert reservation is not None
    ledger.release(reservation.lane)
    with pytest.raises(LedgerError):
        ledger.release(reservation.lane)
    with pytest.raises(LedgerError):
        ledger.retain(reservation.lane, 1)


_MOVE = st.one_of(
    st.tuples(st.just("reserve"), st.integers(1, 12), st.booleans()),
    st.tuples(st.sampled_from(["release", "retain", "evict"]), st.integers(0, 10), st.booleans()),
)


@given(st.lists(_MOVE, max_size=60))
def test_books_always_balance(moves: list[tuple[str, int, bool]]) -> None:
    ledger = Ledger(slots=3, cells=20, lanes=6)
    active: dict[int, int] = {}
    retained: dict[int, int] = {}
    for name, number, wants_source in moves:
        if name == "reserve":
            source = next(iter(retained), None) if wants_source else None
            reservation = ledger.reserve(number, source)
            fits = len(active) < 3 and sum(active.values()) + number <= 20
            assert (reservation is not None) == fits
            if reservation is None:
                continue
            for lane in reservation.evicted:
                del retained[lane]
            if reservation.adopted:
                assert source is not None
                del retained[source]
            assert reservation.lane not in active
            assert reservation.lane not in retained
            active[reservation.lane] = number
        elif name == "evict" and retained:
            lane = list(retained)[number % len(retained)]
            ledger.evict(lane)
            del retained[lane]
        elif name in ("release", "retain") and active:
            lane = list(active)[number % len(active)]
            cells = active.pop(lane)
            if name == "release":
                ledger.release(lane)
            else:
                ledger.retain(lane, cells)
                retained[lane] = cells
        assert ledger.active == len(active)
        assert ledger.reserved_cells == sum(active.values())
        assert ledger.retained_cells == sum(retained.values())
        assert ledger.reserved_cells + ledger.retained_cells <= ledger.cells
    for lane in list(active):
        ledger.release(lane)
    assert (ledger.active, ledger.reserved_cells) == (0, 0)
