"""What a Router takes in, over real gRPC: each bound refuses at once, says which it is, and nothing is left counted."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.attempt_book import waiting_max
from headrace.control.errors import Failure, Reason
from headrace.control.known_waits import HOLD_MAX_S
from headrace.control.router_admission import SHARES, Priority
from headrace.control.router_capacity import HEADROOM
from headrace.router.demands import Demand, demand_of
from headrace.rpc import status

from .harness import REVISION, Harness, collect, failure, running, until

HOLDS = HEADROOM * (4 + waiting_max(4))


@asynccontextmanager
async def holding(h: Harness, count: int, **fields: Any) -> AsyncIterator[list[sp.Dispatch]]:
    """So many requests that run; they are ended on the way out."""
    answers, dispatches = [], []
    for _ in range(count):
        answers.append(asyncio.create_task(collect(h.generate(**fields))))
        dispatches.append(await h.dispatched())
    yield dispatches
    for dispatch in dispatches:
        await h.scheduler.end(dispatch.attempt)
    await asyncio.gather(*answers)


async def refused(h: Harness, **fields: Any) -> Failure:
    events, error = await collect(h.generate(**fields))
    assert events == []
    told = failure(error)
    assert told.reason is Reason.OVERLOADED
    assert told.metadata["stage"] == "router"
    return told


def limits_are_known(h: Harness) -> bool:
    return h.service.admission.core.allowed(1e9)[0] > 0


def metric(h: Harness, name: str, **labels: str) -> float:
    return h.metrics.registry.get_sample_value(f"headrace_router_{name}", labels) or 0.0


async def test_without_any_setting_it_takes_in_what_its_replicas_and_their_queues_hold() -> None:
    async with running() as h:
        await until(lambda: limits_are_known(h))
        for priority in (pb.PRIORITY_SHEDDABLE, pb.PRIORITY_UNSPECIFIED):
            share = SHARES[Priority(priority or pb.PRIORITY_STANDARD)]
            limit = math.ceil(HOLDS * share)
            async with holding(h, limit, priority=priority, max_tokens=8):
                told = await refused(h, priority=priority, max_tokens=8)
                assert (told.metadata["bound"], told.metadata["current"]) == ("requests", str(limit))
                assert told.metadata["limit"] == str(limit)
                assert 0.1 <= (told.retry_after_s or 0) <= 1.0
                async with holding(h, 1, priority=pb.PRIORITY_CRITICAL, max_tokens=8):
                    assert h.service.admission.core.requests == limit + 1
            await until(lambda: h.service.admission.core.held() == (0, 0))
        assert metric(h, "admission_refused_total", bound="requests", priority="standard") == 1
        await until(lambda: metric(h, "admission_held", bound="requests") == 0)
        assert metric(h, "admission_allowed", bound="requests") == HOLDS


async def test_bytes_are_bounded_over_all_requests() -> None:
    async with running(held_bytes_max=1024 * 1024) as h, holding(h, 10, prompt="x" * 90_000):
        told = await refused(h, prompt="x" * 90_000)
        assert (told.metadata["bound"], told.metadata["limit"]) == ("bytes", str(math.ceil(1024 * 1024 * 0.9)))
        async with holding(h, 1):
            await until(lambda: metric(h, "admission_held", bound="bytes") > 900_000)


async def test_output_that_may_wait_for_its_reader_counts_as_bytes() -> None:
    async with running(credit_window_tokens=1000) as h:
        core = h.service.admission.core
        async with holding(h, 1, prompt="x"):
            plain = core.input_bytes
            assert 16_000 < plain < 16_100
        async with holding(h, 1, prompt="x", top_logprobs=2):
            assert core.input_bytes > 3 * 16_000


async def test_tokens_are_bounded_where_a_limit_is_set() -> None:
    async with running(tokens_max=100) as h, holding(h, 3, prompt="x", max_tokens=25):
        told = await refused(h, prompt="x", max_tokens=25)
        assert (told.metadata["bound"], told.metadata["limit"]) == ("tokens", "90")


async def test_the_time_to_refuse_is_told_and_that_to_fail_is_not() -> None:
    async with running(requests_max=2) as h:
        async with holding(h, 2, priority=pb.PRIORITY_CRITICAL):
            await refused(h)
        begun = asyncio.create_task(collect(h.generate()))
        dispatch = await h.admitted()
        lost = Failure(Reason.STREAM_INTERRUPTED, "Lost.")
        await h.scheduler.deltas(dispatch.attempt, "a")
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_FAILED, error=status.to_proto(lost))
        events, _ = await begun
        assert events
        assert metric(h, "refusal_seconds_count", reason="OVERLOADED") == 1
        assert 0 < metric(h, "refusal_seconds_sum", reason="OVERLOADED") < 1
        assert metric(h, "refusal_seconds_count", reason="STREAM_INTERRUPTED") == 0


async def test_what_all_replicas_have_just_refused_is_refused_here_and_nothing_else() -> None:
    said = {"stage": "wait", "expectedMs": "60000", "limitMs": "3000"}
    too_long = status.to_proto(Failure(Reason.OVERLOADED, "Long.", metadata=said, retry_after_s=2.0))
    async with running(replicas=2) as h:
        answer = asyncio.create_task(collect(h.generate(max_tokens=8)))
        for _ in range(2):
            await h.scheduler.end((await h.dispatched()).attempt, pb.FINISH_REASON_REJECTED, error=too_long)
        assert failure((await answer)[1]).metadata["stage"] == "wait"
        learned = time.monotonic()
        told = await refused(h, max_tokens=8)
        assert (told.metadata["bound"], told.metadata["limit"]) == ("wait", "2")
        assert 1.0 < (told.retry_after_s or 0.0) <= 2.5
        for fields in ({"max_tokens": 7}, {"max_tokens": 8, "priority": pb.PRIORITY_CRITICAL}):
            async with holding(h, 1, **fields):
                pass
        assert time.monotonic() - learned < HOLD_MAX_S, "too slow to tell"
        await asyncio.sleep(HOLD_MAX_S)
        async with holding(h, 1, max_tokens=8):
            pass
        await until(lambda: metric(h, "foreknown_count") == 1)
        assert h.service.admission.core.demand(time.monotonic()) == {REVISION.name: 5}, "it is demand all the same"
        assert h.service.admission.core.held() == (0, 0)


async def test_nothing_is_made_of_the_prompt_of_a_request_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(generate: pb.GenerateRequest, *rest: Any) -> Demand:
        made.append(generate.prompt)
        return demand_of(generate, *rest)

    monkeypatch.setattr("headrace.router.plan.demand_of", counted)
    async with running(requests_max=2) as h, holding(h, 2, prompt="taken", priority=pb.PRIORITY_CRITICAL):
        await refused(h, prompt="refused", priority=pb.PRIORITY_CRITICAL)
    async with running(tokens_max=100) as h, holding(h, 3, prompt="taken", max_tokens=25):
        await refused(h, prompt="refused", max_tokens=25)
    assert made == ["taken"] * 5, "and once each"


async def test_events_that_wait_for_a_reader_are_bytes() -> None:
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate(on_disconnect=pb.ON_DISCONNECT_CONTINUE)))
        dispatch = await h.admitted()
        await h.scheduler.deltas(dispatch.attempt, "some", "text")
        await until(lambda: h.service.admission.core.buffered_bytes > 0)
        await h.scheduler.end(dispatch.attempt)
        await answer
        await until(lambda: h.service.admission.core.buffered_bytes == 0)


def load(replica: str, **fields: Any) -> sp.ReplicaLoad:
    return sp.ReplicaLoad(replica=f"replicas/{replica}", slots=4, **fields)


@pytest.mark.parametrize(
    ("both", "priority"),
    [
        ({"admits_from": pb.PRIORITY_CRITICAL}, pb.PRIORITY_STANDARD),
        ({"admits_from": pb.PRIORITY_STANDARD}, pb.PRIORITY_BATCH),
    ],
    ids=["full", "brown-out"],
)
async def test_what_every_replica_would_refuse_reaches_no_scheduler(both: dict[str, Any], priority: int) -> None:
    async with running(replicas=2) as h:
        await until(lambda: limits_are_known(h))
        core = h.service.admission.core
        await h.scheduler.send(load=sp.LoadReport(replicas=[load("r0", **both), load("r1")]))
        async with holding(h, 1, priority=priority):
            pass
        loads = [load(name, queue_wait=Duration(seconds=8 + n), **both) for n, name in enumerate(("r0", "r1"))]
        await h.scheduler.send(load=sp.LoadReport(replicas=loads))
        await until(lambda: all(len(state.refusing) == 2 for state in core._revisions.values()))
        told = await refused(h, priority=priority)
        assert told.metadata["bound"] == "replicas"
        assert 6.0 <= (told.retry_after_s or 0) <= 10.0, "the shortest wait, spread"
        assert h.scheduler.dispatches.empty()
        async with holding(h, 1, priority=pb.PRIORITY_CRITICAL):
            pass
        await h.scheduler.send(load=sp.LoadReport(replicas=[load("r0", **both), load("r1")]))
        await until(lambda: all(len(state.refusing) == 1 for state in core._revisions.values()))
        async with holding(h, 1, priority=priority):
            pass


async def test_nothing_is_left_counted_however_requests_end() -> None:
    async with running() as h:
        answers = [asyncio.create_task(collect(h.generate())) for _ in range(6)]
        dispatches = [await h.dispatched() for _ in range(6)]
        assert h.service.admission.core.requests == 6
        answers[0].cancel()
        await h.scheduler.admit(dispatches[1].attempt)
        cancelled = await asyncio.wait_for(h.scheduler.cancels.get(), 5)
        await h.scheduler.end(cancelled.attempt, pb.FINISH_REASON_CANCELLED)
        h.scheduler.cut()
        await asyncio.gather(*answers, return_exceptions=True)
        await until(lambda: h.service.admission.core.held() == (0, 0))
        assert h.service.admission.core.input_bytes == 0


async def test_a_request_that_nobody_can_take_is_not_counted() -> None:
    async with running() as h:
        h.scheduler.cut()
        await until(lambda: not h.routes.links[0].is_up)
        _events, error = await collect(h.generate())
        assert failure(error).reason is Reason.NO_HEALTHY_WORKER
        assert h.service.admission.core.held() == (0, 0)


async def test_a_replica_that_is_ejected_holds_nothing() -> None:
    async with running(replicas=2) as h:
        core, outliers = h.service.admission.core, h.routes.routing.outliers
        await until(lambda: core.allowed(1e9)[0] == 2 * HOLDS)
        now = time.monotonic()
        for token in range(10):
            outliers.faulted(REVISION.name, "replicas/r0", token, now + token)
        await until(lambda: core.allowed(1e9)[0] == HOLDS)
        outliers.forget(REVISION.name, "replicas/r0")
        await until(lambda: core.allowed(1e9)[0] == 2 * HOLDS)
