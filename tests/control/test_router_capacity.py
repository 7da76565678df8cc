"""What a Router takes in for a revision, as replicas, failure domains and other Routers come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.attempt_book import waiting_max
from headrace.control.resources import Engine, Execution, FailureDomain, Replica, ReplicaState
from headrace.control.router_capacity import (
    HEADROOM,
    RAMP_PER_S,
    RESTART,
    SHOCK,
    RevisionCapacity,
    domains_of,
    holds_of,
)

EXECUTION = Execution(Engine.SYNTHETIC, context_tokens=64, slots=4, kv_cells=256)
EACH = 4 + waiting_max(4)


def replica(name: str, zone: str = "", host: str = "", slots: int = 4, cells: int = 0) -> Replica:
    domain = FailureDomain(host=host, zone=zone)
    return Replica(name, "revisions/m", "schedulers/s", "s:1", ReplicaState.READY, 1, slots, cells, domain)


FLEET = [replica(f"{zone}{n}", zone, f"{zone}-host{n}") for zone in "abc" for n in range(4)]


def capacity_with(replicas: list[Replica], now: float = 0.0, routers: int = 1) -> RevisionCapacity:
    capacity = RevisionCapacity()
    capacity.apply(replicas, EXECUTION, planned=(), routers=routers, now=now)
    return capacity


def apply(capacity: RevisionCapacity, replicas: list[Replica], now: float, planned: tuple[str, ...] = ()) -> float:
    capacity.apply(replicas, EXECUTION, planned=planned, routers=1, now=now)
    return capacity.allowed(now).requests


def test_what_a_replica_holds() -> None:
    assert holds_of(replica("r", cells=512), EXECUTION).requests == EACH
    assert holds_of(replica("r", cells=512), EXECUTION).tokens == 512 * EACH / 4
    assert holds_of(replica("r", slots=0), EXECUTION).tokens == 256 * EACH / 4, (
        "what it does not say, its revision says"
    )
    assert domains_of(replica("r", "z", "h")) == (("z",), ("z", "", "h"))
    assert domains_of(replica("r")) == ()


def test_at_first_all_is_allowed_and_each_router_takes_a_share() -> None:
    assert capacity_with(FLEET).allowed(0.0).requests == 12 * EACH * HEADROOM
    assert capacity_with(FLEET, routers=2).allowed(0.0).requests == 12 * EACH * HEADROOM
    assert capacity_with(FLEET, routers=8).allowed(0.0).requests == 12 * EACH * HEADROOM / 4
    assert RevisionCapacity().allowed(0.0).requests == 0


def test_one_replica_less_shrinks_it_by_that_one() -> None:
    capacity = capacity_with(FLEET)
    assert apply(capacity, FLEET[1:], 10.0) == 11 * EACH * HEADROOM
    assert capacity.shocks == 0, "a host of one in twelve is no shock"


def test_a_zone_that_goes_is_a_step_below_what_remains_and_then_a_ramp() -> None:
    capacity = capacity_with(FLEET)
    left = [r for r in FLEET if r.failure_domain.zone != "a"]
    remains = 8 * EACH * HEADROOM
    assert apply(capacity, left, 10.0) == pytest.approx(SHOCK * remains)
    assert capacity.shocks == 1
    seen = [capacity.allowed(10.0 + t).requests for t in (0.0, 0.5, 1.0, 2.0, 60.0)]
    assert seen == pytest.approx([remains * min(1.0, SHOCK + RAMP_PER_S * t) for t in (0.0, 0.5, 1.0, 2.0, 60.0)])


@pytest.mark.parametrize(
    ("gone", "planned", "shocks"),
    [
        ("a", (), 1),
        ("a", ("a0", "a1", "a2", "a3"), 0),
        ("a", ("a0",), 1),
        ("ab", (), 1),
        ("", (), 0),
    ],
    ids=["a zone", "a zone that is drained", "one of it was drained", "two zones at once", "none"],
)
def test_what_is_a_shock(gone: str, planned: tuple[str, ...], shocks: int) -> None:
    capacity = capacity_with(FLEET)
    apply(capacity, [r for r in FLEET if r.name[0] not in gone], 10.0, planned)
    assert capacity.shocks == shocks


def test_half_a_zone_is_no_shock() -> None:
    capacity = capacity_with(FLEET)
    apply(capacity, FLEET[:2] + FLEET[4:], 10.0)
    assert capacity.shocks == 0


def test_what_comes_back_is_ramped() -> None:
    capacity = capacity_with(FLEET)
    low = apply(capacity, FLEET[4:], 10.0)
    assert apply(capacity, FLEET, 10.0) == pytest.approx(low), "no jump"
    full = 12 * EACH * HEADROOM
    assert capacity.allowed(11.0).requests == pytest.approx(low + RAMP_PER_S * full)
    assert capacity.allowed(60.0).requests == full


def test_after_an_outage_of_all_it_begins_with_a_share() -> None:
    capacity = capacity_with(FLEET)
    assert apply(capacity, [], 10.0) == 0
    assert apply(capacity, FLEET, 20.0) == RESTART * 12 * EACH * HEADROOM
    fresh = RevisionCapacity()
    assert apply(fresh, [], 0.0) == 0
    assert apply(fresh, FLEET, 1.0) == 12 * EACH * HEADROOM, "nobody was ever there: nothing has piled up"


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.sets(st.integers(0, 11))), max_size=30))
def test_it_never_exceeds_what_the_usable_ones_hold_and_never_jumps_up(
    steps: list[tuple[float, set[int]]],
) -> None:
    capacity = capacity_with(FLEET)
    now, before = 0.0, len(FLEET)
    for gap_s, chosen in steps:
        now += gap_s
        was = capacity.allowed(now).requests
        after = apply(capacity, [FLEET[n] for n in sorted(chosen)], now)
        holds = len(chosen) * EACH * HEADROOM
        assert 0 <= after <= holds + 1e-6
        if before and chosen:
            assert after <= was + 1e-6
        later = capacity.allowed(now + 1.0).requests
        assert after - 1e-6 <= later <= after + RAMP_PER_S * holds + 1e-6
        before = len(chosen)
