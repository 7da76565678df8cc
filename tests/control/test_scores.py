"""What each part of a score answers to, and in which direction."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.load_view import Habits, ReplicaReport, Standing
from headrace.control.resources import FailureDomain
from headrace.control.scores import (
    AFFINITY,
    AFFINITY_S,
    REFUSAL_S,
    SAME_HOST,
    SAME_RACK,
    SAME_ZONE,
    SHARING,
    SPREAD,
    Score,
    score,
    wait_s,
)
from support.fleets import replica

SERVICE = 10.0
BASE: dict[str, Any] = {
    "weight": 1.0, "ramp": 1.0, "prompt_tokens": 0.0, "output_tokens": 0, "cached_share": 0.0, "is_home": False,
    "priority": 3,
}  # fmt: skip


def standing(
    own: int = 0, report: ReplicaReport | None = None, others_per_slot: float = 0.0, **domain: str
) -> Standing:
    habits = Habits()
    habits.service_s, habits.others_per_slot = SERVICE, others_per_slot
    made = Standing("replicas/a", habits)
    made.place(replica("a", **domain), habits)
    made.tokens, made.own = set(range(own)), own
    if report is not None:
        made.take(report, 0.0)
    return made


def scored(found: Standing, **facts: Any) -> Score:
    return score(found, **{**BASE, **facts})


R = ReplicaReport
FULL = R(4, 4, 4, queue_wait_s=13.0)


@pytest.mark.parametrize(
    ("found", "facts", "part", "seconds"),
    [
        (standing(), {}, "queue_wait", 0.0),
        (standing(own=3), {}, "queue_wait", SERVICE * SHARING * 3 / 4),
        (standing(own=6), {}, "queue_wait", SERVICE * (SHARING * 6 + 3) / 4),
        (standing(report=R(2, 0, 4)), {}, "queue_wait", SERVICE * SHARING * 2 / 4),
        (standing(report=FULL), {}, "queue_wait", 13.0 + SERVICE * SHARING * 8 / 4),
        (standing(report=R(0, 0, 4, admits_from=4)), {}, "queue_wait", REFUSAL_S),
        (standing(report=R(0, 0, 4, admits_from=3)), {}, "queue_wait", 0.0),
        (standing(report=R(4, 0, 8, concurrency_limit=4)), {}, "queue_wait", SERVICE * (SHARING * 4 + 1) / 4),
        (standing(), {"prompt_tokens": 500.0}, "prefill", 0.5),
        (standing(report=R(0, 0, 4, prefill_tokens_per_s=100.0)), {"prompt_tokens": 500.0}, "prefill", 5.0),
        (standing(), {"prompt_tokens": 500.0, "cached_share": 0.8}, "prefix_locality", -0.4),
        (standing(report=R(0, 0, 4, kv_cells_reserved=60, kv_cells=100)), {"output_tokens": 40}, "kv_headroom", 0.0),
        (standing(report=R(0, 0, 4, kv_cells_reserved=70, kv_cells=100)), {"output_tokens": 40}, "kv_headroom", 1.0),
        (standing(report=R(0, 0, 4, kv_cells_reserved=70, kv_cells=100)),
         {"output_tokens": 40, "prompt_tokens": 50.0, "cached_share": 0.8}, "kv_headroom", 2.0),
        (standing(report=R(0, 0, 4, kv_cells_reserved=70, kv_cells=100)),
         {"output_tokens": 40, "weight": 0.5}, "kv_headroom", 0.5),
        (standing(report=R(0, 0, 4, kv_cells=10)), {"output_tokens": 4000}, "kv_headroom", SERVICE),
        (standing(), {"is_home": True}, "affinity", -AFFINITY_S),
        (standing(), {"is_home": True, "prompt_tokens": 500.0}, "affinity", -AFFINITY_S - AFFINITY * 0.5),
        (standing(), {"is_home": True, "prompt_tokens": 500.0, "cached_share": 0.1}, "affinity", -AFFINITY_S),
        (standing(), {"ramp": 0.1}, "slow_start", SERVICE * 0.0),
        (standing(own=1), {"ramp": 0.1}, "slow_start", SERVICE * (SHARING + 1) - SERVICE * SHARING / 4),
        (standing(own=1), {"ramp": 0.5}, "slow_start", SERVICE * (SHARING / 2 - SHARING / 4)),
        # Half of what others have, and half of what was measured: by the same formula.
        (standing(report=FULL), {"weight": 0.5}, "stale_load",
         wait_s(4, 4, SERVICE) + 0.5 * (13.0 - SERVICE * 5 / 4) - (13.0 + SERVICE * SHARING * 8 / 4)),
        (standing(report=R(0, 0, 4), others_per_slot=2.0), {"weight": 0.0}, "stale_load",
         SERVICE * (SHARING * 8 + 5) / 4),
        (standing(others_per_slot=2.0), {"weight": 0.0}, "stale_load", SERVICE * (SHARING * 8 + 5) / 4),
        (standing(report=FULL), {}, "stale_load", 0.0),
    ],
)  # fmt: skip
def test_a_part(found: Standing, facts: dict[str, Any], part: str, seconds: float) -> None:
    assert getattr(scored(found, **facts), part) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("zone", "rack", "host", "times"),
    [
        ("a", "1", "x", SAME_HOST), ("a", "1", "y", SAME_RACK), ("a", "2", "x", SAME_ZONE), ("b", "1", "x", 0.0),
        ("", "", "x", 0.0),
    ],
)  # fmt: skip
def test_beside_what_failed_it_costs_more_the_nearer_it_is(zone: str, rack: str, host: str, times: float) -> None:
    found = standing(zone=zone, rack=rack, host=host)
    assert scored(found, failed=(FailureDomain("x", "1", "a"),)).spread == pytest.approx(SERVICE * times)
    assert scored(found).spread == 0.0


def test_without_zones_a_host_is_still_a_host() -> None:
    assert scored(standing(host="x"), failed=(FailureDomain("x"),)).spread == pytest.approx(SERVICE * SAME_HOST)
    assert scored(standing(), failed=(FailureDomain(),)).spread == 0.0, "unknown is not the same"


def test_a_zone_that_holds_more_than_its_share_costs_more() -> None:
    found = standing(zone="a")
    habits = found.habits
    habits.slots, habits.in_flight = 16, 8
    habits.slots_by_zone.update(a=8, b=8)
    for held, excess in ((8, 0.5), (6, 0.25), (4, 0.0), (1, 0.0)):
        habits.in_flight_by_zone["a"] = held
        assert scored(found).spread == pytest.approx(SERVICE * SPREAD * excess)


LOAD = st.integers(0, 40)
WEIGHT = st.floats(0.0, 1.0)


@given(LOAD, LOAD, LOAD, WEIGHT, st.floats(0.05, 1.0), st.one_of(st.none(), st.floats(0, 100)))
def test_more_load_never_scores_better(
    own: int, theirs: int, more: int, weight: float, ramp: float, wait: float | None
) -> None:
    def total(ours: int, others: int) -> float:
        found = standing(ours, R(min(4, theirs), max(0, theirs - 4), 4, queue_wait_s=wait))
        found.theirs = others
        return scored(found, weight=weight, ramp=ramp).total

    assert total(own + more, theirs) >= total(own, theirs) - 1e-9
    assert total(own, theirs + more) >= total(own, theirs) - 1e-9


@given(LOAD, WEIGHT, WEIGHT, st.floats(0, 5000), st.booleans())
def test_a_score_is_the_sum_of_its_parts_and_a_prefix_never_earns_more_than_the_prefill(
    theirs: int, weight: float, share: float, tokens: float, is_home: bool
) -> None:
    found = standing(report=R(min(4, theirs), max(0, theirs - 4), 4))
    got = scored(found, weight=weight, cached_share=share, prompt_tokens=tokens, is_home=is_home)
    assert got.total == pytest.approx(sum(got))
    assert got.prefill + got.prefix_locality >= -1e-9
    assert got.total >= -AFFINITY_S - 1e-9
