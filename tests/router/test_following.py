"""Duplicates of a request that runs here: beside its reader, in its place, and never in its way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Reason
from router.harness import DEADLINE_S, collect, failure, running, soon, until
from router.test_tenants import ACME, ACME_KEY, bearer, call, finish, publish
from support.memory_store import MemoryStore

KEY = {"idempotency_key": "k1"}


def raw(events: list[pb.GenerateEvent]) -> list[bytes]:
    return [event.SerializeToString(deterministic=True) for event in events]


async def test_when_the_reader_leaves_a_follower_goes_on_as_the_reader() -> None:
    async with running(store=MemoryStore(), resume_window_s=0.3) as h:
        first = h.generate(**KEY)
        dispatch = await h.admitted()
        await first.read()
        channel = grpc.aio.insecure_channel(h.target, options=[("grpc.use_local_subchannel_pool", 1)])
        request = pb.GenerateRequest(model="chat", prompt="hello", **KEY)
        followers = [InferenceServiceStub(channel).Generate(request, timeout=DEADLINE_S) for _ in range(3)]
        for follower in followers:
            assert (await follower.read()).sequence == 1
        first.cancel()
        await until(lambda: len(h.service.sessions.followers) == 2, "one of them is the reader")
        assert h.service.sessions.detached == 0
        await asyncio.sleep(0.5)
        assert h.scheduler.cancels.empty(), "it has a reader"
        for text in "abc":
            await h.scheduler.deltas(dispatch.attempt, text)
        await h.scheduler.end(dispatch.attempt)
        told = [await collect(follower) for follower in followers]
        await channel.close()
    assert [error for _, error in told] == [None] * 3
    assert len({tuple(raw(events)) for events, _ in told}) == 1
    assert "".join(event.delta.text for event in told[0][0]) == "abc"


async def test_a_follower_that_fell_behind_what_is_kept_is_told_so() -> None:
    async with running(store=MemoryStore(), resume_events_max=64, credit_window_tokens=4096) as h:
        first = h.generate(**KEY)
        dispatch = await h.admitted()
        for n in range(70):
            await h.scheduler.deltas(dispatch.attempt, "x")
            await until(lambda n=n: h.metrics.writes > n + 1)  # type: ignore[misc]
        found = failure((await collect(h.generate(**KEY)))[1])
        assert found.reason is Reason.EVENTS_EXPIRED
        await h.scheduler.end(dispatch.attempt, output_tokens=70)
        assert (await collect(first))[1] is None


async def test_an_interactive_duplicate_may_cancel_and_its_acknowledgements_pace_nothing() -> None:
    async with running(store=MemoryStore(), credit_window_tokens=8) as h:
        first = h.generate(**KEY)
        dispatch = await h.admitted()
        duplicate = await h.interactive(**KEY)
        await h.scheduler.deltas(dispatch.attempt, *"abcdefgh")
        assert (await soon(h.scheduler.credits)).limit > 8, "without a word from the duplicate"
        assert (await duplicate.read()).accepted.revision
        await duplicate.write(pb.ClientFrame(acknowledge=pb.Acknowledge(sequence=1)))
        await duplicate.write(pb.ClientFrame(cancel=pb.CancelFrame()))
        await soon(h.scheduler.cancels)
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        for call in (first, duplicate):
            assert failure((await collect(call))[1]).reason is Reason.CLIENT_CANCELLED


async def test_a_follower_of_a_request_that_is_refused_is_told_the_same() -> None:
    async with running(store=MemoryStore()) as h:
        first = h.generate(**KEY)
        refused = await h.dispatched()
        follower = h.generate(**KEY)
        await until(lambda: len(h.service.sessions.followers) == 1)
        error = sp.Ended().error
        error.reason, error.message = 12, "full"
        await h.scheduler.end(refused.attempt, pb.FINISH_REASON_REJECTED, error=error)
        for call in (first, follower):
            events, why = await collect(call)
            assert (events, failure(why).reason) == ([], Reason.OVERLOADED)


async def test_a_reader_that_does_not_read_ends_its_call_and_not_the_request() -> None:
    async with running(store=MemoryStore(), slow_consumer_s=0.4, credit_window_tokens=8) as h:
        reader = await h.interactive(**KEY)
        dispatch = await h.admitted()
        follower = h.generate(**KEY)
        await h.scheduler.deltas(dispatch.attempt, *"abcdefgh")  # all that it may, and nothing is acknowledged
        await until(lambda: not h.service.sessions.followers, "the follower is the reader now")
        assert (await soon(h.scheduler.credits)).limit > 8
        await h.scheduler.deltas(dispatch.attempt, "i")
        await h.scheduler.end(dispatch.attempt, output_tokens=9)
        told, error = await collect(follower)
        assert error is None
        assert "".join(event.delta.text for event in told) == "abcdefghi"
        assert failure((await collect(reader))[1]).reason is Reason.SLOW_CONSUMER
        assert h.scheduler.cancels.empty()


async def test_followers_are_bounded() -> None:
    async with running(store=MemoryStore(), followers_max=1) as h:
        h.generate(**KEY)
        dispatch = await h.admitted()
        follower = h.generate(**KEY)
        await follower.read()
        found = failure((await collect(h.generate(**KEY)))[1])
        assert found.reason is Reason.OVERLOADED
        assert found.metadata == {"stage": "router", "bound": "followers", "limit": "1", "current": "1"}
        assert found.retry_after_s == 0.5
        await h.scheduler.end(dispatch.attempt)
        assert (await collect(follower))[1] is None


async def test_where_there_is_no_room_a_duplicate_is_served_and_a_new_key_refused_without_a_write() -> None:
    store = MemoryStore()
    async with running(store=store) as h:
        publish(h, replace(ACME, concurrency=1))
        first = call(h, *bearer(ACME_KEY), **KEY)
        dispatch = await h.admitted()
        writes = store.calls.count("swap")
        _, error = await collect(call(h, *bearer(ACME_KEY), idempotency_key="k2"))
        assert failure(error).reason is Reason.QUOTA_EXCEEDED
        assert store.calls.count("swap") == writes
        assert len(store.keys) == 1
        duplicate = call(h, *bearer(ACME_KEY), **KEY)
        accepted = await duplicate.read()
        await finish(h, dispatch)
        told = [await collect(one) for one in (first, duplicate)]
        assert [why for _, why in told] == [None, None]
        assert raw(told[0][0]) == raw([accepted, *told[1][0]])
        assert h.service.quotas.core.running("tenants/acme") == 0
        assert h.service.admission.core.requests == 0
