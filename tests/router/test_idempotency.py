"""Calls with an idempotency key: one execution, the same transcript for all, and the truth where there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control import idempotency
from headrace.control.errors import Reason
from headrace.rpc import status
from router.harness import DEADLINE_S, Harness, collect, failure, kinds, running, soon, until
from support.memory_store import MemoryStore

KEY = {"idempotency_key": "k1"}


def raw(events: list[pb.GenerateEvent]) -> list[bytes]:
    return [event.SerializeToString(deterministic=True) for event in events]


async def metadata(call: Any) -> dict[str, Any]:
    return {key: value for key, value in await call.initial_metadata() if key.startswith("headrace-")}


async def leave(h: Harness, call: Any) -> None:
    """The call ends and its request runs on."""
    call.cancel()
    await until(lambda: h.service.sessions.detached == 1)


async def test_a_duplicate_follows_and_another_one_repeats_what_ended() -> None:
    store = MemoryStore()
    async with running(store=store) as h:
        first = h.generate(**KEY)
        dispatch = await h.admitted()
        assert not dispatch.generate.idempotency_key
        duplicate = h.generate(**KEY)
        await h.scheduler.deltas(dispatch.attempt, "a")
        assert (await duplicate.read()).accepted.revision
        assert (await duplicate.read()).delta.text == "a"
        await h.scheduler.deltas(dispatch.attempt, "b")
        await h.scheduler.end(dispatch.attempt)
        events, error = await collect(first)
        rest, _ = await collect(duplicate)
        late = h.generate(**KEY)
        again, late_error = await collect(late)
        assert (error, late_error) == (None, None)
        assert raw(again) == raw(events)
        assert raw(events[2:]) == raw(rest)
        assert kinds(events)[-1] == "terminal"
        assert await metadata(late) == {
            "headrace-idempotent-replay": "true",
            "headrace-request": events[0].request,
        }
        assert await metadata(first) == {}
        assert h.scheduler.dispatches.empty()
        assert store.calls.count("swap") == 4, "one for each call, and one that notes the end"
        await until(lambda: idempotency.decode(store.keys[0].value).ending is not None)
        assert idempotency.decode(store.keys[0].value).ending.finish == "STOP"  # type: ignore[union-attr]


async def test_no_key_asks_the_store_nothing() -> None:
    store = MemoryStore()
    async with running(store=store) as h:
        call = h.generate()
        dispatch = await h.admitted()
        await h.scheduler.end(dispatch.attempt)
        await collect(call)
    assert store.calls == []


@pytest.mark.parametrize("same", [{"priority": pb.PRIORITY_BATCH}, {"window_tokens": 9}, {"model": "aliases/chat"}])
async def test_how_it_is_served_is_no_content(same: dict[str, Any]) -> None:
    async with running(store=MemoryStore()) as h:
        h.generate(**KEY)
        dispatch = await h.admitted()
        duplicate = h.generate(**KEY, **same)
        await h.scheduler.end(dispatch.attempt)
        assert (await collect(duplicate))[1] is None
        assert h.scheduler.dispatches.empty()


@pytest.mark.parametrize(
    "other",
    [{"prompt": "hello!"}, {"max_tokens": 3}, {"sampling": {"temperature": 1.0}}, {"stop": {"strings": ["x"]}},
     {"top_logprobs": 0}, {"model": "models/m/revisions/x"}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
async def test_the_key_with_other_content_is_refused(other: dict[str, Any]) -> None:
    async with running(store=MemoryStore()) as h:
        h.generate(**KEY)
        dispatch = await h.admitted()
        if "model" in other:
            other = {"model": h.service._planner._snapshot().revisions[0].name}
        _, error = await collect(h.generate(**KEY, **other))
        await h.scheduler.end(dispatch.attempt)
    found = failure(error)
    assert (found.reason, found.field) == (Reason.IDEMPOTENCY_KEY_REUSED, "idempotency_key")


async def test_keys_are_each_tenants_own() -> None:
    async with running(store=MemoryStore(), tenant_metadata="tenant") as h:
        request = pb.GenerateRequest(model="chat", prompt="hello", **KEY)
        calls = [h.stub.Generate(request, timeout=DEADLINE_S, metadata=(("tenant", t),)) for t in "ab"]
        for attempt in [(await h.admitted()).attempt for _ in calls]:
            await h.scheduler.end(attempt)
        assert [(await collect(call))[1] for call in calls] == [None, None]


@pytest.mark.parametrize("key", ["", "x" * 129, "ä", "a\tb"])
async def test_a_key_is_checked(key: str) -> None:
    async with running(store=MemoryStore()) as h:
        call = h.generate(idempotency_key=key)
        if key:
            found = failure((await collect(call))[1])
            assert (found.reason, found.field) == (Reason.INVALID_REQUEST, "idempotency_key")


async def test_a_key_that_is_past_its_time_runs_again() -> None:
    store = MemoryStore()
    async with running(store=store, idempotency_ttl_s=1.0, resume_window_s=0.1, deadline_s_default=0.9) as h:
        for _ in range(2):
            call = h.generate(**KEY)
            dispatch = await h.admitted()
            await h.scheduler.end(dispatch.attempt)
            assert (await collect(call))[1] is None
            await asyncio.sleep(1.05)
    assert len(store.keys) == 1
    assert store.leases[store.keys[0].lease] == 62, "the key's life, a slice and a margin"


async def test_one_lease_serves_many_keys() -> None:
    store = MemoryStore()
    async with running(store=store) as h:
        calls = [h.generate(idempotency_key=f"k{n}") for n in range(5)]
        for _ in calls:
            await h.scheduler.end((await h.admitted()).attempt)
        for call in calls:
            await collect(call)
        assert len(store.keys) == 5
        assert len(store.leases) == 1
        store.leases.clear()  # it is gone, as from a store that was restored
        call = h.generate(idempotency_key="k9")
        await h.scheduler.end((await h.admitted()).attempt)
        assert (await collect(call))[1] is None


async def test_without_the_store_nothing_runs_and_the_answer_is_quick() -> None:
    store = MemoryStore()
    async with running(store=store) as h:
        store.is_down = True
        found = failure((await collect(h.generate(**KEY)))[1])
        assert found.reason is Reason.STORE_UNAVAILABLE
        assert "could run twice" in found.message
        store.is_down = False
        call = h.generate(**KEY)
        await h.scheduler.end((await h.admitted()).attempt)
        assert (await collect(call))[1] is None
    async with running() as h:
        assert failure((await collect(h.generate(**KEY)))[1]).reason is Reason.STORE_UNAVAILABLE


async def test_a_store_that_wrote_and_did_not_answer_in_time_leaves_the_key_free(monkeypatch: Any) -> None:
    monkeypatch.setattr("headrace.router.idempotency.CLAIM_S", 0.2)
    store = MemoryStore()
    async with running(store=store) as h:
        store.leases[1] = 99
        store.answers.clear()
        h.service.sharing.keys._leases[0] = 1, float("inf")
        found = failure((await collect(h.generate(**KEY)))[1])
        assert found.reason is Reason.STORE_UNAVAILABLE
        assert len(store.keys) == 1, "it was written all the same"
        store.answers.set()
        call = h.generate(**KEY)
        await h.scheduler.end((await h.admitted()).attempt)
        assert (await collect(call))[1] is None


async def test_a_refusal_before_anything_was_computed_frees_the_key() -> None:
    store = MemoryStore()
    async with running(store=store) as h:
        call = h.generate(**KEY)
        refused = await h.dispatched()
        error = sp.Ended().error
        error.reason, error.message = 12, "full"
        await h.scheduler.end(refused.attempt, pb.FINISH_REASON_REJECTED, error=error)
        found = failure((await collect(call))[1])
        assert found.reason is Reason.OVERLOADED
        call = h.generate(**KEY)
        await h.scheduler.end((await h.admitted()).attempt)
        events, error_ = await collect(call)
        assert error_ is None
        assert kinds(events) == ["accepted", "terminal"]


async def test_the_callers_cancel_is_an_end_that_stands() -> None:
    async with running(store=MemoryStore()) as h:
        call = await h.interactive(**KEY)
        dispatch = await h.dispatched()
        await call.write(pb.ClientFrame(cancel=pb.CancelFrame()))
        await soon(h.scheduler.cancels)
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        assert failure((await collect(call))[1]).reason is Reason.CLIENT_CANCELLED
        assert failure((await collect(h.generate(**KEY)))[1]).reason is Reason.CLIENT_CANCELLED
        assert h.scheduler.dispatches.empty()


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


async def test_calls_that_wait_for_the_store_are_bounded() -> None:
    store = MemoryStore()
    async with running(store=store, requests_max=2) as h:
        store.answers.clear()
        waiting = [h.generate(idempotency_key=f"k{n}") for n in range(2)]
        await until(lambda: h.service.sharing.keys._asking == 2)
        found = failure((await collect(h.generate(**KEY)))[1])
        assert found.reason is Reason.OVERLOADED
        store.answers.set()
        for _ in waiting:
            await h.scheduler.end((await h.admitted()).attempt)
        assert [(await collect(call))[1] for call in waiting] == [None, None]


async def test_keys_are_bounded_and_a_refused_request_gives_its_own_back() -> None:
    store = MemoryStore()
    async with running(store=store, idempotency_keys_max=1) as h:
        call = h.generate(**KEY)
        dispatch = await h.admitted()
        found = failure((await collect(h.generate(idempotency_key="k2")))[1])
        assert found.reason is Reason.OVERLOADED
        assert found.metadata["limitKeys"] == "1"
        await h.scheduler.end(dispatch.attempt)
        assert (await collect(call))[1] is None
        assert h.service.sharing.keys.held == 1
    async with running(store=store, idempotency_keys_max=1) as h:
        call = h.generate(idempotency_key="k3")
        error = sp.Ended().error
        error.reason, error.message = 12, "full"
        await h.scheduler.end((await h.dispatched()).attempt, pb.FINISH_REASON_REJECTED, error=error)
        await collect(call)
        await until(lambda: h.service.sharing.keys.held == 0)


async def test_a_key_lives_as_long_as_its_request_may_and_no_longer_after_its_end() -> None:
    store = MemoryStore()
    async with running(store=store, idempotency_ttl_s=2.0, resume_window_s=1.0) as h:
        request = pb.GenerateRequest(model="chat", prompt="hello", **KEY)
        call = h.stub.Generate(request, timeout=100)
        dispatch = await h.admitted()
        record = idempotency.decode(store.keys[0].value)
        assert 99_000 <= record.expires_ms - record.created_ms <= 101_100
        assert store.leases[store.keys[0].lease] >= 2 * 64
        await h.scheduler.end(dispatch.attempt)
        await collect(call)
        await until(lambda: idempotency.decode(store.keys[0].value).ending is not None)
        record = idempotency.decode(store.keys[0].value)
        assert record.expires_ms - record.created_ms <= 3_000
        assert store.leases[store.keys[0].lease] < 80


async def test_followers_are_bounded() -> None:
    async with running(store=MemoryStore(), followers_max=1) as h:
        h.generate(**KEY)
        dispatch = await h.admitted()
        follower = h.generate(**KEY)
        await follower.read()
        found = failure((await collect(h.generate(**KEY)))[1])
        assert found.reason is Reason.OVERLOADED
        assert found.metadata["limitFollowers"] == "1"
        await h.scheduler.end(dispatch.attempt)
        assert (await collect(follower))[1] is None


async def test_what_ended_and_is_no_longer_kept_is_not_run_again() -> None:
    async with running(store=MemoryStore(), resume_window_s=0.1, record_retention_s=0.2) as h:
        call = h.generate(**KEY)
        await h.scheduler.end((await h.admitted()).attempt)
        events, _ = await collect(call)
        for _ in range(2):  # remembered, and forgotten
            await asyncio.sleep(0.2)
            found = failure((await collect(h.generate(**KEY)))[1])
            assert found.reason is Reason.EVENTS_EXPIRED
            assert found.metadata["finishReason"] == "STOP"
            assert found.metadata["request"] == events[0].request
        assert h.scheduler.dispatches.empty()


def test_the_reasons_are_what_clients_see() -> None:
    assert status.code_of(Reason.IDEMPOTENCY_KEY_REUSED) is grpc.StatusCode.INVALID_ARGUMENT
    assert status.code_of(Reason.IDEMPOTENCY_ORIGIN_LOST) is grpc.StatusCode.ABORTED
    assert status.code_of(Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE) is grpc.StatusCode.UNAVAILABLE
