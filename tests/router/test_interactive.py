"""Readers that say what they have read, readers that do not read, and every way to ask for an end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Reason
from headrace.router import session as session_module
from router.harness import DEADLINE_S, Harness, collect, failure, kinds, running, soon, until

WINDOW = 8
TEXTS = "abcdefgh"


def acknowledge(sequence: int) -> pb.ClientFrame:
    return pb.ClientFrame(acknowledge=pb.Acknowledge(sequence=sequence))


CANCEL = pb.ClientFrame(cancel=pb.CancelFrame())


async def read(call: Any, count: int) -> list[pb.GenerateEvent]:
    async with asyncio.timeout(DEADLINE_S):
        return [await call.read() for _ in range(count)]


async def test_credit_follows_acknowledgements_not_what_the_transport_takes() -> None:
    async with running(credit_window_tokens=WINDOW) as h:
        call = await h.interactive()
        dispatch = await h.admitted()
        assert dispatch.credit_limit == WINDOW
        await h.scheduler.deltas(dispatch.attempt, *TEXTS)
        accepted, delta = await read(call, 2)
        assert accepted.accepted.window_tokens == WINDOW
        assert delta.delta.text == TEXTS
        await call.write(acknowledge(1))
        # `accepted` confirms no token: the next credit can only be the answer to the delta's acknowledgement.
        assert h.scheduler.credits.empty()
        await call.write(acknowledge(2))
        credit = await soon(h.scheduler.credits)
        assert (credit.attempt, credit.limit) == (dispatch.attempt, 2 * WINDOW)
        await h.scheduler.end(dispatch.attempt, usage=pb.Usage(generated_tokens=8))
        events, error = await collect(call)
    assert error is None
    assert kinds(events, 3) == ["terminal"]
    assert (events[0].terminal.usage.sent_tokens, events[0].terminal.usage.acknowledged_tokens) == (8, 8)
    assert h.scheduler.credits.empty()


async def test_less_than_half_a_window_grants_nothing_and_old_acknowledgements_change_nothing() -> None:
    async with running(credit_window_tokens=WINDOW) as h:
        call = await h.interactive()
        dispatch = await h.admitted()
        for number, text in enumerate(("ab", "c", "d")):
            await h.scheduler.deltas(dispatch.attempt, *text)
            await until(lambda number=number: h.metrics.writes >= 2 + number)  # type: ignore[misc]
        events = await read(call, 4)
        assert kinds(events) == ["accepted", "delta", "delta", "delta"]
        for sequence in (3, 2, 3, 1):
            await call.write(acknowledge(sequence))
        await until(lambda: h.metrics.acknowledgements == 4)
        assert h.scheduler.credits.empty(), "3 of 8 tokens are less than half a window"
        await call.write(acknowledge(4))
        assert (await soon(h.scheduler.credits)).limit == WINDOW + 4
        call.cancel()


async def test_a_request_names_its_own_window() -> None:
    async with running(credit_window_tokens_max=64) as h:
        call = await h.interactive(window_tokens=64)
        assert (await h.admitted()).credit_limit == 64
        assert (await read(call, 1))[0].accepted.window_tokens == 64
        call.cancel()
        for window in (7, 65):
            _events, error = await collect(h.generate(window_tokens=window))
            assert (failure(error).reason, failure(error).field) == (Reason.INVALID_REQUEST, "window_tokens")


async def test_a_window_has_room_for_what_a_stop_string_holds_back() -> None:
    async with running(credit_window_tokens=8) as h:
        call = await h.interactive(stop={"strings": ["ab", "é" * 20]})
        assert (await h.admitted()).credit_limit == 2 * 40 + 8
        assert (await read(call, 1))[0].accepted.window_tokens == 88
        call.cancel()


@pytest.mark.parametrize("way", ["frame", "call", "CancelRequest", "channel"])
async def test_each_way_to_cancel_reaches_the_engine_once(way: str) -> None:
    async with running() as h:
        async with grpc.aio.insecure_channel(h.target) as channel:
            call = InferenceServiceStub(channel).GenerateInteractive(timeout=DEADLINE_S)
            await call.write(pb.ClientFrame(start=pb.GenerateRequest(model="chat", prompt="x")))
            dispatch = await h.admitted()
            await h.scheduler.deltas(dispatch.attempt, "a", "b")
            name = (await read(call, 2))[0].request
            if way == "frame":
                await call.write(CANCEL)
                await call.write(CANCEL)
            elif way == "call":
                call.cancel()
            elif way == "CancelRequest":
                asking = asyncio.create_task(cancel_request(h, name))
            else:
                await channel.close()
            cancel = await soon(h.scheduler.cancels)
            assert (cancel.attempt, cancel.cause) == (dispatch.attempt, pb.FINISH_REASON_CANCELLED)
            assert h.routes.in_flight == {"replicas/r0": 1}, "not free before the engine says so"
            assert h.service.sessions.resources.references > 0
            await h.scheduler.end(
                dispatch.attempt,
                pb.FINISH_REASON_CANCELLED,
                usage=pb.Usage(generated_tokens=5),
                release=Duration(nanos=100_000),
            )
            if way in ("frame", "CancelRequest"):
                events, error = await collect(call)
                terminal = events[-1].terminal
                assert kinds(events, 3) == ["terminal"]
                assert terminal.finish_reason == pb.FINISH_REASON_CANCELLED
                assert (terminal.usage.generated_tokens, terminal.usage.sent_tokens) == (5, 2)
                assert failure(error).reason is Reason.CLIENT_CANCELLED
                freed, stopped = terminal.timing.cancel_to_freed, terminal.timing.cancel_to_stopped
                assert freed.ToMicroseconds() - stopped.ToMicroseconds() == pytest.approx(100, abs=2)
            if way == "CancelRequest":
                assert (await asking).finish_reason == pb.FINISH_REASON_CANCELLED
        await until(lambda: len(h.service.sessions) == 0)
        assert h.service.sessions.resources.references == 0
        assert h.scheduler.cancels.empty()
        record = await h.stub.GetRequest(pb.GetRequestRequest(request=name), timeout=DEADLINE_S)
    assert record.state == pb.Request.STATE_TERMINAL
    assert record.usage.generated_tokens == 5
    assert record.timing.HasField("cancel_to_freed")


async def cancel_request(h: Harness, name: str) -> pb.Request:
    record: pb.Request = await h.stub.CancelRequest(pb.CancelRequestRequest(request=name), timeout=DEADLINE_S)
    return record


async def test_what_waits_is_dropped_when_the_caller_ends_it_and_late_output_too() -> None:
    async with running(credit_window_tokens=WINDOW) as h:
        call = await h.interactive()
        dispatch = await h.admitted()
        await read(call, 1)
        await call.write(CANCEL)
        await soon(h.scheduler.cancels)
        await h.scheduler.deltas(dispatch.attempt, "late")
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED, usage=pb.Usage(generated_tokens=1))
        events, _error = await collect(call)
    assert kinds(events, 2) == ["terminal"]
    assert events[0].terminal.usage.sent_tokens == 0
    assert h.metrics.late_messages == 1


async def test_to_close_the_sending_side_is_no_cancel() -> None:
    async with running() as h:
        call = await h.interactive()
        await call.done_writing()
        dispatch = await h.admitted()
        await h.scheduler.deltas(dispatch.attempt, "a")
        await h.scheduler.end(dispatch.attempt)
        events, error = await collect(call)
    assert error is None
    assert kinds(events) == ["accepted", "delta", "terminal"]


FIRST = {
    "no frame": (None, "frame"),
    "an acknowledgement": (acknowledge(1), "frame"),
    "an empty frame": (pb.ClientFrame(), "frame"),
    "a bad request": (pb.ClientFrame(start=pb.GenerateRequest(model="chat")), "prompt"),
    "no name": (pb.ClientFrame(resume=pb.ResumeGenerateRequest(request="x")), "request"),
    "too many bytes": (pb.ClientFrame(start=pb.GenerateRequest(model="chat", prompt="x" * 200_000)), "start"),
}


@pytest.mark.parametrize("name", FIRST)
async def test_a_first_frame_that_opens_nothing_is_refused(name: str) -> None:
    frame, field = FIRST[name]
    async with running() as h:
        call = h.stub.GenerateInteractive(timeout=DEADLINE_S)
        if frame is None:
            await call.done_writing()
        else:
            await call.write(frame)
        events, error = await collect(call)
        assert h.scheduler.dispatches.empty()
    assert events == []
    assert failure(error).field == field


async def test_a_second_start_ends_the_call_and_its_request() -> None:
    async with running() as h:
        call = await h.interactive()
        dispatch = await h.admitted()
        await read(call, 1)
        await call.write(pb.ClientFrame(start=pb.GenerateRequest(model="chat", prompt="x")))
        _events, error = await collect(call)
        assert (failure(error).reason, failure(error).field) == (Reason.INVALID_REQUEST, "start")
        assert (await soon(h.scheduler.cancels)).attempt == dispatch.attempt


async def test_a_reader_that_does_not_acknowledge_is_told_then_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.control.request.PAUSED_NOTICE_S", 0.05)
    async with running(credit_window_tokens=WINDOW, slow_consumer_s=0.4) as h:
        call = await h.interactive()
        dispatch = await h.admitted()
        await h.scheduler.deltas(dispatch.attempt, *TEXTS)
        cancel = await soon(h.scheduler.cancels)
        assert cancel.cause == pb.FINISH_REASON_SLOW_CONSUMER
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_SLOW_CONSUMER, usage=pb.Usage(generated_tokens=8))
        events, error = await collect(call)
    assert kinds(events) == ["accepted", "delta", "notice", "terminal"]
    assert events[2].notice.kind == pb.Notice.KIND_PAUSED
    assert events[3].terminal.finish_reason == pb.FINISH_REASON_SLOW_CONSUMER
    assert (events[3].terminal.usage.sent_tokens, events[3].terminal.usage.acknowledged_tokens) == (8, 0)
    assert failure(error).reason is Reason.SLOW_CONSUMER


NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]


async def test_a_plain_reader_that_stops_holds_up_its_write_and_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "LINGER_S", 0.1)
    async with running(slow_consumer_s=0.3) as h, grpc.aio.insecure_channel(h.target, options=NARROW) as channel:
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(model="chat", prompt="x"), timeout=DEADLINE_S)
        dispatch = await h.admitted()
        for _ in range(4):
            await h.scheduler.deltas(dispatch.attempt, "x" * 50_000)
        cancel = await soon(h.scheduler.cancels)
        assert cancel.cause == pb.FINISH_REASON_SLOW_CONSUMER
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_SLOW_CONSUMER)
        # Its engine, its session and its handler are gone although it never read.
        await until(lambda: len(h.service.sessions) == 0)
        assert h.service.sessions.resources.references == 0
        events, error = await collect(call)
    assert kinds(events)[0] == "accepted"
    assert failure(error).reason is Reason.SLOW_CONSUMER


@pytest.mark.parametrize("begun", [False, True], ids=["in the queue", "while it runs"])
async def test_the_services_own_limits_are_told_apart_from_the_callers_deadline(begun: bool) -> None:
    async with running(queue_timeout_s=0.25, execution_timeout_s=0.3) as h:
        call = await h.interactive()
        dispatch = await h.dispatched()
        assert 0.1 < dispatch.queue_timeout.ToTimedelta().total_seconds() <= 0.25
        assert dispatch.execution_timeout.ToTimedelta().total_seconds() == pytest.approx(0.3)
        if begun:
            await h.scheduler.admit(dispatch.attempt)
            await h.scheduler.deltas(dispatch.attempt, "a")
        cancel = await soon(h.scheduler.cancels)
        assert cancel.cause == (pb.FINISH_REASON_DEADLINE_EXCEEDED if begun else pb.FINISH_REASON_REJECTED)
        await h.scheduler.end(dispatch.attempt, cancel.cause)
        events, error = await collect(call)
    assert failure(error).reason is (Reason.EXECUTION_TIMEOUT if begun else Reason.QUEUE_TIMEOUT)
    assert kinds(events) == (["accepted", "delta", "terminal"] if begun else [])


@pytest.mark.parametrize(("priority", "longest_s"), [(pb.PRIORITY_STANDARD, 4.0), (pb.PRIORITY_BATCH, 50.0)])
async def test_who_waits_for_a_first_token_waits_no_longer_than_it_may_take(priority: int, longest_s: float) -> None:
    async with running(queue_timeout_s=50, ttft_target_s=5) as h:
        call = await h.interactive(priority=priority)
        dispatch = await h.dispatched()
        assert longest_s - 2 < dispatch.queue_timeout.ToTimedelta().total_seconds() <= longest_s
        await h.scheduler.end(dispatch.attempt)
        await collect(call)


async def test_messages_of_another_version_or_attempt_are_dropped_and_counted() -> None:
    async with running() as h:
        call = await h.interactive()
        dispatch = await h.dispatched()
        old = dispatch.record_version - 1
        await h.scheduler.send(admitted=[sp.Admitted(attempt=dispatch.attempt, prompt_tokens=9, record_version=old)])
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_FAILED, record_version=old)
        await h.scheduler.admit(dispatch.attempt)
        await h.scheduler.admit(dispatch.attempt)
        await h.scheduler.deltas(dispatch.attempt + 1, "of another attempt")
        await h.scheduler.deltas(dispatch.attempt, "a")
        await h.scheduler.end(dispatch.attempt)
        await h.scheduler.end(dispatch.attempt)
        events, error = await collect(call)
        await until(lambda: sum(link.late_messages for link in h.routes.links) == 2)
    assert error is None
    assert kinds(events) == ["accepted", "delta", "terminal"]
    assert events[0].accepted.prompt_tokens == 3
    assert events[1].delta.text == "a"
    assert h.metrics.late_messages == 3, "two of an old version, one repeated"


@pytest.mark.parametrize("told", [1, 3], ids=["one was lost or made up", "one came twice"])
async def test_lost_and_repeated_tokens_are_noticed(told: int) -> None:
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.admitted()
        await h.scheduler.deltas(dispatch.attempt, "a", "b")
        await h.scheduler.end(dispatch.attempt, output_tokens=told)
        events, error = await answer
    assert events[-1].terminal.finish_reason == pb.FINISH_REASON_FAILED
    assert error is not None
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert failure(error).reason is Reason.SEQUENCE_GAP
