"""To whom a worker says that it is closed: what it says and what it does are the same."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control import door_keeper
from headrace.control.door_keeper import ASK_S, ASKS_MAX, LOOKS_A_SECOND, LOOKS_MAX, Looks
from headrace.control.doors import Asking, Closed
from headrace.control.errors import Failure
from headrace.control.fair_room import MEMORY_S
from headrace.control.priority import Priority
from support.attempts import wanted
from support.queues import SERVED, Bench

STANDARD, BATCH = Priority.STANDARD, Priority.BATCH


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    """Tests are about what is found, but for the one about how often."""
    monkeypatch.setattr(door_keeper, "LOOKS_MAX", math.inf)


def told(bench, at=None):
    """Who is told of as refused, and for how long it would wait."""
    closed = bench.ledger.keepers["replicas/a"].closed(bench.now if at is None else at)
    return {(one.tenant, one.priority): one for one in closed}


def full(slots=1, waiting=(), **settings):
    bench = Bench(slots=slots, stage_ahead=0, **settings)
    bench.book.kv_cells = 10**9
    bench.dispatch(*range(1, slots + 1), tenant="first")
    bench.begin(*range(1, slots + 1))
    for token, tenant in enumerate(waiting, start=slots + 1):
        bench.dispatch(token, tenant=tenant)
    return bench


def test_the_room_is_what_is_left_of_the_queue_and_none_beside_readers_that_stand_still():
    bench = full(requests_max=3)
    assert bench.queue.room == 3
    bench.dispatch(2, 3)
    assert bench.queue.room == 1
    bench.dispatch(4)
    assert (bench.queue.room, bench.queue.admits_from) == (0, Priority.CRITICAL)
    bench.finish(1)
    assert bench.queue.room == 1
    bench.book.preempted = 3
    assert bench.queue.room == 0


def test_a_tenant_is_told_once_it_may_not_add_and_others_ask():
    bench = Bench(slots=1, stage_ahead=0, requests_max=6)
    bench.dispatch(1, tenant="greedy")
    bench.begin(1)
    bench.dispatch(2, 3, 4, 5, 6, tenant="greedy")
    assert not told(bench), "it is alone"
    bench.dispatch(7, tenant="modest")
    assert set(told(bench)) == {("greedy", STANDARD), ("modest", STANDARD)}, "there is no place left"
    bench.finish(1)
    assert {key: one.wait_s for key, one in told(bench).items()} == {("greedy", STANDARD): math.inf}
    assert bench.refused(8, tenant="greedy").metadata["stage"] == "share"
    bench.begin(2)
    bench.finish(2)
    assert not told(bench, bench.now + MEMORY_S + 1), "nobody has asked for long"


@pytest.mark.parametrize(
    ("limits", "stage", "field"),
    [({"queue_s": 3.0}, "wait", "wait_s"), ({"remaining_s": 3.0}, "firstToken", "done_s")],
    ids=["its longest wait", "its deadline"],
)
def test_who_would_wait_too_long_is_told_with_how_long_and_judged_by_the_own_limits(limits, stage, field):
    bench = Bench(slots=1, stage_ahead=0)
    bench.book.kv_cells = 10**9
    bench.learn()  # two seconds each
    bench.dispatch(1, 2, 3)
    bench.begin(1)
    assert not told(bench), "nobody has asked who would be refused"
    failure = bench.refused(9, tenant="t", **limits)
    assert failure.metadata["stage"] == stage
    bench.dispatch(4)
    (closed,) = told(bench).values()
    expected_s = int(failure.metadata["expectedMs"]) / 1000
    assert (closed.tenant, closed.priority) == ("t", STANDARD)
    assert getattr(closed, field) >= expected_s > 3.0
    like = Asking(STANDARD, "t", closed.tokens)
    assert closed.refuses(replace(like, queue_s=3.0, deadline_at=bench.now + 3.0), bench.now)
    assert not closed.refuses(like, bench.now)


def test_who_asked_long_ago_is_not_told_of_and_no_more_than_a_report_may_hold(monkeypatch):
    bench = full(requests_max=200)
    for token in range(1000, 1000 + 2 * ASKS_MAX):
        bench.dispatch(token, tenant=f"t{token}")
    keeper = bench.ledger.keepers["replicas/a"]
    monkeypatch.setattr(door_keeper.DoorKeeper, "_again", lambda _, attempt, now: Closed(attempt.tenant, 3))
    assert len(keeper.closed(bench.now)) == ASKS_MAX
    assert len(keeper.closed(bench.now + 2 * ASK_S)) == ASKS_MAX, "nothing has happened"
    bench.dispatch(5000, tenant="new")
    assert len(keeper.closed(bench.now)) == ASKS_MAX
    bench.advance(2 * ASK_S)
    bench.dispatch(5001, tenant="newest")
    assert [one.tenant for one in keeper.closed(bench.now)] == ["newest"]


def test_nothing_is_kept_of_what_was_asked():
    bench = full(waiting=("a",))
    bench.ledger.dispatch(wanted(9, tenant="b"), bench.now, payload="what it says")
    asks = bench.ledger.keepers["replicas/a"]._asks
    assert len(asks) == 3
    assert all(attempt.payload is None for attempt in asks.values())
    assert bench.ledger.attempts[9].payload == "what it says"


def test_it_is_looked_at_at_once_and_no_more_than_so_often_and_says_when_it_is_due(monkeypatch):
    monkeypatch.setattr(door_keeper, "LOOKS_MAX", LOOKS_MAX)
    bench = Bench(slots=1, stage_ahead=0, requests_max=500)
    keeper, looks = bench.ledger.keepers["replicas/a"], []
    monkeypatch.setattr(keeper, "_again", lambda attempt, now: looks.append(now))
    bench.dispatch(1)
    bench.begin(1)
    for token in range(2, 2 + int(LOOKS_MAX)):
        bench.dispatch(token)
        keeper.closed(bench.now)
    assert len(looks) == LOOKS_MAX
    assert bench.ledger.next_due() > 1.0, "nothing has changed"
    bench.dispatch(90)
    keeper.closed(bench.now)
    keeper.closed(bench.now + 0.9 / LOOKS_A_SECOND)
    assert len(looks) == LOOKS_MAX
    assert bench.ledger.next_due() == keeper.next_due == pytest.approx(bench.now + 1 / LOOKS_A_SECOND)
    keeper.closed(keeper.next_due)
    assert len(looks) == LOOKS_MAX + 1
    assert keeper.next_due == math.inf
    bench.now += 1000.0
    for token in range(100, 120 + int(LOOKS_MAX)):
        bench.dispatch(token)
        keeper.closed(bench.now)
    assert len(looks) == 2 * LOOKS_MAX + 1, "what was not used for long is not had at once"


@pytest.mark.parametrize(("workers", "at_once", "a_second"), [(2, 10, 40), (4, 5, 20), (40, 2, 2)])
def test_what_may_be_looked_at_is_shared_evenly_by_the_workers_of_a_scheduler(workers, at_once, a_second, monkeypatch):
    monkeypatch.setattr(door_keeper, "LOOKS_MAX", LOOKS_MAX)
    all_looks, taken = [Looks() for _ in range(workers)], Counter()
    for now in (0.0, *(10.0 + n / 200 for n in range(400))):
        for n, looks in enumerate(all_looks):
            for _ in range(30):  # whoever asks first gets no more than its share
                taken[n, now < 10.0] += looks.take(now, workers) == 0.0
    for n in range(workers):
        assert taken[n, True] == at_once
        assert taken[n, False] == pytest.approx(at_once + 2 * a_second, abs=2)


def test_what_was_asked_before_prompts_were_measured_is_asked_again_by_their_measure(monkeypatch):
    bench, looked_at = full(), []
    bench.dispatch(2, tenant="t", prompt_estimate=10)
    bench.dispatch(3, tenant="exact", prompt_estimate=10, is_prompt_exact=True)
    kind = bench.ledger.attempts[2].load_class
    for _ in range(20):
        bench.ledger.times.counted(kind, 10, 40, bench.now)
    real = bench.queue.foresee
    monkeypatch.setattr(bench.queue, "foresee", lambda again, now: looked_at.append(again) or real(again, now))
    told(bench)
    found = {again.tenant: (again.prompt_tokens, again.kv_cells) for again in looked_at}
    tokens, cells = found["t"]
    assert 35 < tokens <= 40
    assert cells == bench.ledger.attempts[2].kv_cells + tokens - 10
    assert found["exact"] == (10, bench.ledger.attempts[3].kv_cells)


def test_it_is_looked_at_again_only_when_something_has_changed(monkeypatch):
    bench = full(waiting=("a", "b"))
    keeper, looks = bench.ledger.keepers["replicas/a"], []
    real = door_keeper.DoorKeeper._again
    monkeypatch.setattr(door_keeper.DoorKeeper, "_again", lambda *of: looks.append(1) or real(*of))
    keeper.closed(bench.now)
    keeper.closed(bench.now)
    assert len(looks) == 3
    bench.finish(1, served=SERVED)
    keeper.closed(bench.now)
    assert len(looks) == 6


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([BATCH, STANDARD]), st.sampled_from([None, 1.0, 4.0]),
                  st.booleans()),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_who_is_told_of_is_refused_and_who_has_asked_the_same_and_is_not_told_of_is_let_in(asked):
    bench = Bench(slots=1, stage_ahead=0, requests_max=6)
    bench.book.kv_cells = 10**9
    bench.learn()
    latest = {}
    for token, (tenant, priority, queue_s, is_followed_by_an_end) in enumerate(asked, start=1):
        key = tenant, int(priority)
        closed = told(bench).get(key)
        is_full = bench.queue.room == 0
        asking = Asking(int(priority), tenant, closed.tokens if closed else 0, queue_s or math.inf)
        is_refused = closed is not None and closed.refuses(asking, bench.now)
        stage = stage_of_refusal(bench, token, tenant=tenant, priority=priority, queue_s=queue_s)
        if is_refused:
            assert stage in ("share", "wait")
        elif latest.get(key, "never") == queue_s and not is_full and len(bench.queue.waiting):
            assert stage in ("", "requests")
        latest[key] = queue_s
        if is_followed_by_an_end and bench.handed and bench.handed[0] in bench.ledger.attempts:
            running = bench.handed.pop(0)
            bench.begin(running)
            bench.finish(running, served=SERVED)


def stage_of_refusal(bench, token, **fields):
    """What refuses it; "": nothing."""
    try:
        bench.dispatch(token, **fields)
    except Failure as failure:
        return failure.metadata["stage"]
    return ""
