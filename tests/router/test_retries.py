"""Retries over real gRPC: pauses, push-back, what is free, the budget; and hedges, with a loser that is confirmed."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest import mock

import prometheus_client as prom
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.backoff import BASE_S
from headrace.control.errors import Failure, Reason
from headrace.router.retrying import Retrying, RetryMetrics
from headrace.router.settings import RouterSettings
from headrace.rpc import status
from router.harness import Harness, collect, failure, kinds, running, soon, until

Record = pb.AttemptRecord
REJECTED, FAILED = pb.FINISH_REASON_REJECTED, pb.FINISH_REASON_FAILED
LOST = Failure(Reason.WORKER_LOST_BEFORE_OUTPUT, "The worker was lost before any output.")
OVERLOADED = Failure(Reason.OVERLOADED, "Too many attempts wait.")


async def refuse(h: Harness, dispatch: sp.Dispatch, why: Failure, finish: int = REJECTED) -> None:
    await h.scheduler.end(dispatch.attempt, finish, error=status.to_proto(why), output_tokens=0)


async def answer_all(h: Harness, dispatch: sp.Dispatch, generated: int = 2) -> None:
    """The whole answer of an attempt, in one go."""
    await h.scheduler.admit(dispatch.attempt)
    await h.scheduler.deltas(dispatch.attempt, "a", "b")
    await h.scheduler.end(dispatch.attempt, usage=pb.Usage(prompt_tokens=3, generated_tokens=generated))


def counted(h: Harness, name: str, **labels: str) -> float:
    value: float | None = h.metrics.registry.get_sample_value(f"headrace_router_{name}", labels)
    assert value is not None, prom.generate_latest(h.metrics.registry).decode()
    return value


def records(event: pb.GenerateEvent) -> list[tuple[Any, ...]]:
    return [
        (one.attempt, one.cause, one.finish_reason, one.delivered, one.usage.generated_tokens)
        for one in event.terminal.attempt_records
    ]


def assert_nothing_is_held(h: Harness) -> None:
    assert h.service.sessions.resources.references == 0
    assert all(link.attempts == 0 for link in h.routes.links)


async def test_a_retry_pauses_is_counted_and_its_attempts_are_told_with_their_usage() -> None:
    async with running(replicas=2) as h:
        answer = asyncio.create_task(collect(h.generate()))
        first = await h.admitted()
        assert first.cause == Record.CAUSE_FIRST
        usage = pb.Usage(prompt_tokens=3, generated_tokens=5)
        began = time.monotonic()
        await h.scheduler.end(first.attempt, FAILED, error=status.to_proto(LOST), usage=usage)
        second = await h.dispatched()
        assert time.monotonic() - began < BASE_S + 0.5
        assert second.cause == Record.CAUSE_RETRY
        assert second.replica != first.replica
        await answer_all(h, second)
        events, error = await answer
        assert error is None
        assert [event.notice.kind for event in events if event.HasField("notice")] == [pb.Notice.KIND_RETRIED]
        assert records(events[-1]) == [
            (1, Record.CAUSE_FIRST, pb.FINISH_REASON_INTERRUPTED, False, 5),
            (2, Record.CAUSE_RETRY, pb.FINISH_REASON_STOP, True, 2),
        ]
        assert {one.replica for one in events[-1].terminal.attempt_records} == {"replicas/r0", "replicas/r1"}
        told = await h.stub.GetRequest(pb.GetRequestRequest(request=events[0].request))
        assert list(told.attempt_records) == list(events[-1].terminal.attempt_records)
        assert told.usage == events[-1].terminal.usage
        total = events[-1].terminal.usage
        assert (total.prompt_tokens, total.generated_tokens, total.sent_tokens) == (3, 7, 2)
        assert counted(h, "attempts_total", cause="first") == 1
        assert counted(h, "attempts_total", cause="retry") == 1
        assert_nothing_is_held(h)


async def test_push_back_is_obeyed() -> None:
    async with running(replicas=2) as h:
        answer = asyncio.create_task(collect(h.generate()))
        first = await h.dispatched()
        why = Failure(LOST.reason, LOST.message, retry_after_s=0.35)
        began = time.monotonic()
        await refuse(h, first, why, FAILED)
        second = await h.dispatched()
        assert 0.35 <= time.monotonic() - began < 1.5
        await answer_all(h, second)
        assert (await answer)[1] is None


async def test_a_refusal_by_a_draining_worker_is_free_and_the_next_attempt_is_the_first() -> None:
    async with running(replicas=4, retry_floor=0, attempts_max=1) as h:
        answer = asyncio.create_task(collect(h.generate()))
        for reason in (Reason.DRAINING, Reason.STALE_EPOCH, Reason.DRAINING):
            dispatch = await h.dispatched()
            assert dispatch.cause == Record.CAUSE_FIRST
            await refuse(h, dispatch, Failure(reason, "Elsewhere."))
        last = await h.dispatched()
        assert last.cause == Record.CAUSE_FIRST
        await answer_all(h, last)
        events, error = await answer
        assert error is None
        assert [one.cause for one in events[-1].terminal.attempt_records] == [1, 2, 2, 2]


async def test_without_budget_the_original_error_is_shown_and_says_why_there_is_no_other_attempt() -> None:
    async with running(replicas=3, retry_floor=1) as h:
        first = asyncio.create_task(collect(h.generate()))
        await refuse(h, await h.dispatched(), LOST, FAILED)
        await refuse(h, await h.dispatched(), LOST, FAILED)
        _, error = await first
        assert failure(error).reason is Reason.WORKER_LOST_BEFORE_OUTPUT
        assert failure(error).metadata["retry"] == "budget"
        assert counted(h, "attempts_refused_total", why="budget") == 1
        await until(lambda: counted(h, "retry_budget") == 0)


async def test_reports_of_a_fleet_that_fares_well_make_room() -> None:
    async with running(replicas=2, retry_floor=0) as h:
        await h.scheduler.send(load=sp.LoadReport(successes=200, extra_attempts=5, routers=3))
        await until(lambda: counted(h, "retry_budget") == 5.0, "a third of 20 - 5")
        answer = asyncio.create_task(collect(h.generate()))
        await refuse(h, await h.dispatched(), LOST, FAILED)
        await answer_all(h, await h.dispatched())
        assert (await answer)[1] is None
        await until(lambda: counted(h, "retry_budget") == 4.0)


async def test_an_overloaded_replica_is_left_once_and_for_one_that_is_not() -> None:
    async with running(replicas=3) as h:
        answer = asyncio.create_task(collect(h.generate()))
        first = await h.dispatched()
        await refuse(h, first, OVERLOADED)
        second = await h.dispatched()
        assert second.replica != first.replica
        await refuse(h, second, OVERLOADED)
        _, error = await answer
        assert failure(error).reason is Reason.OVERLOADED
        answer = asyncio.create_task(collect(h.generate()))
        third = await h.dispatched()
        await refuse(h, third, OVERLOADED)
        if third.replica in (first.replica, second.replica):  # there is one left that has not refused
            fourth = await h.dispatched()
            assert fourth.replica not in (first.replica, second.replica)
            await refuse(h, fourth, OVERLOADED)
        assert failure((await answer)[1]).reason is Reason.OVERLOADED
        assert h.scheduler.dispatches.empty()


async def test_what_one_replica_cannot_do_in_time_another_one_may_once() -> None:
    too_late = Failure(Reason.DEADLINE_UNMEETABLE, "It waits too long here.", retry_after_s=4.0)
    async with running(replicas=3) as h:
        answer = asyncio.create_task(collect(h.generate()))
        first = await h.dispatched()
        await refuse(h, first, too_late)
        second = await h.dispatched()
        assert second.replica != first.replica
        assert second.cause == pb.AttemptRecord.CAUSE_RETRY, "it is paid for"
        await answer_all(h, second)
        assert (await answer)[1] is None
        answer = asyncio.create_task(collect(h.generate()))
        for _ in range(2):
            await refuse(h, await h.dispatched(), too_late)
        assert failure((await answer)[1]).reason is Reason.DEADLINE_UNMEETABLE
        answer = asyncio.create_task(collect(h.generate()))
        await refuse(h, await h.dispatched(), Failure(Reason.DEADLINE_UNMEETABLE, "It takes too long anywhere."))
        assert failure((await answer)[1]).reason is Reason.DEADLINE_UNMEETABLE
        assert h.scheduler.dispatches.empty()


async def test_where_every_replica_is_overloaded_nothing_is_tried_again() -> None:
    async with running(replicas=2) as h:
        for replica in ("replicas/r0", "replicas/r1"):
            h.service.sessions.retrying.policy.overloaded(replica, 5.0, time.monotonic())
        answer = asyncio.create_task(collect(h.generate()))
        await refuse(h, await h.dispatched(), OVERLOADED)
        assert failure((await answer)[1]).reason is Reason.OVERLOADED
        assert counted(h, "attempts_refused_total", why="nobody") == 1
        assert h.scheduler.dispatches.empty()


async def test_no_attempt_starts_that_could_not_answer_in_time() -> None:
    async with running(replicas=2) as h:
        load = sp.LoadReport(replicas=[sp.ReplicaLoad(replica=f"replicas/r{n}", slots=4) for n in range(2)])
        for replica in load.replicas:
            replica.queue_wait.FromSeconds(60)
        await h.scheduler.send(load=load)
        await until(lambda: len(h.service.sessions.retrying._waits) == 2)
        answer = asyncio.create_task(collect(h.generate()))
        await refuse(h, await h.dispatched(), LOST, FAILED)
        error = failure((await answer)[1])
        assert error.reason is Reason.WORKER_LOST_BEFORE_OUTPUT
        assert "retry" not in error.metadata
        assert counted(h, "attempts_refused_total", why="time") == 1


@pytest.mark.parametrize("how", ["cancel", "gone", "drain"])
async def test_what_ends_a_request_in_its_pause_ends_it_at_once(how: str) -> None:
    async with running(replicas=2) as h:
        call = await h.interactive()
        first = await h.admitted()
        accepted = await call.read()
        why = Failure(LOST.reason, LOST.message, retry_after_s=6.0)
        await refuse(h, first, why, FAILED)
        (session,) = h.service.sessions
        await until(lambda: session.machine.retry_at is not None)
        if how == "cancel":
            await call.write(pb.ClientFrame(cancel=pb.CancelFrame()))
        elif how == "drain":
            session.drain()
        else:
            call.cancel()
        if how != "gone":
            events, error = await collect(call)
            assert kinds([accepted, *events]) == ["accepted", "terminal"]
            expected = Reason.CLIENT_CANCELLED if how == "cancel" else Reason.DRAINING
            assert failure(error).reason is expected
        await until(lambda: not list(h.service.sessions))
        assert h.scheduler.dispatches.empty()
        assert_nothing_is_held(h)


# Hedges


async def two_attempts(h: Harness) -> tuple[sp.Dispatch, sp.Dispatch]:
    first = await h.admitted()
    second = await h.admitted()
    assert second.cause == Record.CAUSE_HEDGE
    assert second.replica != first.replica
    assert second.credit_limit == first.credit_limit
    return first, second


@pytest.mark.parametrize("rival_wins", [True, False])
async def test_the_first_to_answer_wins_and_the_loser_is_confirmed_before_the_end(rival_wins: bool) -> None:
    async with running(replicas=2, hedge_after_s=0.05) as h:
        answer = asyncio.create_task(collect(h.generate()))
        first, second = await two_attempts(h)
        winner, loser = (second, first) if rival_wins else (first, second)
        await h.scheduler.deltas(winner.attempt, "a")
        cancel = await soon(h.scheduler.cancels)
        assert (cancel.attempt, cancel.cause) == (loser.attempt, pb.FINISH_REASON_CANCELLED)
        await h.scheduler.deltas(loser.attempt, "X")
        await h.scheduler.deltas(winner.attempt, "b")
        await h.scheduler.end(winner.attempt, usage=pb.Usage(prompt_tokens=3, generated_tokens=2), output_tokens=2)
        await until(lambda: h.service.sessions.resources.references > 0 and h.routes.links[0].attempts == 1)
        (session,) = h.service.sessions
        assert not session.is_over
        assert not answer.done()
        used = pb.Usage(prompt_tokens=3, generated_tokens=4)
        await h.scheduler.end(loser.attempt, pb.FINISH_REASON_CANCELLED, usage=used, output_tokens=1)
        events, error = await answer
        assert error is None
        assert "".join(event.delta.text for event in events) == "ab"
        terminal = events[-1].terminal
        assert (terminal.usage.prompt_tokens, terminal.usage.generated_tokens) == (3, 6)
        finishes = {one.attempt: one.finish_reason for one in terminal.attempt_records}
        assert finishes[2 if rival_wins else 1] == pb.FINISH_REASON_STOP
        assert finishes[1 if rival_wins else 2] == pb.FINISH_REASON_CANCELLED
        assert [one.delivered for one in terminal.attempt_records] == [not rival_wins, rival_wins]
        await until(lambda: not list(h.service.sessions))
        assert counted(h, "hedges_total", outcome="won" if rival_wins else "lost") == 1
        assert_nothing_is_held(h)


async def test_a_request_that_is_cancelled_stops_both() -> None:
    async with running(replicas=2, hedge_after_s=0.05) as h:
        call = h.generate()
        first, second = await two_attempts(h)
        call.cancel()
        asked = {(await soon(h.scheduler.cancels)).attempt for _ in range(2)}
        assert asked == {first.attempt, second.attempt}
        await h.scheduler.end(first.attempt, pb.FINISH_REASON_CANCELLED)
        await until(lambda: h.routes.links[0].attempts == 1)
        assert list(h.service.sessions), "one of them is not confirmed"
        await h.scheduler.end(second.attempt, pb.FINISH_REASON_CANCELLED)
        await until(lambda: not list(h.service.sessions))
        assert_nothing_is_held(h)


async def test_where_the_first_fails_the_rival_goes_on_and_a_lost_link_takes_both() -> None:
    async with running(replicas=2, hedge_after_s=0.05) as h:
        answer = asyncio.create_task(collect(h.generate()))
        first, second = await two_attempts(h)
        await refuse(h, first, LOST, FAILED)
        await h.scheduler.deltas(second.attempt, "a", "b")
        await h.scheduler.end(second.attempt, usage=pb.Usage(generated_tokens=2))
        events, error = await answer
        assert error is None
        finishes = [one.finish_reason for one in events[-1].terminal.attempt_records]
        assert finishes == [pb.FINISH_REASON_INTERRUPTED, pb.FINISH_REASON_STOP]
        answer = asyncio.create_task(collect(h.generate()))
        await two_attempts(h)
        h.scheduler.cut()
        assert failure((await answer)[1]).reason is Reason.WORKER_LOST_BEFORE_OUTPUT
        await until(lambda: not list(h.service.sessions))
        assert_nothing_is_held(h)


async def test_there_is_no_hedge_once_there_is_output_nor_without_budget_nor_elsewhere() -> None:
    async with running(replicas=2, hedge_after_s=0.05) as h:
        answer = asyncio.create_task(collect(h.generate()))
        first = await h.admitted()
        await h.scheduler.deltas(first.attempt, "a")
        await asyncio.sleep(0.15)
        assert h.scheduler.dispatches.empty()
        await h.scheduler.end(first.attempt, usage=pb.Usage(generated_tokens=1))
        assert (await answer)[1] is None
    for replicas, floor in ((2, 0), (1, 3)):
        async with running(replicas=replicas, hedge_after_s=0.05, retry_floor=floor) as h:
            answer = asyncio.create_task(collect(h.generate()))
            first = await h.admitted()
            await asyncio.sleep(0.15)
            assert h.scheduler.dispatches.empty()
            await h.scheduler.end(first.attempt, usage=pb.Usage(generated_tokens=0))
            assert (await answer)[1] is None


def test_metrics_which_another_thread_reads_do_not_touch_the_budget() -> None:
    retrying, registry = Retrying(RouterSettings(retry_floor=7)), prom.CollectorRegistry()
    RetryMetrics(registry, retrying)
    retrying.tend()
    retrying.budget = mock.Mock(spec=["refused"], refused=2)
    assert registry.get_sample_value("headrace_router_retry_budget") == 7
    assert registry.get_sample_value("headrace_router_attempts_refused_total", {"why": "budget"}) == 2
