"""A request of Router A, asked for by name at Router B: looked up, cancelled, resumed; the truth where A is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.router.v1 import router_service_pb2 as router_pb
from headrace.api.router.v1.router_service_pb2_grpc import RouterServiceStub
from headrace.control import idempotency
from headrace.control.errors import Failure, Reason
from headrace.control.idempotency import Origin
from headrace.control.origins import request_name, tag_in, tag_of
from headrace.router import elsewhere
from headrace.rpc import status
from router.harness import DEADLINE_S, Harness, collect, failure, kinds, soon, until
from router.two import Two, two

CONTINUE = {"idempotency_key": "", "on_disconnect": pb.ON_DISCONNECT_CONTINUE}
PLAIN = {"idempotency_key": ""}


async def begun(t: Two, **fields: Any) -> tuple[str, Any, Any]:
    """A request that runs at A: its name, its call, its dispatch."""
    call = t.a.generate(**fields)
    dispatch = await t.a.admitted()
    return (await call.read()).request, call, dispatch


async def asked(h: Harness, method: str, name: str, **options: Any) -> pb.Request | Failure:
    message = {"GetRequest": pb.GetRequestRequest, "CancelRequest": pb.CancelRequestRequest}[method]
    try:
        found: pb.Request = await getattr(h.stub, method)(message(request=name), **{"timeout": DEADLINE_S, **options})
    except grpc.aio.AioRpcError as error:
        failed = status.from_rpc_error(error)
        if failed is None:
            raise
        return failed
    return found


def resume(h: Harness, name: str, after: int) -> Any:
    return h.stub.ResumeGenerate(pb.ResumeGenerateRequest(request=name, after_sequence=after), timeout=DEADLINE_S)


async def interactive(h: Harness, name: str, after: int) -> Any:
    call = h.stub.GenerateInteractive(timeout=DEADLINE_S)
    await call.write(pb.ClientFrame(resume=pb.ResumeGenerateRequest(request=name, after_sequence=after)))
    return call


def counted(h: Harness, call: str, outcome: str) -> float | None:
    return h.metrics.registry.get_sample_value("headrace_router_elsewhere_total", {"call": call, "outcome": outcome})


async def test_names_say_where_a_request_is_from_to_routers_alone() -> None:
    async with two() as t:
        plain, _, _ = await begun(t, **PLAIN)
        keyed, _, _ = await begun(t, idempotency_key="k")
        assert {tag_in(name) for name in (plain, keyed)} == {tag_of(Origin("routers/a", "a1"))}
        assert len({name[-32:] for name in (plain, keyed)}) == 2


async def test_it_is_looked_up_and_cancelled_at_the_other_router() -> None:
    async with two() as t:
        name, call, dispatch = await begun(t, **PLAIN)
        await t.a.scheduler.deltas(dispatch.attempt, "x")
        await call.read()
        there, here = await asked(t.b, "GetRequest", name), await asked(t.a, "GetRequest", name)
        assert isinstance(there, pb.Request)
        assert isinstance(here, pb.Request)
        assert there.state == pb.Request.STATE_DECODE
        for record in (there, here):
            record.ClearField("timing")
        assert there == here
        cancelling = asyncio.create_task(asked(t.b, "CancelRequest", name))
        cancel = await soon(t.a.scheduler.cancels)
        assert cancel.attempt == dispatch.attempt
        assert not cancelling.done(), "it waits for the engine's confirmation"
        await t.a.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        record = await cancelling
        assert isinstance(record, pb.Request)
        assert record.finish_reason == pb.FINISH_REASON_CANCELLED
        assert failure((await collect(call))[1]).reason is Reason.CLIENT_CANCELLED
        again = await asked(t.b, "GetRequest", name)
        assert isinstance(again, pb.Request)
        assert again.finish_reason == pb.FINISH_REASON_CANCELLED
        assert (counted(t.b, "get", "OK"), counted(t.b, "cancel", "OK")) == (2, 1)
        assert counted(t.a, "get", "OK") is None


async def test_it_is_resumed_at_the_other_router_to_the_byte_and_live() -> None:
    async with two() as t:
        name, call, dispatch = await begun(t, **CONTINUE)
        for text in "ab":
            await t.a.scheduler.deltas(dispatch.attempt, text)
        there = resume(t.b, name, 1)
        first = [await there.read() for _ in range(2)]
        assert failure((await collect(call))[1]).reason is Reason.STREAM_TAKEN_OVER
        await t.a.scheduler.deltas(dispatch.attempt, "c")
        await t.a.scheduler.end(dispatch.attempt, output_tokens=3)
        rest, error = await collect(there)
        assert error is None
        assert kinds(first + rest, 2) == ["delta", "delta", "delta", "terminal"]
        whole = [(await collect(resume(h, name, 0)))[0] for h in (t.a, t.b)]
        assert [e.SerializeToString() for e in whole[0]] == [e.SerializeToString() for e in whole[1]]
        assert whole[0][1:] == first + rest
        await until(lambda: not t.b.service.sessions.followers)
        assert t.a.metrics.resumes == 3


async def test_generation_follows_the_reader_at_the_other_router_and_ends_when_it_says_so() -> None:
    async with two(credit_window_tokens=8) as t:
        name, call, dispatch = await begun(t, **CONTINUE)
        there = await interactive(t.b, name, 1)
        await collect(call)
        await t.a.scheduler.deltas(dispatch.attempt, *"abcdefgh")
        texts, event = "", None
        while len(texts) < 8:
            event = await there.read()
            texts += event.delta.text
        assert event is not None
        await asyncio.sleep(0.1)
        assert t.a.scheduler.credits.empty(), "read by the transport is not read"
        await there.write(pb.ClientFrame(acknowledge=pb.Acknowledge(sequence=event.sequence)))
        assert (await soon(t.a.scheduler.credits)).limit == 16
        await there.write(pb.ClientFrame(cancel=pb.CancelFrame()))
        await soon(t.a.scheduler.cancels)
        await t.a.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        events, error = await collect(there)
        assert failure(error).reason is Reason.CLIENT_CANCELLED
        assert events[-1].terminal.finish_reason == pb.FINISH_REASON_CANCELLED


async def test_a_reader_at_the_other_router_that_leaves_has_left_here_too() -> None:
    async with two() as t:
        name, call, _ = await begun(t, **CONTINUE)
        there = resume(t.b, name, 1)
        await until(lambda: counted(t.b, "resume", "OK") is None and t.a.metrics.resumes == 1)
        await collect(call)
        there.cancel()
        await until(lambda: t.a.service.sessions.detached == 1)
        channel = grpc.aio.insecure_channel(t.b.target)
        short = InferenceServiceStub(channel).ResumeGenerate(
            pb.ResumeGenerateRequest(request=name, after_sequence=1), timeout=0.3
        )
        _, error = await collect(short)
        assert error is not None
        await until(lambda: t.a.service.sessions.detached == 1)
        assert t.a.scheduler.cancels.empty(), "a deadline of the call ends the call"
        await channel.close()


async def test_a_reader_that_does_not_read_holds_up_generation_elsewhere() -> None:
    async with two(credit_window_tokens=8, slow_consumer_s=60.0) as t:
        name, call, dispatch = await begun(t, **CONTINUE)
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(t.b.target, options=options) as channel:
            message = pb.ResumeGenerateRequest(request=name, after_sequence=1)
            there = InferenceServiceStub(channel).ResumeGenerate(message, timeout=DEADLINE_S)
            await until(lambda: t.a.metrics.resumes == 1)
            await collect(call)
            granted, sent = 8, 0
            while sent < 4000:
                await t.a.scheduler.deltas(dispatch.attempt, *["x" * 2000] * (granted - sent))
                sent = granted
                try:
                    async with asyncio.timeout(0.5):
                        granted = (await t.a.scheduler.credits.get()).limit
                except TimeoutError:
                    break
            assert sent < 1000, "of 2,000 bytes each"
            there.cancel()


async def test_a_reader_that_does_not_read_is_told_so() -> None:
    async with two(credit_window_tokens=4096, slow_consumer_s=0.5) as t:
        name, call, dispatch = await begun(t, **CONTINUE)
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(t.b.target, options=options) as channel:
            message = pb.ResumeGenerateRequest(request=name, after_sequence=1)
            there = InferenceServiceStub(channel).ResumeGenerate(message, timeout=DEADLINE_S)
            await until(lambda: t.a.metrics.resumes == 1)
            await collect(call)
            await t.a.scheduler.deltas(dispatch.attempt, *["x" * 8000] * 60)
            await until(lambda: counted(t.b, "resume", "SLOW_CONSUMER") == 1)
            assert failure((await collect(there))[1]).reason is Reason.SLOW_CONSUMER
            assert not t.b.service.sessions.followers


@pytest.mark.parametrize("method", ["GetRequest", "CancelRequest", "resume"])
async def test_another_tenants_request_does_not_exist_at_any_router(method: str) -> None:
    async with two(tenant_metadata="x-tenant") as t:
        call = t.a.stub.Generate(
            pb.GenerateRequest(model="chat", prompt="x"), timeout=DEADLINE_S, metadata=(("x-tenant", "acme"),)
        )
        await t.a.admitted()
        name = (await call.read()).request
        for tenant, is_found in (("acme", True), ("rival", False)):
            told: Any
            metadata = (("x-tenant", tenant),)
            if method == "resume":
                message = pb.ResumeGenerateRequest(request=name)
                error = (await collect(t.b.stub.ResumeGenerate(message, timeout=DEADLINE_S, metadata=metadata)))[1]
                assert failure(error).reason is (Reason.NOT_RESUMABLE if is_found else Reason.NOT_FOUND)
                continue
            told = asyncio.create_task(asked(t.b, method, name, metadata=metadata))
            if method == "CancelRequest" and is_found:
                await t.a.scheduler.end((await soon(t.a.scheduler.cancels)).attempt, pb.FINISH_REASON_CANCELLED)
            told = await told
            assert isinstance(told, pb.Request) if is_found else told.reason is Reason.NOT_FOUND
        assert t.a.scheduler.cancels.empty()


async def test_a_name_that_its_router_does_not_know_is_not_found_and_goes_no_further() -> None:
    async with two() as t:
        t.store.register("routers/b", "b1", t.b.admin.endpoint)
        drawn = "0" * 32
        for tag in (t.a.service.elsewhere.fleet.tag, t.b.service.elsewhere.fleet.tag):
            for h in (t.a, t.b):
                found = await asked(h, "GetRequest", request_name(tag, drawn))
                assert isinstance(found, Failure)
                assert found.reason is Reason.NOT_FOUND
        assert (counted(t.a, "get", "NOT_FOUND"), counted(t.b, "get", "NOT_FOUND")) == (1, 1)
        async with grpc.aio.insecure_channel(t.a.admin.endpoint) as channel:
            stub = RouterServiceStub(channel)
            theirs = request_name(t.b.service.elsewhere.fleet.tag, drawn)
            message = router_pb.LookUpRequestRequest(request=theirs, tenant="tenants/anonymous", incarnation="a1")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.LookUpRequest(message, timeout=DEADLINE_S)
            assert failure(refused.value).reason is Reason.NOT_FOUND
        assert counted(t.a, "get", "NOT_FOUND") == 1, "what another Router asks is not passed on"


@pytest.mark.parametrize("method", ["GetRequest", "CancelRequest"])
async def test_a_router_that_is_gone_is_told_as_such(method: str) -> None:
    async with two() as t:
        name, _, _ = await begun(t, **PLAIN)
        t.block()
        t.store.unregister("routers/a")
        found = await asked(t.b, method, name)
        assert isinstance(found, Failure)
        assert found.reason is Reason.IDEMPOTENCY_ORIGIN_LOST
        assert dict(found.metadata) == {"request": name}
        assert "routers/a" not in found.message


async def test_a_stream_that_breaks_is_told_and_resumed_or_found_lost() -> None:
    async with two() as t:
        name, call, dispatch = await begun(t, **CONTINUE)
        there = resume(t.b, name, 1)
        await collect(call)
        t.way.reset()
        found = failure((await collect(there))[1])
        assert found.reason is Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE
        assert found.retry_after_s is not None
        again = resume(t.b, name, 1)
        await t.a.scheduler.deltas(dispatch.attempt, "x")
        assert (await again.read()).delta.text == "x"
        t.block()
        assert failure((await collect(again))[1]).reason is Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE
        t.store.unregister("routers/a")
        lost = failure((await collect(resume(t.b, name, 2)))[1])
        assert lost.reason is Reason.IDEMPOTENCY_ORIGIN_LOST


async def test_a_successor_under_the_same_name_does_not_have_it() -> None:
    async with two() as t:
        name, _, _ = await begun(t, **CONTINUE)
        t.store.register("routers/a", "a2", f"127.0.0.1:{t.way.port}")
        await until(lambda: t.b.service.elsewhere.fleet.registered("routers/a") == "a2")
        assert isinstance(await asked(t.b, "GetRequest", name), pb.Request), "it answers still"
        t.block()
        assert failure((await collect(resume(t.b, name, 0)))[1]).reason is Reason.IDEMPOTENCY_ORIGIN_LOST


async def test_another_process_at_the_address_says_so_at_once() -> None:
    async with two() as t:
        gone = Origin("routers/a", "a0")
        t.store.register("routers/a", "a0", f"127.0.0.1:{t.way.port}")
        await until(lambda: t.b.service.elsewhere.fleet.registered("routers/a") == "a0")
        name = request_name(tag_of(gone), "0" * 32)
        found = await asked(t.b, "GetRequest", name)
        assert isinstance(found, Failure)
        assert found.reason is Reason.IDEMPOTENCY_ORIGIN_LOST
        assert failure((await collect(resume(t.b, name, 0)))[1]).reason is Reason.IDEMPOTENCY_ORIGIN_LOST


async def test_another_router_at_the_address_says_nothing_of_the_one_that_is_asked_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(elsewhere, "PATIENCE_S", 0.5)
    async with two() as t:
        name = request_name(tag_of(Origin("routers/x", "x1")), "0" * 32)
        for is_listed, reason in (
            (True, Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE),
            (False, Reason.IDEMPOTENCY_ORIGIN_LOST),
        ):
            t.store.register("routers/x", "x1", f"127.0.0.1:{t.way.port}")
            await until(lambda: t.b.service.elsewhere.fleet.registered("routers/x") == "x1")
            if not is_listed:
                monkeypatch.setattr(elsewhere, "PATIENCE_S", 5.0)
                t.store.unregister("routers/x")
                await until(lambda: t.b.service.elsewhere.fleet.registered("routers/x") == "")
            found = await asked(t.b, "GetRequest", name)
            assert isinstance(found, Failure)
            assert found.reason is reason


async def test_one_that_is_silent_and_registered_is_not_called_gone(monkeypatch: Any) -> None:
    monkeypatch.setattr(elsewhere, "PATIENCE_S", 0.5)
    monkeypatch.setattr(idempotency, "PATIENCE_S", 0.5)
    async with two() as t:
        name, _, _ = await begun(t, **CONTINUE)
        t.block()
        for found in (await asked(t.b, "GetRequest", name), failure((await collect(resume(t.b, name, 0)))[1])):
            assert isinstance(found, Failure)
            assert found.reason is Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE


async def test_without_the_store_the_last_known_routers_are_asked_and_nobody_is_called_gone(monkeypatch: Any) -> None:
    monkeypatch.setattr(elsewhere, "PATIENCE_S", 0.5)
    async with two() as t:
        name, _, _ = await begun(t, **PLAIN)
        t.store.is_down = True
        assert isinstance(await asked(t.b, "GetRequest", name), pb.Request)
        t.block()
        for asked_for in (name, request_name("0" * 12, "0" * 32)):
            found = await asked(t.b, "GetRequest", asked_for)
            assert isinstance(found, Failure)
            assert found.reason is Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE


async def test_a_router_that_is_not_listed_yet_is_waited_for() -> None:
    async with two() as t:
        name, _, _ = await begun(t, **PLAIN)
        t.store.unregister("routers/a")
        await until(lambda: t.b.service.elsewhere.fleet.registered("routers/a") == "")
        assert isinstance(await asked(t.b, "GetRequest", name), pb.Request), "one without a record is asked"
        t.b.service.elsewhere.fleet._directory._known.clear()
        asking = asyncio.create_task(asked(t.b, "GetRequest", name))
        await asyncio.sleep(0.1)
        t.store.register("routers/a", "a1", f"127.0.0.1:{t.way.port}")
        assert isinstance(await asking, pb.Request)


async def test_calls_that_wait_for_others_are_bounded() -> None:
    async with two(followers_max=2) as t:
        nobody = request_name("0" * 12, "0" * 32)
        found = await asyncio.gather(*(asked(t.b, "GetRequest", nobody) for _ in range(6)))
        reasons = [one.reason for one in found if isinstance(one, Failure)]
        assert sorted(reason.value for reason in reasons) == ["IDEMPOTENCY_ORIGIN_LOST"] * 2 + ["OVERLOADED"] * 4
        assert isinstance(await asked(t.b, "GetRequest", nobody), Failure)
        assert counted(t.b, "get", "IDEMPOTENCY_ORIGIN_LOST") == 3


async def test_a_request_that_says_nothing_for_long_is_not_taken_for_a_silent_router(monkeypatch: Any) -> None:
    monkeypatch.setattr(elsewhere, "ANSWER_S", 0.3)
    monkeypatch.setattr(idempotency, "PATIENCE_S", 0.3)
    async with two() as t:
        name, call, dispatch = await begun(t, **CONTINUE)
        there = resume(t.b, name, 1)
        await collect(call)
        await asyncio.sleep(1.5)
        await t.a.scheduler.deltas(dispatch.attempt, "x")
        assert (await there.read()).delta.text == "x"


async def test_nothing_is_left_of_calls_elsewhere() -> None:
    def left() -> list[str]:
        running = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        return [name for name in running if "request_iterator" in name]

    async with two() as t:
        name, call, dispatch = await begun(t, **CONTINUE)
        await asked(t.b, "GetRequest", name)
        for _ in range(3):
            there = await interactive(t.b, name, 0)
            await there.read()
            there.cancel()
        await until(lambda: t.a.service.sessions.detached == 1)
        ended = await interactive(t.b, name, 0)
        await ended.read()
        await t.a.scheduler.end(dispatch.attempt)
        await collect(ended)
        await collect(call)
        await until(lambda: not t.b.service.sessions.followers and not left())
