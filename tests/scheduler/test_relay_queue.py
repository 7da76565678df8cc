"""The relay and its queue: what waits here, when it goes out, how it ends without the engine, and what reports say."""

import asyncio
import math
import time

import pytest

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control import door_keeper
from headrace.control.priority import Priority
from headrace.scheduler import session as session_module
from support.relaying import REVISION, Bench
from support.scripted_engine import admitted, finished


@pytest.fixture
def bench():
    return Bench()


async def test_an_attempt_beyond_the_slots_waits_here_and_goes_out_with_the_credit_that_it_has_by_then(bench):
    for token in range(1, 8):
        bench.dispatch(token, credit=8)
    assert [seq for _, seq in bench.engine.asked] == [1, 2, 3, 4, 5]  # four slots and one ahead
    bench.take(credits=[pb.Credit(attempt=6, limit=64), pb.Credit(attempt=1, limit=64)])
    assert bench.engine.asked[5:] == [("credit", 1, 64)]
    bench.tell(admitted(1), admitted(2))
    bench.tell(finished(1, "stop"))
    assert bench.engine.asked[6:] == [("generate", 6)]
    assert bench.engine.requests[6]["credit"] == 64
    assert bench.metric("queue_attempts", priority="standard") == 1
    assert bench.metric("attempts_staged", revision=REVISION) == 4
    assert bench.metric("queue_wait_seconds_count", priority="standard") == 2


async def test_a_cancel_and_a_lost_router_end_what_waits_without_the_engine(bench):
    other = bench.relay.open_session("routers/other")
    for token in range(1, 8):
        bench.dispatch(token)
    bench.dispatch(8, session=other)
    bench.take(cancels=[pb.Cancel(attempt=7, cause=inference_pb2.FINISH_REASON_SLOW_CONSUMER)])
    (ended,) = bench.told().ended
    assert (ended.attempt, ended.reason) == (7, inference_pb2.FINISH_REASON_SLOW_CONSUMER)
    assert (ended.output_tokens, ended.HasField("output_tokens"), ended.HasField("queue")) == (0, True, False)
    bench.relay.close_session(other)
    assert 8 not in bench.relay.ledger.attempts
    assert not [asked for asked in bench.engine.asked if asked[0] == "cancel"]
    assert bench.metric("attempts_ended_total", finish_reason="CANCELLED", reason="CLIENT_CANCELLED") == 1
    assert bench.metric("cancels_total") == bench.metric("cancels_confirmed_total") == 2


async def test_a_wait_ends_at_its_limit_by_a_timer_of_its_own(bench):
    for token in range(1, 7):
        bench.dispatch(token, queue_s=0.05)
    async with asyncio.timeout(5):
        while 6 in bench.relay.ledger.attempts:
            await asyncio.sleep(0)
    (ended,) = bench.told().ended
    assert (ended.attempt, errors_pb2.Reason.Name(ended.error.reason)) == (6, "REASON_QUEUE_TIMEOUT")
    assert bench.metric("attempts_refused_total", reason="QUEUE_TIMEOUT", stage="queue") == 1


async def test_a_frame_s_urgent_attempt_takes_the_place_of_one_that_may_be_shed(bench):
    for token in range(1, 21):  # four run, one is ahead, fifteen wait
        bench.dispatch(token, priority=inference_pb2.PRIORITY_SHEDDABLE)
        if token <= 4:
            bench.tell(admitted(token))
    bench.told()
    bench.dispatch(30, priority=inference_pb2.PRIORITY_CRITICAL)
    (ended,) = bench.told().ended
    assert (ended.attempt, ended.error.metadata["stage"]) == (20, "shed")
    assert ended.error.HasField("retry_delay")
    bench.tell(finished(1, "stop"))
    assert bench.engine.asked[-1] == ("generate", 30)


