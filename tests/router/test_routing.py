"""Routing over real links: what Schedulers say decides where the next request goes, and it can be explained."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import prometheus_client as prom
import pytest

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.router.v1 import router_service_pb2 as router_pb
from headrace.api.router.v1.router_service_pb2_grpc import RouterServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Reason
from headrace.control.resources import FailureDomain
from headrace.control.tenants import Tenant
from headrace.router.routing_metrics import RoutingMetrics
from router.harness import DEADLINE_S, Harness, collect, failure, kinds, running, until

LONG = "A long beginning that many share. " * 60


@contextlib.asynccontextmanager
async def explained(**fields: Any) -> AsyncIterator[Harness]:
    """A Router whose RouterService listens."""
    async with running(**fields) as h:
        await h.admin.start()
        try:
            yield h
        finally:
            await h.admin.stop(0)


async def explain(h: Harness, tenant: str = "", **fields: Any) -> router_pb.ExplainRouteResponse:
    async with grpc.aio.insecure_channel(h.admin.endpoint) as channel:
        generate = pb.GenerateRequest(**{"model": "chat", "prompt": "hello", **fields})
        request = router_pb.ExplainRouteRequest(generate=generate, tenant=tenant)
        answer: router_pb.ExplainRouteResponse = await RouterServiceStub(channel).ExplainRoute(
            request, timeout=DEADLINE_S
        )
        return answer


async def finish(h: Harness, call: Any, dispatch: sp.Dispatch) -> list[str]:
    await h.scheduler.deltas(dispatch.attempt, "x")
    await h.scheduler.end(dispatch.attempt)
    events, error = await collect(call)
    assert error is None
    return kinds(events)


async def fail(h: Harness, dispatch: sp.Dispatch, reason: Reason) -> None:
    error = errors_pb2.Error(reason=errors_pb2.Reason.Value(f"REASON_{reason.value}"), message="why")
    await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_FAILED, error=error)


async def test_equal_beginnings_go_where_the_first_went() -> None:
    async with running(replicas=8) as h:
        seen = []
        for n in range(6):
            call = h.generate(prompt=f"{LONG}{n}")
            dispatch = await h.dispatched()
            cached = 500 if n else 0
            version = h.scheduler.versions[dispatch.attempt]
            admitted = sp.Admitted(
                attempt=dispatch.attempt, prompt_tokens=510, cached_prompt_tokens=cached, record_version=version
            )
            await h.scheduler.send(admitted=[admitted])
            await finish(h, call, dispatch)
            seen.append(dispatch.replica)
        assert len(set(seen)) == 1
        assert (h.routes.routing.prompt_tokens, h.routes.routing.cached_tokens) == (6 * 510, 5 * 500)


async def test_a_session_goes_where_it_was() -> None:
    async with running(replicas=8) as h:
        seen = set()
        for _ in range(6):
            call = h.generate(affinity_key="s-1")
            dispatch = await h.admitted()
            await finish(h, call, dispatch)
            seen.add(dispatch.replica)
        assert len(seen) == 1


async def test_reports_of_load_decide() -> None:
    async with running(replicas=2) as h:
        busy = sp.ReplicaLoad(replica="replicas/r0", active=4, waiting=9, slots=4)
        busy.queue_wait.FromSeconds(20)
        idle = sp.ReplicaLoad(replica="replicas/r1", slots=4)
        await h.scheduler.send(load=sp.LoadReport(replicas=[busy, idle], routers=3))
        await until(lambda: h.routes.routing.loads.standing("replicas/r0").report is not None)
        for _ in range(5):
            call = h.generate()
            dispatch = await h.admitted()
            assert dispatch.replica == "replicas/r1"
            await finish(h, call, dispatch)


async def test_faults_before_a_token_eject_and_refusals_do_not() -> None:
    async with explained(replicas=4, attempts_max=1) as h:
        outliers = h.routes.routing.outliers
        faults: Counter[str] = Counter()
        for _ in range(40):
            call = h.generate()
            dispatch = await h.dispatched()
            reason = Reason.ENGINE_FAILED if dispatch.replica == "replicas/r0" else Reason.QUEUE_TIMEOUT
            faults[dispatch.replica] += 1
            await fail(h, dispatch, reason)
            _, error = await collect(call)
            assert failure(error).reason is reason
            if reason is Reason.ENGINE_FAILED:
                await asyncio.sleep(0.11)  # faults that come together are one
        assert faults["replicas/r0"] == 3
        assert outliers.ejections == 1
        assert len(faults) == 4
        told = {c.replica: c.excluded_by for c in (await explain(h)).candidates}
        assert told == {"replicas/r0": "ejected", "replicas/r1": "", "replicas/r2": "", "replicas/r3": ""}


async def test_a_fault_after_a_token_is_none_of_routings_business() -> None:
    async with running(replicas=2, attempts_max=1) as h:
        routing = h.routes.routing
        call = h.generate()
        dispatch = await h.admitted()
        assert routing.silent == {dispatch.attempt}
        await h.scheduler.deltas(dispatch.attempt, "x")
        await until(lambda: not routing.silent)
        await fail(h, dispatch, Reason.ENGINE_FAILED)
        await collect(call)
        assert not routing.outliers._records


async def test_a_tenant_is_served_in_its_zones_only() -> None:
    async with explained(replicas=2) as h:
        before = h.routes.snapshot
        assert before is not None
        east = dataclasses.replace(before.replicas[1], failure_domain=FailureDomain("h", "k", "east"))
        tenant = Tenant("tenants/t", zones=("east",))
        changed = {"version": 6, "replicas": (before.replicas[0], east), "tenants": (tenant,)}
        h.routes.apply(dataclasses.replace(before, **changed))
        answer = await explain(h, tenant="tenants/t")
        assert answer.chosen == "replicas/r1"
        assert {c.replica: (c.excluded_by, c.failure_domain) for c in answer.candidates} == {
            "replicas/r0": ("zone", "-/-/-"),
            "replicas/r1": ("", "east/k/h"),
        }
        assert all(not c.excluded_by for c in (await explain(h)).candidates), "others go anywhere"


async def test_a_broken_link_is_one_fault_and_leaves_nothing_in_flight() -> None:
    async with running(replicas=1, attempts_max=1) as h:
        calls = [h.generate() for _ in range(10)]
        for _ in calls:
            await h.dispatched()
        assert h.routes.in_flight == {"replicas/r0": 10}
        h.scheduler.cut()
        for call in calls:
            await collect(call)
        assert h.routes.in_flight == {}
        assert not h.routes.routing.silent
        record = h.routes.routing.outliers._records["replicas/r0"]
        assert record.row == 1


async def test_a_route_is_explained() -> None:
    async with explained(replicas=3) as h:
        report = sp.ReplicaLoad(replica="replicas/r1", active=2, slots=4)
        await h.scheduler.send(load=sp.LoadReport(replicas=[report]))
        await until(lambda: h.routes.routing.loads.standing("replicas/r1").report is not None)
        call = h.generate()
        dispatch = await h.admitted()
        answer = await explain(h)
        assert answer.revision == dispatch.revision
        assert (answer.snapshot_version, answer.candidates_total, answer.refusal) == (5, 3, "")
        by_name = {c.replica: c for c in answer.candidates}
        assert by_name[answer.chosen].HasField("score")
        scores = [c.score for c in answer.candidates]
        assert scores == sorted(scores)
        assert by_name[dispatch.replica].in_flight == 1
        assert by_name["replicas/r1"].HasField("load_age")
        assert not by_name["replicas/r2"].HasField("load_age")
        for candidate in answer.candidates:
            assert candidate.score == pytest.approx(sum(part.seconds for part in candidate.parts))
            assert [part.name for part in candidate.parts] == [
                "queue_wait", "prefill", "kv_headroom", "prefix_locality", "affinity", "spread", "slow_start",
                "stale_load",
            ]  # fmt: skip
        await finish(h, call, dispatch)
        assert h.scheduler.dispatches.empty(), "nothing is started"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "nope"}, Reason.MODEL_NOT_FOUND),
        ({"prompt": ""}, Reason.INVALID_REQUEST),
        ({"tenant": "nobody"}, Reason.INVALID_REQUEST),
        ({"tenant": "tenants/nobody"}, Reason.NOT_FOUND),
    ],
)
async def test_what_cannot_be_routed_says_why(fields: dict[str, Any], reason: Reason) -> None:
    async with explained() as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await explain(h, **fields)
        assert failure(caught.value).reason is reason


async def test_where_nobody_can_take_it_the_explanation_says_so() -> None:
    async with explained(replicas=2) as h:
        h.scheduler.cut()
        await until(lambda: not h.routes.links[0].is_up)
        answer = await explain(h)
        if not answer.chosen:
            assert "No worker" in answer.refusal
            assert {c.excluded_by for c in answer.candidates} == {"unreachable"}


async def test_decisions_and_health_are_metrics() -> None:
    async with running(replicas=2) as h:
        registry = prom.CollectorRegistry()
        RoutingMetrics(registry, h.routes.routing)
        call = h.generate()
        await finish(h, call, await h.admitted())
        value = registry.get_sample_value
        assert value("headrace_router_route_decisions_total", {"outcome": "load"}) == 1
        assert value("headrace_router_route_decisions_total", {"outcome": "refused"}) == 0
        assert value("headrace_router_replicas_out", {"health": "ejected"}) == 0
        assert value("headrace_router_prefix_tokens_total", {"count": "prompt"}) == 3
        assert value("headrace_router_prefix_tokens_total", {"count": "kept"}) == 1
        assert value("headrace_router_ejections_total", {"outcome": "spared"}) == 0
