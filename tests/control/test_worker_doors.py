"""Whom a worker's queue says that it would refuse: what it says and what it does are the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.doors import ROOM_KEPT
from headrace.control.errors import Failure
from headrace.control.fair_room import MEMORY_S
from headrace.control.priority import Priority
from headrace.control.worker_queue import SHARES_MAX
from support.queues import Bench

STANDARD, BATCH = Priority.STANDARD, Priority.BATCH


def test_the_room_is_what_is_left_of_the_queue_and_none_beside_readers_that_stand_still():
    bench = Bench(slots=1, stage_ahead=0, requests_max=3)
    bench.dispatch(1)
    bench.begin(1)
    assert bench.queue.room == 3
    bench.dispatch(2, 3)
    assert bench.queue.room == 1
    bench.dispatch(4)
    assert (bench.queue.room, bench.queue.admits_from) == (0, Priority.CRITICAL)
    bench.finish(1)
    assert bench.queue.room == 1
    bench.book.preempted = 3
    assert bench.queue.room == 0


def test_a_tenant_is_named_once_it_may_not_add_and_others_ask():
    bench = Bench(slots=1, stage_ahead=0, requests_max=6)
    bench.dispatch(1, tenant="greedy")
    bench.begin(1)
    bench.dispatch(2, 3, 4, 5, 6, tenant="greedy")
    assert bench.queue.shares(bench.now) == frozenset(), "it is alone"
    bench.dispatch(7, tenant="modest")
    assert bench.queue.shares(bench.now) == {("greedy", STANDARD), ("modest", STANDARD)}, "there is no place left"
    bench.finish(1)
    assert bench.queue.shares(bench.now) == {("greedy", STANDARD)}
    assert bench.refused(8, tenant="greedy").metadata["stage"] == "share"
    assert bench.queue.shares(bench.now + MEMORY_S + 1) == frozenset(), "others have not asked for long"


def test_no_more_are_named_than_a_report_may_hold_and_none_while_there_is_room():
    bench = Bench(slots=1, stage_ahead=0, requests_max=3 * SHARES_MAX)
    bench.book.kv_cells = 10**9
    for token in range(1, 3 * SHARES_MAX - ROOM_KEPT + 1):
        bench.dispatch(token, tenant=f"t{token // 2}")
        assert bench.queue.room > ROOM_KEPT or token >= 3 * SHARES_MAX - ROOM_KEPT
    assert bench.queue.shares(bench.now) == frozenset()
    for token in range(500, 500 + ROOM_KEPT + 1):
        bench.dispatch(token, tenant=f"x{token}")
    assert len(bench.queue.shares(bench.now)) == SHARES_MAX


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([BATCH, STANDARD]), st.booleans()), min_size=1, max_size=40
    )
)
def test_who_is_named_is_refused_for_its_share_and_nobody_else_is(asked):
    bench = Bench(slots=1, stage_ahead=0, requests_max=6)
    bench.book.kv_cells = 10**9
    for token, (tenant, priority, is_followed_by_an_end) in enumerate(asked, start=1):
        is_named = (tenant, int(priority)) in bench.queue.shares(bench.now)
        assert (stage_of_refusal(bench, token, tenant=tenant, priority=priority) == "share") is is_named
        if is_followed_by_an_end and bench.handed and bench.handed[0] in bench.ledger.attempts:
            running = bench.handed.pop(0)
            bench.begin(running)
            bench.finish(running)


def stage_of_refusal(bench, token, **fields):
    """What refuses it; "": nothing."""
    try:
        bench.dispatch(token, **fields)
    except Failure as failure:
        return failure.metadata["stage"]
    return ""


@pytest.mark.parametrize("waiting", [0, 1])
def test_an_empty_queue_names_nobody(waiting):
    bench = Bench(slots=2, requests_max=1)
    bench.dispatch(*range(1, 1 + waiting))
    assert bench.queue.shares(bench.now) == frozenset()