async def test_a_report_tells_the_load_the_routers_and_what_was_tried_again(bench):
    bench.relay.open_session("routers/other")
    bench.relay.open_session("routers/other")  # it has attached again, and its old session is still here
    times = {"admitted": 1_000_000_000, "first_token": 1_500_000_000}
    for token in range(1, 10):
        is_retry = token == 9
        cause = inference_pb2.AttemptRecord.CAUSE_RETRY if is_retry else inference_pb2.AttemptRecord.CAUSE_FIRST
        bench.dispatch(token, cause=cause)
        bench.tell(admitted(token))
        ended = finished(token, "stop", emitted=11)
        ended["timing_ns"] = times | {"stopped": 2_500_000_000, "finished": 2_500_000_000}
        ended["usage"] |= {"generated": 11, "prompt": 5, "cached": 0}
        bench.tell(ended)
    for token in range(11, 18):
        bench.dispatch(token, max_tokens=20)
    bench.tell(*(admitted(token) for token in range(11, 15)))
    bench.relay.ledger.workers["replicas/a"].admits_from = Priority.BATCH
    report = bench.relay.load_report()
    assert (report.routers, report.successes, report.extra_attempts) == (2, 8, 1)
    (load,) = report.replicas
    assert (load.active, load.waiting, load.concurrency_limit) == (4, 3, 4)
    assert load.waiting_tokens == 3 * bench.relay.ledger.attempts[17].kv_cells
    assert load.prefill_tokens_per_second == 10
    assert load.admits_from == inference_pb2.PRIORITY_BATCH
    assert load.queue_wait.ToMilliseconds() == pytest.approx((2 + 1 + 1) * 1500 / 4, abs=5)


async def test_what_waits_for_a_router_is_told_beside_its_bound_and_too_much_is_counted(bench):
    bench.dispatch(1)
    bench.tell(admitted(1))
    bench.say(1, 7)
    assert (bench.metric("send_buffer_tokens"), bench.metric("send_buffer_bytes")) == (7, 7)
    assert bench.metric("send_buffer_tokens_max") == session_module.WAITING_TOKENS_MAX
    bench.say(1, session_module.WAITING_TOKENS_MAX)
    assert bench.metric("send_buffer_overflows_total") == 0
    bench.relay.close_session(bench.session)
    assert bench.metric("send_buffer_overflows_total") == 1
    assert bench.metric("send_buffer_tokens") == 0


async def test_routers_are_told_at_once_when_a_worker_begins_or_ceases_to_refuse_somebody(bench, monkeypatch):
    monkeypatch.setattr(door_keeper, "LOOKS_A_SECOND", 1e9)
    for token in range(1, 20):  # four run, fifteen wait: there is one place
        bench.dispatch(token, tenant="greedy" if token < 19 else "modest")
        if token <= 4:
            bench.tell(admitted(token))
    told = bench.told()
    (load,) = told.load.replicas
    assert (load.room, load.admits_from) == (1, 0)
    assert [(one.tenant, one.priority, one.HasField("wait")) for one in load.closed] == [
        ("greedy", inference_pb2.PRIORITY_STANDARD, False)
    ]
    bench.dispatch(20, tenant="modest")
    (load,) = bench.told().load.replicas
    assert (load.room, load.admits_from) == (0, inference_pb2.PRIORITY_CRITICAL)
    bench.take(credits=[pb.Credit(attempt=20, limit=64)])
    assert not bench.told().HasField("load"), "nothing has changed"
    bench.tell(finished(1, "stop"))
    (load,) = bench.told().load.replicas
    assert (load.room, load.admits_from) == (1, 0)


async def test_what_was_not_looked_at_at_once_is_told_as_soon_as_it_may_be(bench, monkeypatch):
    monkeypatch.setattr(door_keeper, "LOOKS_MAX", 0.0)
    monkeypatch.setattr(door_keeper, "LOOKS_MIN", 0.0)
    for token in range(1, 20):
        bench.dispatch(token, tenant="greedy" if token < 19 else "modest")
        if token <= 4:
            bench.tell(admitted(token))
    (keeper,) = bench.relay.ledger.keepers.values()
    assert bench.relay._timer_at == keeper.next_due < math.inf
    (load,) = bench.told().load.replicas
    assert not load.closed
    monkeypatch.setattr(door_keeper, "LOOKS_MAX", 1e9)
    monkeypatch.setattr(door_keeper, "LOOKS_A_SECOND", 1e9)
    bench.relay._on_timer()
    (load,) = bench.told().load.replicas
    assert [one.tenant for one in load.closed] == ["greedy"]


async def test_a_look_that_is_due_is_had_though_the_books_are_as_they_were(bench):
    for token in range(1, 20):
        bench.dispatch(token, tenant="greedy" if token < 19 else "modest")
        if token <= 4:
            bench.tell(admitted(token))
    (keeper,) = bench.relay.ledger.keepers.values()
    assert keeper.next_due == math.inf
    keeper._seen, keeper.next_due = (), time.monotonic()  # a report came to it when no look was left
    bench.relay._on_timer()
    assert keeper.next_due == math.inf, "else the timer would fire again and again"
