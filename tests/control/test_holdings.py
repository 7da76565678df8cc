"""Release happens once for each resource, in dependency order, and the process's references follow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.holdings import ENGINE_SIDE, Holdings, ReleaseError, Resource, ResourceLedger


def test_a_resource_is_released_once() -> None:
    ledger = ResourceLedger()
    holdings = Holdings(ledger)
    holdings.hold(Resource.SLOT)
    holdings.release(Resource.SLOT)
    with pytest.raises(ReleaseError):
        holdings.release(Resource.SLOT)
    assert (ledger.references, ledger.held[Resource.SLOT], ledger.released[Resource.SLOT]) == (0, 0, 1)


def test_a_resource_is_held_once() -> None:
    ledger = ResourceLedger()
    holdings = Holdings(ledger)
    holdings.hold(Resource.KV)
    with pytest.raises(ReleaseError):
        holdings.hold(Resource.KV)
    assert ledger.held[Resource.KV] == 1


@pytest.mark.parametrize(("first", "later"), list(itertools.combinations(Resource, 2)))
def test_nothing_is_free_before_what_depends_on_it(first: Resource, later: Resource) -> None:
    ledger = ResourceLedger()
    holdings = Holdings(ledger)
    holdings.hold(later, first)
    with pytest.raises(ReleaseError):
        holdings.release(later)
    assert later in holdings
    assert ledger.references == 2
    holdings.release(first)
    holdings.release(later)
    assert ledger.references == 0


def test_one_confirmation_frees_the_engine_side_and_only_that() -> None:
    ledger = ResourceLedger()
    holdings = Holdings(ledger)
    holdings.hold(*Resource)
    holdings.release_engine_side()
    assert [resource in holdings for resource in Resource] == [r not in ENGINE_SIDE for r in Resource]
    holdings.release_engine_side()  # nothing of it is held: nothing to do
    assert ledger.released.total() == len(ENGINE_SIDE)


_ACT = st.tuples(st.integers(0, 2), st.sampled_from(["hold", "release", "confirm"]), st.sampled_from(Resource))


@given(st.lists(_ACT, max_size=60))
def test_whatever_is_tried_the_ledger_counts_what_is_held(acts: list[tuple[int, str, Resource]]) -> None:
    ledger = ResourceLedger()
    parts = [Holdings(ledger) for _ in range(3)]
    held: list[set[Resource]] = [set(), set(), set()]
    holds = 0
    for who, act, resource in acts:
        mine = held[who]
        if act == "hold":
            if resource in mine:
                with pytest.raises(ReleaseError):
                    parts[who].hold(resource)
            else:
                parts[who].hold(resource)
                mine.add(resource)
                holds += 1
        elif act == "confirm":
            parts[who].release_engine_side()
            mine -= set(ENGINE_SIDE)
        elif resource in mine and resource is min(mine):
            parts[who].release(resource)
            mine.discard(resource)
        else:
            with pytest.raises(ReleaseError):
                parts[who].release(resource)
        assert ledger.references == sum(map(len, held)) == sum(map(len, parts))
        assert holds == ledger.references + ledger.released.total()
