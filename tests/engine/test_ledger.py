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


@pytest.mark.parametrize(("keeps", "stored", "removed"), [(True, 8 + 9 - 5, 3), (False, 8, 8)])
def test_of_a_lane_that_is_handed_over_only_what_is_new_is_stored(keeps: bool, stored: int, removed: int) -> None:
    ledger = Ledger(slots=2, cells=10, lanes=4)
    reservation = ledger.reserve(8)
    assert reservation is not None
    ledger.retain(reservation.lane, 8)
    assert ledger.reserve(9, source=reservation.lane) is not None
    ledger.cut(reservation.lane, 5)
    assert (ledger.stored, ledger.removed) == (8, 3)
    if keeps:
        ledger.retain(reservation.lane, 9)
    else:
        ledger.release(reservation.lane)
    assert (ledger.stored, ledger.removed) == (stored, removed)


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
    reused: dict[int, int] = {}
    for name, number, wants_source in moves:
        counts = ledger.stored, ledger.removed
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
                reused[source] = min(retained.pop(source), number)
                ledger.cut(source, reused[source])
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
            reused.pop(lane, None)
            if name == "release":
                ledger.release(lane)
            else:
                ledger.retain(lane, cells)
                retained[lane] = cells
        assert ledger.active == len(active)
        assert ledger.reserved_cells == sum(active.values())
        assert ledger.retained_cells == sum(retained.values())
        assert ledger.reserved_cells + ledger.retained_cells <= ledger.cells
        assert ledger.stored - ledger.removed == sum(retained.values()) + sum(reused.values())
        assert counts[0] <= ledger.stored
        assert counts[1] <= ledger.removed
    for lane in list(active):
        ledger.release(lane)
    assert (ledger.active, ledger.reserved_cells) == (0, 0)
