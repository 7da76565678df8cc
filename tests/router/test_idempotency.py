"""Calls with an idempotency key: one execution, the same transcript for all, and the truth where there is none."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control import idempotency
from headrace.control.errors import Reason
from headrace.control.resources import Alias, AliasTarget, Effort
from headrace.control.snapshot import RoutingSnapshot
from headrace.router.idempotency import content_of
from headrace.rpc import status
from router.harness import DEADLINE_S, REVISION, Harness, collect, failure, kinds, running, soon, until
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


def moved(h: Harness, version: int, default: Effort) -> None:
    """The alias stands for a revision with that default effort from now on."""
    policy = dataclasses.replace(
        REVISION.policy, default_effort=default, supported_efforts=frozenset({Effort.LOW, Effort.HIGH})
    )
    revision = dataclasses.replace(REVISION, policy=policy, policy_version=version)
    now = h.routes.snapshot
    assert now is not None
    h.routes.apply(
        RoutingSnapshot(
            "here",
            version,
            revisions=(revision,),
            aliases=(Alias("aliases/chat", (AliasTarget(revision.name, 1),)),),
            replicas=tuple(dataclasses.replace(replica, revision=revision.name) for replica in now.replicas),
        )
    )


async def test_the_effort_that_counts_is_the_effective_one_and_outlives_a_move_of_the_alias() -> None:
    async with running(store=MemoryStore()) as h:
        moved(h, 6, Effort.LOW)
        first = h.generate(**KEY)
        await h.scheduler.end((await h.admitted()).attempt)
        whole, _ = await collect(first)
        moved(h, 7, Effort.HIGH)
        for fields, same in (
            ({}, True),
            ({"reasoning_effort": pb.REASONING_EFFORT_LOW}, True),
            ({"reasoning_effort": pb.REASONING_EFFORT_HIGH}, False),
        ):
            events, error = await collect(h.generate(**KEY, **fields))
            if same:
                assert raw(events) == raw(whole)
            else:
                assert failure(error).reason is Reason.IDEMPOTENCY_KEY_REUSED


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
        assert found.metadata == {"stage": "router", "bound": "keys", "limit": "1", "current": "1"}
        name = "headrace_router_idempotency_claims_total"
        assert h.metrics.registry.get_sample_value(name, {"decision": "no_room"}) == 1
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
        assert (
            99_000 <= record.expires_ms - record.created_ms <= 102_100
        )  # gRPC rounds a deadline up, by at most a second
        assert store.leases[store.keys[0].lease] >= 2 * 64
        await h.scheduler.end(dispatch.attempt)
        await collect(call)
        await until(lambda: idempotency.decode(store.keys[0].value).ending is not None)
        record = idempotency.decode(store.keys[0].value)
        assert record.expires_ms - record.created_ms <= 3_000
        assert store.leases[store.keys[0].lease] < 80


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


@pytest.mark.parametrize(
    ("guided", "guide"),
    [
        ({"json_object": True}, [("json_object", "")]),
        ({"json_schema": "{}"}, [("json_schema", "{}")]),
        ({"choice": {"strings": ["a", "b"]}}, [("choice", "a"), ("choice", "b")]),
    ],
)
def test_what_guides_an_answer_is_part_of_its_content(guided: dict[str, Any], guide: list[tuple[str, str]]) -> None:
    assert list(content_of(pb.GenerateRequest(model="m", guided_decoding=guided), "tenants/t").guide) == guide
    assert not content_of(pb.GenerateRequest(model="m"), "tenants/t").guide
