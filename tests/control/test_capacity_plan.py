"""What a demand needs. The worked example "capacity" of the design."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.capacity_plan import CapacityPlan

EXAMPLE = CapacityPlan(per_replica=400, target=0.75)


def test_the_worked_example() -> None:
    assert EXAMPLE.needed(2400) == 8
    assert EXAMPLE.gap(2400, ready=6, ready_in_s=90) == 900
    assert EXAMPLE.to_shed(2400, ready=6, ready_in_s=90, queue=300) == 600


def test_the_same_by_slots_and_the_time_that_a_request_has_one() -> None:
    assert CapacityPlan.of_slots(20, 3.0) == EXAMPLE
    assert CapacityPlan.of_slots(0, 0.0).per_replica == 60_000  # nothing is known: no division by zero


@pytest.mark.parametrize(("demand", "needed"), [(0, 0), (1, 1), (300, 1), (301, 2), (2100, 7), (2400.001, 9)])
def test_whole_replicas(demand: float, needed: int) -> None:
    assert EXAMPLE.needed(demand) == needed


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=8))
def test_what_routers_tell_apart_adds_up(demands: list[float]) -> None:
    assert sum(map(EXAMPLE.replicas, demands)) == pytest.approx(EXAMPLE.replicas(sum(demands)))


@given(st.floats(0, 1e5), st.integers(0, 500), st.floats(0, 600), st.integers(0, 10_000))
def test_enough_replicas_shed_nothing(demand: float, ready: int, ready_in_s: float, queue: int) -> None:
    if ready >= EXAMPLE.needed(demand):
        assert EXAMPLE.gap(demand, ready, ready_in_s) == pytest.approx(0, abs=1e-6)
    assert 0 <= EXAMPLE.to_shed(demand, ready, ready_in_s, queue) <= EXAMPLE.gap(demand, ready, ready_in_s)
