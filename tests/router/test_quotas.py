"""How much a tenant may: refused with the limit and the time until it passes, given back whatever the end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from router.harness import collect, failure, kinds, running, soon, until
from router.test_tenants import ACME, ACME_KEY, OTHER, OTHER_KEY, bearer, call, finish, publish, refused, served


async def test_a_quota_is_refused_with_the_limit_and_the_time_until_it_passes() -> None:
    async with running() as h:
        publish(h, replace(ACME, requests_per_minute=2), OTHER)
        await served(h, *bearer(ACME_KEY))
        await served(h, *bearer(ACME_KEY))
        began = time.monotonic()
        _, error = await collect(call(h, *bearer(ACME_KEY)))
        took_s = time.monotonic() - began
        await served(h, *bearer(OTHER_KEY))
    found = failure(error)
    assert found.reason is Reason.QUOTA_EXCEEDED
    assert found.metadata == {"tenant": "tenants/acme", "quota": "requestsPerMinute", "limit": "2"}
    assert found.retry_after_s is not None
    assert 30 - 10 < found.retry_after_s <= 30
    assert took_s < 1.0, "nothing is queued"
    told: Any = rpc_status.from_call(error)
    quota = error_details_pb2.QuotaFailure()
    (packed,) = [d for d in told.details if d.Is(quota.DESCRIPTOR)]
    packed.Unpack(quota)
    assert quota.violations[0].subject == "tenants/acme"
    assert "2 requests a minute" in quota.violations[0].description


async def test_concurrency_is_given_back_however_a_request_ends() -> None:
    async with running() as h:
        publish(h, replace(ACME, concurrency=1))
        running_of_acme = lambda: h.service.quotas.core.running("tenants/acme")  # noqa: E731
        for end in ("done", "cancelled", "lost", "refused"):
            answer = call(h, *bearer(ACME_KEY))
            dispatch = await h.admitted()
            assert running_of_acme() == 1
            assert (await refused(h, *bearer(ACME_KEY))).metadata["quota"] == "concurrency"
            if end == "done":
                await finish(h, dispatch)
            elif end == "cancelled":
                answer.cancel()
                cancel = await soon(h.scheduler.cancels)
                await h.scheduler.end(cancel.attempt, pb.FINISH_REASON_CANCELLED)
            elif end == "lost":
                await h.scheduler.deltas(dispatch.attempt, "a")
                await until(lambda: h.metrics.writes > 0)
                await answer.read()
                h.scheduler.cut()
            else:
                await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_FAILED)
            await until(lambda: running_of_acme() == 0, end)
            await until(lambda: h.routes.links[0].is_up)
        before = h.routes.snapshot
        assert before is not None
        h.routes.apply(replace(before, version=before.version + 1, replicas=()))
        assert (await refused(h, *bearer(ACME_KEY))).reason is Reason.NO_HEALTHY_WORKER
        assert running_of_acme() == 0, "what was never started has taken nothing"


async def test_tokens_are_taken_by_estimate_and_settled_by_what_was_used() -> None:
    async with running() as h:
        publish(h, replace(ACME, tokens_per_minute=60_000))
        left = lambda: h.service.quotas.core.tokens_left("tenants/acme")  # noqa: E731
        answer = asyncio.create_task(collect(call(h, *bearer(ACME_KEY), max_tokens=20)))
        dispatch = await h.admitted()
        taken = left()
        assert taken is not None
        assert 60_000 - 40 < taken < 60_000 - 20
        await finish(h, dispatch, tokens=5, prompt=3)
        await answer
        after = left()
        assert after is not None
        assert 60_000 - 8 <= after <= 60_000
        publish(h, replace(ACME, tokens_per_minute=30))
        answer = asyncio.create_task(collect(call(h, *bearer(ACME_KEY), max_tokens=20)))
        dispatch = await h.admitted()
        await finish(h, dispatch, tokens=90, prompt=10)
        await answer
        found = await refused(h, *bearer(ACME_KEY), max_tokens=20)
        assert found.metadata["quota"] == "tokensPerMinute"
        assert found.retry_after_s is not None
        assert found.retry_after_s > 60, "the debt is waited for"


async def test_a_router_enforces_its_share_of_the_fleet() -> None:
    async with running() as h:
        publish(h, replace(ACME, concurrency=4))
        await h.scheduler.send(load=sp.LoadReport(routers=4))
        await until(lambda: h.service.admission.routers == 4)
        answer = asyncio.create_task(collect(call(h, *bearer(ACME_KEY))))
        dispatch = await h.admitted()
        assert (await refused(h, *bearer(ACME_KEY))).metadata["quota"] == "concurrency"
        await finish(h, dispatch)
        assert kinds((await answer)[0])[-1] == "terminal"


async def test_tenants_are_counted_the_busiest_by_name() -> None:
    async with running(tenant_labels_max=1) as h:
        publish(h, replace(ACME, requests_per_minute=1), OTHER)
        await served(h, *bearer(ACME_KEY))
        await served(h, *bearer(OTHER_KEY))
        await refused(h, *bearer(ACME_KEY))
        value = h.metrics.registry.get_sample_value
        assert value("headrace_router_tenant_requests_total", {"tenant": "tenants/acme"}) == 1
        assert value("headrace_router_tenant_requests_total", {"tenant": "other"}) == 1
        tokens = {"tenant": "tenants/acme", "count": "prompt"}
        assert value("headrace_router_tenant_tokens_total", tokens) == 3
        refusals = {"tenant": "tenants/acme", "quota": "requestsPerMinute"}
        assert value("headrace_router_tenant_refused_total", refusals) == 1


async def test_what_the_service_refuses_before_it_begins_is_no_use_and_what_the_caller_gives_up_is() -> None:
    overloaded = status.to_proto(Failure(Reason.OVERLOADED, "full"))
    async with running() as h:
        publish(h, replace(ACME, requests_per_minute=1))
        for _ in range(2):
            answer = asyncio.create_task(collect(call(h, *bearer(ACME_KEY))))
            dispatch = await h.dispatched()
            await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_REJECTED, error=overloaded)
            assert failure((await answer)[1]).reason is Reason.OVERLOADED
        given_up = call(h, *bearer(ACME_KEY))
        dispatch = await h.dispatched()
        given_up.cancel()
        await soon(h.scheduler.cancels)
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        await until(lambda: h.service.quotas.core.running("tenants/acme") == 0)
        assert (await refused(h, *bearer(ACME_KEY))).metadata["quota"] == "requestsPerMinute"


async def test_a_tenant_that_floods_a_router_leaves_room_for_others() -> None:
    async with running(requests_max=10) as h:
        publish(h, replace(ACME, weight=1), OTHER)
        calls = [call(h, *bearer(OTHER_KEY))]
        dispatches = [await h.dispatched()]
        for _ in range(7):
            calls.append(call(h, *bearer(ACME_KEY)))
            dispatches.append(await h.dispatched())
        found = await refused(h, *bearer(ACME_KEY))
        assert (found.metadata["bound"], found.metadata["of"]) == ("share", "requests")
        assert found.metadata["tenantCurrent"] == "7"
        assert "tenants/" not in str(found.metadata), "nobody is told of others"
        calls.append(call(h, *bearer(OTHER_KEY)))
        dispatches.append(await h.dispatched())
        for dispatch in dispatches:
            await finish(h, dispatch)
        await asyncio.gather(*(collect(one) for one in calls))
        assert h.service.admission.core.held() == (0, 0)
        assert h.metrics.registry.get_sample_value(
            "headrace_router_admission_refused_total", {"bound": "share", "priority": "standard"}
        )
