"""One idempotency key at two Routers: the same bytes from both, and the truth when the one that ran it is gone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.router.v1 import router_service_pb2 as router_pb
from headrace.api.router.v1.router_service_pb2_grpc import RouterServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control import idempotency
from headrace.control.errors import Reason
from router.harness import DEADLINE_S, collect, failure, kinds, soon, until
from router.two import KEY, two


def raw(events: list[pb.GenerateEvent]) -> list[bytes]:
    return [event.SerializeToString(deterministic=True) for event in events]


async def test_100_duplicates_at_each_of_two_routers_are_one_execution_and_200_equal_transcripts() -> None:
    async with two() as t:
        reading = [asyncio.create_task(collect(h.generate(**KEY))) for _ in range(100) for h in (t.a, t.b)]
        first = {asyncio.create_task(h.dispatched()): h for h in (t.a, t.b)}
        done, waiting = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        h, dispatch = first[task], task.result()
        await h.scheduler.admit(dispatch.attempt)
        for text in "abcdefgh":
            await h.scheduler.deltas(dispatch.attempt, text)
        await h.scheduler.end(dispatch.attempt, output_tokens=8)
        told = await asyncio.gather(*reading)
        for task in waiting:
            task.cancel()
        assert [error for _, error in told if error is not None] == []
        assert len({tuple(raw(events)) for events, _ in told}) == 1
        assert "".join(event.delta.text for event in told[0][0]) == "abcdefgh"
        assert t.a.scheduler.dispatches.empty()
        assert t.b.scheduler.dispatches.empty()
        await until(lambda: not t.a.service.sessions.followers and not t.b.service.sessions.followers)
        assert t.a.metrics.relays_out + t.b.metrics.relays_out == 100


async def test_a_duplicate_elsewhere_says_that_it_is_one() -> None:
    async with two() as t:
        _, dispatch = await t.begun()
        call = t.b.generate(**KEY)
        told = dict(await call.initial_metadata())
        await t.a.scheduler.end(dispatch.attempt)
        events, error = await collect(call)
    assert error is None
    assert (told["headrace-idempotent-replay"], told["headrace-request"]) == ("true", events[0].request)


async def test_it_waits_for_a_router_that_has_the_key_and_has_not_begun() -> None:
    async with two() as t:
        t.store.leases[1] = 1
        t.a.service.sharing.keys._leases[0] = 1, float("inf")
        held = asyncio.Event()
        honest = t.store.swap

        async def late(*arguments: Any, **options: Any) -> Any:
            done = await honest(*arguments, **options)
            await held.wait()
            return done

        t.store.swap = late  # type: ignore[method-assign]
        first = asyncio.create_task(collect(t.a.generate(**KEY)))
        await until(lambda: bool(t.store.keys))
        t.store.swap = honest  # type: ignore[method-assign]
        second = asyncio.create_task(collect(t.b.generate(**KEY)))
        await asyncio.sleep(0.1)
        assert t.a.scheduler.dispatches.empty()
        held.set()
        await t.a.scheduler.end((await t.a.admitted()).attempt)
        told = await asyncio.gather(first, second)
        assert t.b.scheduler.dispatches.empty()
    assert raw(told[0][0]) == raw(told[1][0])
    assert kinds(told[0][0]) == ["accepted", "terminal"]


async def test_what_the_other_router_refused_and_never_began_is_run_here() -> None:
    async with two() as t:
        honest = t.store.txn

        async def held(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(3600)

        t.store.txn = held  # type: ignore[method-assign]
        call = t.a.generate(**KEY)
        refused = await t.a.dispatched()
        error = sp.Ended().error
        error.reason, error.message = 12, "full"
        await t.a.scheduler.end(refused.attempt, pb.FINISH_REASON_REJECTED, error=error)
        assert failure((await collect(call))[1]).reason is Reason.OVERLOADED
        assert len(t.store.keys) == 1, "not taken back yet"
        again = t.b.generate(**KEY)
        await t.b.scheduler.end((await t.b.admitted()).attempt)
        assert (await collect(again))[1] is None
        assert idempotency.decode(t.store.keys[0].value).origin.router == "routers/b"
        t.store.txn = honest  # type: ignore[method-assign]


async def test_a_cut_connection_loses_and_repeats_nothing() -> None:
    async with two() as t:
        first, dispatch = await t.begun()
        call = t.b.generate(**KEY)
        events = [await call.read()]
        for text in "abc":
            await t.a.scheduler.deltas(dispatch.attempt, text)
            events.append(await call.read())
            t.way.reset()
            t.store.is_down = True  # nor does A's being away from the store matter
        await t.a.scheduler.end(dispatch.attempt, output_tokens=3)
        rest, error = await collect(call)
        whole, _ = await collect(first)
    assert error is None
    assert raw(events[1:] + rest) == raw(whole)
    assert kinds(events + rest)[-1] == "terminal"


async def test_what_the_other_router_forgot_in_between_is_told_as_ended() -> None:
    async with two() as t:
        _, dispatch = await t.begun()
        call = t.b.generate(**KEY)
        await call.read()
        name = idempotency.decode(t.store.keys[0].value).request
        session = t.a.service.sessions._running.pop(name)
        del t.store.items[t.store.keys[0].key]  # nor does the key's record last, which must not make it run now
        t.way.reset()
        found = failure((await collect(call))[1])
        assert found.reason is Reason.EVENTS_EXPIRED
        t.a.service.sessions._running[name] = session
        await t.a.scheduler.end(dispatch.attempt)


async def test_patience_begins_anew_with_each_answer(monkeypatch: Any) -> None:
    monkeypatch.setattr(idempotency, "PATIENCE_S", 1.0)
    async with two() as t:
        _, dispatch = await t.begun()
        call = t.b.generate(**KEY)
        await call.read()
        for text in "ab":
            t.way.reset()
            await t.a.scheduler.deltas(dispatch.attempt, text)
            assert (await call.read()).delta.text == text
            await asyncio.sleep(1.1)
        call.cancel()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_router_that_is_gone_is_told_as_such_and_nothing_runs_again(ended: bool) -> None:
    async with two() as t:
        _, dispatch = await t.begun()
        await t.a.scheduler.deltas(dispatch.attempt, "a")
        call = t.b.generate(**KEY)
        assert [(await call.read()).sequence for _ in range(2)] == [1, 2]
        t.block()
        if ended:
            await t.a.scheduler.end(dispatch.attempt)
            await until(lambda: idempotency.decode(t.store.keys[0].value).ending is not None)
        del t.store.items["services/routers/a"]
        began = time.monotonic()
        rest, error = await collect(call)
        found = failure(error)
        assert time.monotonic() - began < 4
        assert (rest, found.reason) == ([], Reason.IDEMPOTENCY_ORIGIN_LOST)
        assert found.metadata["eventsWritten"] == "2"
        assert found.metadata.get("finishReason") == ("STOP" if ended else None)
        again = failure((await collect(t.b.generate(**KEY)))[1])
        assert again.reason is Reason.IDEMPOTENCY_ORIGIN_LOST
        assert t.b.scheduler.dispatches.empty()


async def test_a_router_that_is_silent_and_registered_is_not_called_gone(monkeypatch: Any) -> None:
    monkeypatch.setattr(idempotency, "PATIENCE_S", 1.0)
    async with two() as t:
        await t.begun()
        t.block()
        found = failure((await collect(t.b.generate(**KEY)))[1])
        assert found.reason is Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE
        assert found.metadata["router"] == "routers/a"


async def test_a_successor_at_the_same_address_does_not_have_it() -> None:
    async with two() as t:
        await t.begun()
        t.a.service.sharing.keys.here = idempotency.Origin("routers/a", "a2")
        for h in (t.a, t.b):
            found = failure((await collect(h.generate(**KEY)))[1])
            assert found.reason is Reason.IDEMPOTENCY_ORIGIN_LOST


async def test_a_relay_that_nobody_reads_holds_nothing_up() -> None:
    async with two(slow_consumer_s=0.5) as t:
        first, dispatch = await t.begun()
        channel_options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(t.b.target, options=channel_options) as channel:
            request = pb.GenerateRequest(model="chat", prompt="hello", **KEY)
            slow = InferenceServiceStub(channel).Generate(request, timeout=DEADLINE_S)
            await slow.read()
            texts = ["x" * 8000] * 60
            reading = asyncio.create_task(collect(first))
            for text in texts:
                await t.a.scheduler.deltas(dispatch.attempt, text)
            await t.a.scheduler.end(dispatch.attempt, output_tokens=60)
            events, error = await reading
            assert error is None
            assert sum(len(event.delta.text) for event in events) == 60 * 8000
            await until(lambda: not t.b.service.sessions.followers)
            assert failure((await collect(slow))[1]).reason is Reason.SLOW_CONSUMER


async def test_relays_are_refused_to_other_tenants_and_for_other_processes() -> None:
    async with two() as t:
        call, dispatch = await t.begun()
        name = idempotency.decode(t.store.keys[0].value).request
        async with grpc.aio.insecure_channel(t.a.admin.endpoint) as channel:
            stub = RouterServiceStub(channel)

            async def ask(**changes: Any) -> Any:
                fields: dict[str, Any] = {
                    "request": name,
                    "tenant": "tenants/anonymous",
                    "incarnation": "a1",
                    **changes,
                }
                return (await collect(stub.RelayRequest(router_pb.RelayRequestRequest(**fields))))[1]

            assert failure(await ask(incarnation="a2")).reason is Reason.STALE_EPOCH
            assert failure(await ask(tenant="other")).reason is Reason.NOT_FOUND
            assert failure(await ask(request="requests/none")).reason is Reason.NOT_FOUND
            assert failure(await ask(after_sequence=9)).reason is Reason.INVALID_REQUEST
        await t.a.scheduler.end(dispatch.attempt)
        await collect(call)


async def test_when_the_reader_leaves_the_relay_goes_on_as_the_reader() -> None:
    async with two(resume_window_s=0.3) as t:
        first, dispatch = await t.begun()
        call = t.b.generate(**KEY)
        await call.read()
        first.cancel()
        await until(lambda: not t.a.service.sessions.followers)
        await asyncio.sleep(0.5)
        assert t.a.scheduler.cancels.empty()
        await t.a.scheduler.deltas(dispatch.attempt, *"ab")
        await t.a.scheduler.end(dispatch.attempt)
        events, error = await collect(call)
        assert error is None
        assert "".join(event.delta.text for event in events) == "ab"


async def test_a_duplicate_elsewhere_may_cancel_the_request() -> None:
    async with two() as t:
        first, dispatch = await t.begun()
        duplicate = await t.b.interactive(**KEY)
        await duplicate.read()
        await duplicate.write(pb.ClientFrame(acknowledge=pb.Acknowledge(sequence=1)))
        await duplicate.write(pb.ClientFrame(cancel=pb.CancelFrame()))
        await soon(t.a.scheduler.cancels)
        await t.a.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        for call in (first, duplicate):
            events, error = await collect(call)
            assert failure(error).reason is Reason.CLIENT_CANCELLED
            assert events[-1].terminal.finish_reason == pb.FINISH_REASON_CANCELLED


async def test_a_connection_to_another_router_that_is_not_used_is_closed(monkeypatch: Any) -> None:
    async with two() as t:
        first, dispatch = await t.begun()
        peers = t.b.service.sharing.peers
        reading = t.b.generate(**KEY)
        await reading.read()
        monkeypatch.setattr("headrace.router.peers.IDLE_S", 0.0)
        other = t.b.generate(**KEY)
        await other.read()
        other.cancel()
        await until(lambda: len(t.b.service.sessions.followers) == 1)
        assert len(peers) == 1, "it has a user"
        await t.a.scheduler.end(dispatch.attempt)
        assert [(await collect(call))[1] for call in (first, reading)] == [None, None]
        await until(lambda: len(peers) == 0)


async def test_the_callers_deadline_ends_its_call_alone() -> None:
    async with two() as t:
        first, dispatch = await t.begun()
        request = pb.GenerateRequest(model="chat", prompt="hello", **KEY)
        call = t.b.stub.Generate(request, timeout=0.3)
        _, error = await collect(call)
        assert error is not None
        await until(lambda: not t.a.service.sessions.followers)
        assert t.a.scheduler.cancels.empty()
        await t.a.scheduler.end(dispatch.attempt)
        assert (await collect(first))[1] is None
