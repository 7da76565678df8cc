"""Whether a Router takes a request in: bounds, priorities, what replicas say, and that nothing drifts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.doors import REPORT_AGE_MAX_S
from headrace.control.errors import Failure
from headrace.control.fair_room import MEMORY_S
from headrace.control.priority import Priority
from headrace.control.resources import ReplicaState
from headrace.control.router_admission import (
    RETRY_MAX_S,
    SHARES,
    Demand,
)
from headrace.control.router_capacity import HEADROOM
from support.admissions import HOLDS, OTHER, REVISION, admission, admitted, apply, demand, refusal, replica, tell


@pytest.mark.parametrize(
    ("bounds", "wanted", "bound", "count"),
    [
        ({"requests_max": 10}, demand(), "requests", 9),
        ({"requests_max": 10}, demand(Priority.CRITICAL), "requests", 10),
        ({"requests_max": 1}, demand(Priority.SHEDDABLE), "requests", 1),
        ({"bytes_max": 1000}, demand(size=100), "bytes", 9),
        ({"bytes_max": 1000}, demand(size=5000), "bytes", 1),
        ({"tokens_max": 100}, demand(tokens=30), "tokens", 3),
        ({}, demand(), "requests", -int(-HOLDS * 0.9 // 1)),
        ({}, demand(tokens=128), "tokens", int(HOLDS * 64 * 0.9 // 128)),
        ({}, demand(tokens=10**6), "tokens", 1),
    ],
    ids=[
        "all",
        "all, critical",
        "one at least",
        "bytes",
        "one large",
        "tokens of all",
        "replicas hold",
        "tokens",
        "one huge",
    ],
)
def test_each_bound_refuses_with_its_name_limit_and_what_is_held(
    bounds: dict[str, int], wanted: Demand, bound: str, count: int
) -> None:
    made = admission(**bounds)
    assert admitted(made, wanted) == count
    told = refusal(made, wanted).metadata
    assert (told["stage"], told["bound"], told["priority"]) == ("router", bound, wanted.priority.name)
    assert int(told["current"]) > 0
    assert int(told["limit"]) > 0
    assert made.refused[bound] == 2
    made.release(wanted)
    made.admit(wanted, 0.0)


def test_events_kept_for_readers_count_as_bytes() -> None:
    made = admission(bytes_max=1000)
    made.admit(demand(), 0.0)
    made.buffered_bytes = 2000
    assert refusal(made, demand()).metadata["bound"] == "bytes"
    made.buffered_bytes = 0
    made.admit(demand(), 0.0)


def test_higher_priorities_have_room_where_lower_ones_are_refused() -> None:
    made = admission(requests_max=100, random=0.0)
    apply(made, *(replica(f"r{n}") for n in range(20)), now=0.0)
    counts = [admitted(made, demand(priority), 60.0) for priority in Priority]
    assert counts == [70, 10, 10, 10]


def test_revisions_do_not_take_each_others_room() -> None:
    made = admission()
    admitted(made, demand())
    made.apply(
        (REVISION, OTHER),
        {REVISION.name: (replica("a"),), OTHER.name: (replica("b"),)},
        is_usable=lambda r: True,
        routers=1,
        now=0.0,
    )
    made.admit(demand(revision=OTHER), 0.0)
    refusal(made, demand())


def test_where_nobody_serves_placement_says_why() -> None:
    made = admission(replica("unreachable"), replica("b", ReplicaState.LOADING))
    for _ in range(100):
        made.admit(demand(), 0.0)


def test_a_zone_lost_shrinks_admission_to_what_remains() -> None:
    zones = {zone: [replica(f"{zone}{n}", zone=zone) for n in range(2)] for zone in "abc"}
    made = admission(*zones["a"], *zones["b"], *zones["c"])
    held = admitted(made, demand(Priority.CRITICAL))
    assert held == -int(-6 * HOLDS // 1)
    apply(made, *zones["b"], *zones["c"], now=10.0)
    assert made.shocks == 1
    for _ in range(held):
        refusal(made, demand(Priority.CRITICAL), 10.0)
        made.release(demand(Priority.CRITICAL))
        if made.requests < 4 * HOLDS * 0.8:
            break
    made.admit(demand(Priority.CRITICAL), 10.0)
    refusal(made, demand(Priority.CRITICAL), 10.0)
    assert made.requests <= 4 * HOLDS * 0.8 + 1
    assert admitted(made, demand(Priority.CRITICAL), 10.5) > 0, "and then a ramp"


BATCH, STANDARD, CRITICAL = Priority.BATCH, Priority.STANDARD, Priority.CRITICAL


@pytest.mark.parametrize(
    ("reports", "priority", "refused"),
    [
        ({"a": STANDARD}, BATCH, False),
        ({"a": STANDARD, "b": STANDARD}, BATCH, True),
        ({"a": STANDARD, "b": STANDARD}, STANDARD, False),
        ({"a": STANDARD, "b": BATCH}, BATCH, False),
        ({"a": STANDARD, "b": BATCH}, Priority.SHEDDABLE, True),
        ({"a": CRITICAL, "b": CRITICAL}, STANDARD, True),
        ({"a": CRITICAL, "b": CRITICAL}, CRITICAL, False),
        ({"a": 9, "b": 9}, CRITICAL, False),
        ({"a": CRITICAL, "gone": CRITICAL}, STANDARD, False),
    ],
    ids=[
        "one of two", "both", "higher", "the lower bound counts", "below both", "all but critical", "critical tries",
        "a newer name", "one that is not usable says nothing",
    ],
)  # fmt: skip
def test_what_all_replicas_would_refuse_is_refused_here(
    reports: dict[str, int], priority: Priority, refused: bool
) -> None:
    made = admission(replica("a"), replica("b"))
    for name, admits_from in reports.items():
        tell(made, name, admits_from=admits_from, queue_wait_s=4.0, now=0.0)
    if refused:
        told = refusal(made, demand(priority))
        assert (told.metadata["bound"], told.metadata["limit"]) == ("replicas", "2")
    else:
        made.admit(demand(priority), 0.0)


def test_reports_that_are_old_or_taken_back_refuse_nobody() -> None:
    made = admission(replica("a"))
    tell(made, "a", admits_from=CRITICAL, queue_wait_s=None, now=0.0)
    refusal(made, demand())
    made.admit(demand(), REPORT_AGE_MAX_S + 0.01)
    tell(made, "a", admits_from=CRITICAL, queue_wait_s=None, now=10.0)
    refusal(made, demand(), 10.0)
    tell(made, "a", admits_from=0, queue_wait_s=None, now=10.01)
    made.admit(demand(), 10.01)


def test_how_many_may_wait_is_taken_from_the_report() -> None:
    made = admission(replica("a"))
    tell(made, "a", admits_from=0, queue_wait_s=None, now=0.0, waiting_max=36)
    assert made.is_stale
    apply(made, replica("a"), now=100.0)
    assert not made.is_stale
    assert made.allowed(200.0)[0] == HEADROOM * 40
    tell(made, "a", admits_from=0, queue_wait_s=None, now=200.0, waiting_max=36)
    assert not made.is_stale
    apply(made, now=300.0)
    apply(made, replica("a"), now=400.0)
    assert made.allowed(500.0)[0] == HOLDS, "what comes back may be another one"


@pytest.mark.parametrize(
    ("waits", "random", "retry_s"),
    [((9.0, 4.0), 0.5, 4.0), ((9.0, 4.0), 0.0, 3.0), ((9.0, 4.0), 1.0, 5.0), ((900.0,), 0.5, RETRY_MAX_S)],
    ids=["the shortest wait", "earliest", "latest", "bounded"],
)
def test_the_time_to_come_back_is_the_shortest_wait_and_spread(
    waits: tuple[float, ...], random: float, retry_s: float
) -> None:
    made = admission(*(replica(f"r{n}") for n in range(len(waits))), random=random)
    for n, wait_s in enumerate(waits):
        tell(made, f"r{n}", admits_from=CRITICAL, queue_wait_s=wait_s, now=0.0)
    assert refusal(made, demand()).retry_after_s == pytest.approx(retry_s)


def test_demand_is_what_came_in_the_last_minute_refused_or_not_but_not_what_was_only_asked() -> None:
    made = admission(replica("a"), requests_max=2)
    assert admitted(made, demand(Priority.CRITICAL), 5.0) == 2
    assert made.demand(6.0) == {REVISION.name: 3.0, OTHER.name: 0.0}
    made.release(demand(Priority.CRITICAL))
    made.admit(demand(Priority.CRITICAL), 7.0)
    made.withdraw(demand(Priority.CRITICAL), 7.0)
    assert made.demand(8.0)[REVISION.name] == 3.0
    assert made.held() == (1, 1)
    assert made.demand(80.0)[REVISION.name] == 0.0


def test_the_shares_rise_with_the_priority() -> None:
    assert list(SHARES) == list(Priority)
    assert sorted(SHARES.values()) == list(SHARES.values())
    assert SHARES[Priority.CRITICAL] == 1.0


@pytest.mark.parametrize(
    ("bounds", "each", "of", "limit"),
    [
        ({"requests_max": 100}, {}, "requests", 90),
        ({"tokens_max": 1000}, {"tokens": 10}, "tokens", 900),
        ({"bytes_max": 1000}, {"size": 10}, "bytes", 900),
        ({}, {}, "requests", 90),
        ({}, {"tokens": 90}, "tokens", 5760),
    ],
    ids=["requests", "tokens", "bytes", "requests of the revision", "tokens of the revision"],
)
def test_a_tenant_that_floods_leaves_room_where_others_ask(
    bounds: dict[str, Any], each: dict[str, Any], of: str, limit: int
) -> None:
    replicas = [replica(f"r{n}") for n in range(40 if bounds else 4)]  # four hold 100 requests and 6,400 tokens
    greedy, modest = demand(tenant="greedy", **each), demand(tenant="modest", **each)
    alone = admitted(admission(*replicas, **bounds), greedy)
    made = admission(*replicas, **bounds)
    made.admit(modest, 0.0)
    taken = admitted(made, greedy)
    assert taken + 1 == pytest.approx(0.8 * alone, abs=2)
    told = refusal(made, greedy).metadata
    assert (told["bound"], told["of"], int(told["limit"])) == ("share", of, limit)
    assert int(told["tenantCurrent"]) == taken * max(each.values(), default=1)
    assert admitted(made, modest) >= 0.1 * alone, "the other one finds room"
    assert made.refused.keys() == {"share"}
    later = MEMORY_S + 1.0
    assert admitted(made, greedy, later) > 0, "nobody else has asked of late"


def test_a_tenants_weight_is_its_share_of_the_room() -> None:
    made = admission(*(replica(f"r{n}") for n in range(9)), requests_max=100)
    made.admit(demand(tenant="modest"), 0.0)
    light = admitted(made, demand(tenant="greedy"))
    assert admitted(made, demand(tenant="greedy", weight=8.0)) >= 10
    assert light == pytest.approx(72, abs=2)


def test_nothing_is_kept_of_tenants_who_hold_nothing() -> None:
    made = admission(replica("a"))
    for number in range(10_000):
        one = demand(tenant=f"t{number}")
        made.admit(one, 0.0)
        made.release(one)
    assert made._tenants == made._revisions[REVISION.name].tenants == {}


DEMANDS = st.builds(demand, st.sampled_from(Priority), tokens=st.integers(0, 500), size=st.integers(0, 300))


@given(st.lists(st.one_of(DEMANDS, st.integers(0, 50)), max_size=80))
def test_counts_are_the_truth_and_a_higher_priority_fits_wherever_a_lower_one_does(
    steps: list[Demand | int],
) -> None:
    made = admission(requests_max=20, bytes_max=2000)
    running: list[Demand] = []
    for step in steps:
        if isinstance(step, int):
            if step < len(running):
                made.release(running.pop(step))
            continue
        try:
            made.admit(step, 0.0)
        except Failure:
            pass
        else:
            running.append(step)
            made.release(step)
            higher = Demand(step.revision, Priority.CRITICAL, step.tokens, step.size)
            made.admit(higher, 0.0)
            made.release(higher)
            made.admit(step, 0.0)
        assert made.held() == (len(running), sum(d.tokens for d in running))
        assert made.input_bytes == sum(d.size for d in running)
        assert len(running) <= 20
        assert made.input_bytes <= max(2000, max((d.size for d in running), default=0))
    for one in running:
        made.release(one)
    assert made.held() == (0, 0)
    assert made.input_bytes == 0
