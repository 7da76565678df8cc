"""The last places: a tenant that floods leaves some, one that is alone takes all, and nobody who waits has to go."""

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.errors import Failure
from headrace.control.fair_room import MEMORY_S, FairRoom, has_share
from headrace.control.priority import Priority
from support.queues import Bench

TENANTS = st.sampled_from("abc")


@pytest.mark.parametrize(
    ("own", "more", "free", "weight", "expected"),
    [
        (0, 1, 1, 1, True),
        (0, 999, 1, 1, True),  # whether there is room at all is another question
        (3, 1, 1, 1, True),
        (4, 1, 1, 1, False),
        (12, 1, 4, 1, True),
        (13, 1, 3, 1, False),
        (13, 1, 3, 2, True),
        (100, 50, math.inf, 1, True),
        (100, 50, 30, 1, False),
    ],
)
def test_the_more_it_has_the_more_must_be_free(
    own: float, more: float, free: float, weight: float, expected: bool
) -> None:
    assert has_share(own, more, free, weight) is expected


@given(st.lists(st.tuples(TENANTS, st.floats(0, MEMORY_S)), max_size=30))
def test_somebody_else_has_asked_of_late(asked: list[tuple[str, float]]) -> None:
    room, latest, now = FairRoom(), dict[str, float](), 0.0
    for tenant, pause_s in asked:
        now += pause_s
        others = [at for name, at in latest.items() if name != tenant]
        assert room.asks(tenant, now) is any(now - at <= MEMORY_S for at in others)
        latest[tenant] = now


def flood(bench: Bench, first: int, count: int, **fields: object) -> list[Failure]:
    """So many dispatches of the greedy one; what is refused of them."""
    refused = []
    for token in range(first, first + count):
        try:
            bench.dispatch(token, tenant="greedy", **fields)
        except Failure as failure:
            refused.append(failure)
    return refused


def test_one_that_is_alone_takes_the_whole_queue() -> None:
    bench = Bench(slots=1, requests_max=20, stage_ahead=0)
    assert {f.metadata["stage"] for f in flood(bench, 1, 40)} == {"requests"}
    assert len(bench.queue.waiting) == 20


def test_where_another_one_asks_some_places_stay_and_nobody_goes_for_it() -> None:
    bench = Bench(slots=1, requests_max=20, stage_ahead=0)
    bench.dispatch(1, tenant="modest")
    refused = flood(bench, 100, 40)
    assert bench.queue.waiting.held_by(Priority.STANDARD, "greedy")[0] == 16  # FACTOR / (FACTOR + 1) of them
    assert refused[0].metadata == {"stage": "share", "queueDepth": "16", "limit": "20", "tenantDepth": "16"}
    assert refused[0].retry_after_s == 0.5
    bench.dispatch(2, 3, 4, 5, tenant="modest")
    assert bench.refused(6, tenant="modest").metadata["stage"] == "share"  # full, and it has much itself
    assert bench.refused(7, tenant="third").metadata["stage"] == "requests"
    assert bench.ended == {}
    assert bench.ledger.counts.refused[("OVERLOADED", "share")] == len(refused) + 1


def serve(bench: Bench) -> None:
    """The engine begins with what it was given, and ends one."""
    running = [token for token in bench.handed if token in bench.ledger.attempts]
    bench.begin(*(token for token in running if bench.ledger.attempts[token].admitted_at is None))
    if running:
        bench.finish(running[0])


@pytest.mark.parametrize("share", [1, 4], ids=["alike", "of four times the weight"])
def test_two_that_flood_have_places_by_their_weight(share: int) -> None:
    bench = Bench(slots=1, requests_max=60, stage_ahead=0)
    for token in range(1, 2000, 2):
        for number, (tenant, weight) in enumerate((("a", 1), ("b", share))):
            with contextlib.suppress(Failure):
                bench.dispatch(token + number, tenant=tenant, weight=weight)
        serve(bench)
    a, b = (bench.queue.waiting.held_by(Priority.STANDARD, tenant)[0] for tenant in "ab")
    assert 50 <= a + b <= 60
    assert b / a == pytest.approx(share, rel=0.35)


def test_a_flood_of_tokens_leaves_tokens() -> None:
    bench = Bench(slots=1, requests_max=1000, kv_times_max=1.0, stage_ahead=0)  # 1000 cells may be waited for
    bench.dispatch(1, tenant="modest", max_tokens=10)
    refused = flood(bench, 100, 40, max_tokens=90)
    assert refused[0].metadata["stage"] == "share"
    assert bench.queue.waiting.tokens <= 1000 - 93
    bench.dispatch(2, tenant="modest", max_tokens=90)


def test_what_waits_with_less_priority_is_room() -> None:
    bench = Bench(slots=1, requests_max=10, stage_ahead=0)
    bench.dispatch(1, tenant="modest")
    for token in range(2, 11):
        bench.dispatch(token, tenant=f"t{token}", priority=Priority.SHEDDABLE)
    assert flood(bench, 100, 5) == []
    assert bench.queue.waiting.held_by(Priority.STANDARD, "greedy")[0] == 5


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=50, max_size=120))
def test_a_modest_tenant_is_never_kept_out(floods: list[int]) -> None:
    """It asks for one in four of what is served, another one for as much as it likes."""
    bench, token = Bench(slots=2, requests_max=16, stage_ahead=0), 0
    for number, more in enumerate(floods):
        for _ in range(6 * more):
            token += 1
            try:
                bench.dispatch(token, tenant="greedy")
            except Failure:
                continue
        if number % 4 == 0:
            token += 1
            bench.dispatch(token, tenant="modest")  # raises where it is refused
        serve(bench)
        bench.advance(0.1)
