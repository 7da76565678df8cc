"""A request that outlives its call: resumed to the byte, within bounds, by its own tenant."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from router.harness import DEADLINE_S, Harness, collect, failure, kinds, running, soon, until

CONTINUE = {"on_disconnect": pb.ON_DISCONNECT_CONTINUE}


async def broken_after(
    h: Harness, count: int, *texts: str, **fields: Any
) -> tuple[sp.Dispatch, list[pb.GenerateEvent]]:
    """A request whose connection broke after its reader had `count` events; `texts` are one event each."""
    channel = grpc.aio.insecure_channel(h.target, options=[("grpc.use_local_subchannel_pool", 1)])
    request = pb.GenerateRequest(**{"model": "chat", "prompt": "x", **CONTINUE, **fields})
    before = h.metrics.writes
    call = InferenceServiceStub(channel).Generate(request, timeout=DEADLINE_S)
    dispatch = await h.admitted()
    for number, text in enumerate(["", *texts]):
        if text:
            await h.scheduler.deltas(dispatch.attempt, text)
        await until(lambda number=number: h.metrics.writes > before + number)  # type: ignore[misc]
    events = [await call.read() for _ in range(count)]
    await channel.close()
    await until(lambda: h.service.sessions.detached == 1)
    return dispatch, events


def resume(h: Harness, request: str, after: int, **metadata: str) -> Any:
    message = pb.ResumeGenerateRequest(request=request, after_sequence=after)
    return h.stub.ResumeGenerate(message, timeout=DEADLINE_S, metadata=tuple(metadata.items()))


async def resume_interactive(h: Harness, request: str, after: int) -> Any:
    call = h.stub.GenerateInteractive(timeout=DEADLINE_S)
    await call.write(pb.ClientFrame(resume=pb.ResumeGenerateRequest(request=request, after_sequence=after)))
    return call


@pytest.mark.parametrize("had", [1, 2, 4])
async def test_the_rest_comes_to_the_byte_and_goes_on_live(had: int) -> None:
    async with running() as h:
        dispatch, events = await broken_after(h, had, "a", "b", "c")
        assert events[0].accepted.retention.events_max > 0
        name = events[0].request
        assert h.scheduler.cancels.empty(), "it runs on"
        await h.scheduler.deltas(dispatch.attempt, *"defg")
        call = resume(h, name, had)
        first = [await call.read() for _ in range(4 - had)]
        await until(lambda: h.service.sessions.detached == 0)
        await h.scheduler.deltas(dispatch.attempt, "h")
        await h.scheduler.end(dispatch.attempt, usage=pb.Usage(generated_tokens=8), output_tokens=8)
        rest, error = await collect(call)
        again, _ = await collect(resume(h, name, 0))
    assert error is None
    whole = events + first + rest
    assert kinds(whole)[0] == "accepted"
    assert kinds(whole)[-1] == "terminal"
    assert "".join(event.delta.text for event in whole) == "abcdefgh"
    assert [event.SerializeToString() for event in again] == [event.SerializeToString() for event in whole]
    assert whole[-1].terminal.usage.sent_tokens == 8


async def test_it_can_be_resumed_after_its_end_and_interactively() -> None:
    async with running() as h:
        dispatch, events = await broken_after(h, 2, "a")
        await h.scheduler.deltas(dispatch.attempt, "b")
        await h.scheduler.end(dispatch.attempt)
        await until(lambda: len(h.service.sessions) == 0)
        assert h.service.sessions.kept_bytes > 0
        rest, error = await collect(await resume_interactive(h, events[0].request, 2))
        assert error is None
        assert kinds(rest, 3) == ["delta", "terminal"]
        assert h.metrics.resumes == 1


async def test_without_a_reader_it_runs_on_until_half_of_what_is_kept_is_unread_then_waits() -> None:
    async with running(credit_window_tokens=8, resume_events_max=64) as h:
        dispatch, events = await broken_after(h, 1)
        granted, produced = 8, 0
        while True:
            await h.scheduler.deltas(dispatch.attempt, *"x" * (granted - produced))
            produced = granted
            try:
                async with asyncio.timeout(0.3):
                    granted = (await h.scheduler.credits.get()).limit
            except TimeoutError:
                break
        # Events of half a window, 4 tokens, until 32 of them are unread; then one window more, which waits.
        assert 120 <= produced <= 32 * 8 + 8
        assert h.service.sessions.detached == 1
        call = resume(h, events[0].request, 1)
        read: list[pb.GenerateEvent] = []
        while sum(len(event.delta.token_ids) for event in read) < produced:
            read.append(await call.read())
        assert kinds(read, 2)
        assert (await soon(h.scheduler.credits)).limit > produced, "it goes on once there is a reader"
        call.cancel()


async def test_nobody_comes_back_within_the_window() -> None:
    async with running(resume_window_s=0.2) as h:
        dispatch, events = await broken_after(h, 1)
        cancel = await soon(h.scheduler.cancels)
        assert (cancel.attempt, cancel.cause) == (dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        await until(lambda: h.service.sessions.resources.references == 0)
        _none, error = await collect(resume(h, events[0].request, 1))
        record = await h.stub.GetRequest(pb.GetRequestRequest(request=events[0].request), timeout=DEADLINE_S)
    assert failure(error).reason is Reason.EVENTS_EXPIRED
    assert record.finish_reason == pb.FINISH_REASON_CANCELLED
    assert record.error.reason == 27, "CLIENT_DISCONNECTED, not CLIENT_CANCELLED"


async def test_its_deadline_holds_without_a_reader() -> None:
    async with running() as h:
        channel = grpc.aio.insecure_channel(h.target)
        call = InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(model="chat", prompt="x", **CONTINUE), timeout=0.4
        )
        await h.admitted()
        await call.read()
        await channel.close()
        assert (await soon(h.scheduler.cancels)).cause == pb.FINISH_REASON_DEADLINE_EXCEEDED


async def test_another_reader_takes_the_stream_over() -> None:
    async with running() as h:
        first = h.generate(**CONTINUE)
        dispatch = await h.admitted()
        name = (await first.read()).request
        await h.scheduler.deltas(dispatch.attempt, "a")
        await first.read()
        second = resume(h, name, 1)
        assert (await second.read()).delta.text == "a"
        _rest, error = await collect(first)
        assert failure(error).reason is Reason.STREAM_TAKEN_OVER
        await h.scheduler.deltas(dispatch.attempt, "b")
        await h.scheduler.end(dispatch.attempt)
        rest, error = await collect(second)
        assert error is None
        assert kinds(rest, 3) == ["delta", "terminal"]
        assert h.scheduler.cancels.empty()


async def test_the_deadline_of_the_resuming_call_ends_only_that_call() -> None:
    async with running() as h:
        dispatch, events = await broken_after(h, 1)
        message = pb.ResumeGenerateRequest(request=events[0].request, after_sequence=1)
        _rest, error = await collect(h.stub.ResumeGenerate(message, timeout=0.2))
        assert error is not None
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: h.service.sessions.detached == 1)
        assert h.scheduler.cancels.empty()
        await h.scheduler.end(dispatch.attempt)


async def test_what_cannot_be_resumed_says_why() -> None:
    async with running(resume_events_max=64) as h:
        plain = h.generate()
        dispatch = await h.admitted()
        name = (await plain.read()).request
        _none, error = await collect(resume(h, name, 1))
        assert failure(error).reason is Reason.NOT_RESUMABLE
        await h.scheduler.end(dispatch.attempt)
        await collect(plain)

        dispatch, events = await broken_after(h, 1, *["x"] * 80)
        name = events[0].request
        _none, error = await collect(resume(h, name, 3))
        assert failure(error).reason is Reason.EVENTS_EXPIRED
        assert failure(error).metadata["firstSequence"] == "18", "64 of 81 are kept"
        _none, error = await collect(resume(h, name, 99))
        assert (failure(error).reason, failure(error).field) == (Reason.INVALID_REQUEST, "after_sequence")
        _none, error = await collect(resume(h, "requests/unknown", 0))
        assert failure(error).reason is Reason.NOT_FOUND
        assert h.service.sessions.detached == 1, "a refused resume disturbs nothing"
        rest = resume(h, name, 17)
        assert (await rest.read()).sequence == 18
        await h.scheduler.end(dispatch.attempt)


async def test_only_its_tenant_sees_a_request() -> None:
    async with running(tenant_metadata="x-tenant") as h:
        request = pb.GenerateRequest(model="chat", prompt="x", **CONTINUE)
        call = h.stub.Generate(request, timeout=DEADLINE_S, metadata=(("x-tenant", "mine"),))
        dispatch = await h.admitted()
        name = (await call.read()).request
        for other in ((("x-tenant", "theirs"),), ()):
            _none, error = await collect(resume(h, name, 1, **dict(other)))
            assert failure(error).reason is Reason.NOT_FOUND
            for method, message in (
                (h.stub.GetRequest, pb.GetRequestRequest(request=name)),
                (h.stub.CancelRequest, pb.CancelRequestRequest(request=name)),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    await method(message, timeout=DEADLINE_S, metadata=other)
                assert failure(caught.value).reason is Reason.NOT_FOUND
        assert h.scheduler.cancels.empty()
        mine = await h.stub.GetRequest(
            pb.GetRequestRequest(request=name), timeout=DEADLINE_S, metadata=(("x-tenant", "mine"),)
        )
        assert (mine.state, mine.attached, mine.attempts) == (pb.Request.STATE_PREFILL, True, 1)
        await h.scheduler.end(dispatch.attempt)


@pytest.mark.parametrize("fields", [{}, CONTINUE])
async def test_refused_requests_leave_nothing_and_push_no_record_out(fields: dict[str, Any]) -> None:
    refusal = status.to_proto(Failure(Reason.OVERLOADED, "Too much.", metadata={"stage": "wait"}))
    async with running(records_max=1) as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.admitted()
        await h.scheduler.end(dispatch.attempt)
        events, _ = await answer
        for _ in range(3):
            answer = asyncio.create_task(collect(h.generate(**fields)))
            await h.scheduler.end((await h.dispatched()).attempt, pb.FINISH_REASON_REJECTED, error=refusal)
            assert failure((await answer)[1]).reason is Reason.OVERLOADED
        told = await h.stub.GetRequest(pb.GetRequestRequest(request=events[0].request), timeout=DEADLINE_S)
        assert told.finish_reason == pb.FINISH_REASON_STOP
        assert h.service.sessions.resources.references == 0
        assert h.service.sessions.idle.is_set()


async def test_a_record_is_kept_for_a_while_and_a_second_cancel_changes_nothing() -> None:
    async with running(record_retention_s=0.3) as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.admitted()
        await h.scheduler.deltas(dispatch.attempt, "a")
        await h.scheduler.end(dispatch.attempt, usage=pb.Usage(generated_tokens=1))
        events, _error = await answer
        name = events[0].request
        ask = pb.CancelRequestRequest(request=name)
        record = await h.stub.CancelRequest(ask, timeout=DEADLINE_S)
        assert record.finish_reason == pb.FINISH_REASON_STOP, "the first end stands"
        assert (record.last_sequence, record.usage.sent_tokens, record.attached) == (3, 1, False)
        assert record.receive_time.seconds > 1_700_000_000

        async def forgotten() -> bool:
            try:
                await h.stub.GetRequest(pb.GetRequestRequest(request=name), timeout=DEADLINE_S)
            except grpc.RpcError as error:
                return failure(error).reason is Reason.NOT_FOUND
            return False

        async with asyncio.timeout(DEADLINE_S):
            while not await forgotten():
                await asyncio.sleep(0.02)


async def test_kept_events_are_bounded_over_all_requests() -> None:
    async with running(resume_bytes_total_max=64 * 1024) as h:
        names = []
        for _ in range(4):
            call = h.generate(**CONTINUE)
            dispatch = await h.admitted()
            await h.scheduler.deltas(dispatch.attempt, "x" * 30_000)
            await h.scheduler.end(dispatch.attempt)
            events, _error = await collect(call)
            names.append(events[0].request)
        await until(lambda: len(h.service.sessions) == 0)
        assert 0 < h.service.sessions.kept_bytes <= 64 * 1024
        _none, error = await collect(resume(h, names[0], 0))
        assert failure(error).reason is Reason.EVENTS_EXPIRED
        _all, error = await collect(resume(h, names[3], 0))
        assert error is None


async def test_a_drain_ends_a_request_that_nobody_reads() -> None:
    async with running() as h:
        dispatch, _events = await broken_after(h, 1, "a")
        draining = asyncio.create_task(h.service.drain(0.05))
        cancel = await soon(h.scheduler.cancels)
        await h.scheduler.end(cancel.attempt, pb.FINISH_REASON_CANCELLED)
        async with asyncio.timeout(DEADLINE_S):
            await draining
        assert dispatch.attempt == cancel.attempt
        assert len(h.service.sessions) == 0


async def test_a_reader_that_was_taken_over_confirms_nothing_any_more() -> None:
    async with running(credit_window_tokens=8) as h:
        first = await h.interactive(**CONTINUE)
        dispatch = await h.admitted()
        name = (await first.read()).request
        await h.scheduler.deltas(dispatch.attempt, *"abcdefgh")
        await first.read()
        (session,) = h.service.sessions
        old = session.reader
        assert old is not None
        second = await resume_interactive(h, name, 1)
        assert (await second.read()).delta.text == "abcdefgh"
        session.acknowledge(old, 2)
        assert h.scheduler.credits.empty()
        await second.write(pb.ClientFrame(acknowledge=pb.Acknowledge(sequence=2)))
        assert (await soon(h.scheduler.credits)).limit == 16
        second.cancel()
