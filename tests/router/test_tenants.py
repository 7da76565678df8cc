"""Whose call it is, and what it may do: over real gRPC, with a Scheduler that the test is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Reason
from headrace.control.priority import Priority
from headrace.control.revocation import Revocation
from headrace.control.tenants import ANONYMOUS, ApiKey, Tenant, key_digest
from router.harness import DEADLINE_S, REVISION, Harness, collect, failure, running, soon

ACME_KEY, OTHER_KEY, OLD_KEY = "hr_acme-secret", "hr_other-secret", "hr_old-secret"


def api_key(name: str, secret: str, expire_time_ms: int = 0) -> ApiKey:
    return ApiKey(name, key_digest(secret), 1, expire_time_ms)


ACME = Tenant(
    "tenants/acme",
    keys=(api_key("tenants/acme/keys/k", ACME_KEY), api_key("tenants/acme/keys/old", OLD_KEY, 1000)),
)
OTHER = Tenant("tenants/other", keys=(api_key("tenants/other/keys/k", OTHER_KEY),))


def publish(h: Harness, *tenants: Tenant, revoked: tuple[Revocation, ...] = ()) -> None:
    """Swap in a snapshot with these tenants and revocations, as the Router does."""
    before = h.routes.snapshot
    assert before is not None
    after = replace(before, version=before.version + 1, tenants=tenants, revocations=revoked)
    h.routes.apply(after)
    h.service.sessions.end_revoked(after)


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


def call(h: Harness, *metadata: tuple[str, str], **fields: Any) -> Any:
    request = pb.GenerateRequest(**{"model": "chat", "prompt": "hello", **fields})
    return h.stub.Generate(request, timeout=DEADLINE_S, metadata=metadata)


async def refused(h: Harness, *metadata: tuple[str, str], **fields: Any) -> Any:
    events, error = await collect(call(h, *metadata, **fields))
    assert events == []
    return failure(error)


async def finish(h: Harness, dispatch: sp.Dispatch, tokens: int = 1, prompt: int = 3) -> None:
    usage = pb.Usage(prompt_tokens=prompt, generated_tokens=tokens)
    await h.scheduler.end(dispatch.attempt, stop=pb.StopMatch(eos_token_id=7), usage=usage)


async def served(h: Harness, *metadata: tuple[str, str], **fields: Any) -> tuple[sp.Dispatch, list[pb.GenerateEvent]]:
    """A whole request: what the Scheduler got, and what the client did."""
    answer = asyncio.create_task(collect(call(h, *metadata, **fields)))
    dispatch = await h.admitted()
    await finish(h, dispatch)
    events, error = await answer
    assert error is None
    return dispatch, events


# Identity


async def test_a_key_is_its_tenant_and_its_scheduler_is_told() -> None:
    async with running() as h:
        publish(h, ACME, OTHER)
        for secret, tenant in ((ACME_KEY, "tenants/acme"), (OTHER_KEY, "tenants/other")):
            dispatch, _ = await served(h, *bearer(secret))
            assert dispatch.tenant == tenant
        dispatch, _ = await served(h, ("authorization", f"bearer {ACME_KEY}"))
        assert dispatch.tenant == "tenants/acme", "the scheme's case does not matter"


@pytest.mark.parametrize("authentication", ["open", "required"])
@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (bearer("hr_unknown"), "not known"),
        (bearer(OLD_KEY), "expired"),
        (bearer(ACME_KEY + "x"), "not known"),
        ((("authorization", "Basic dXNlcjpwYXNz"),), "must be `Bearer KEY`"),
        ((("authorization", "Bearer "),), "must be `Bearer KEY`"),
        (bearer("x" * 600), "must be `Bearer KEY`"),
        (bearer(ACME_KEY) + bearer(OTHER_KEY), "once"),
    ],
)
async def test_a_key_that_is_sent_must_be_good(
    authentication: str, metadata: tuple[tuple[str, str], ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(authentication=authentication) as h:
        publish(h, ACME)
        found = await refused(h, *metadata)
        assert h.scheduler.dispatches.empty()
    assert found.reason is Reason.UNAUTHENTICATED
    assert words in found.message
    seen = "".join(capfd.readouterr()) + found.message + str(found.metadata)
    assert not any(value.removeprefix("Bearer ").strip() in seen for _, value in metadata if len(value) > 7)


async def test_without_credentials_a_call_is_anonymous_or_refused_whatever_it_asks() -> None:
    async with running() as h:
        dispatch, events = await served(h, priority=pb.PRIORITY_CRITICAL)
        assert dispatch.tenant == ANONYMOUS
        assert events[0].accepted.effective_priority == pb.PRIORITY_CRITICAL, "nobody set a ceiling"
        publish(h, Tenant(ANONYMOUS, concurrency=1))
        answer = asyncio.create_task(collect(call(h)))
        dispatch = await h.admitted()
        assert (await refused(h)).metadata["tenant"] == ANONYMOUS
        await finish(h, dispatch)
        await answer
    async with running(authentication="required") as h:
        publish(h, ACME)
        assert (await refused(h)).reason is Reason.UNAUTHENTICATED
        interactive = h.stub.GenerateInteractive(timeout=DEADLINE_S)
        assert failure((await collect(interactive))[1]).reason is Reason.UNAUTHENTICATED
        name = "requests/0"
        for ask in (
            h.stub.GetRequest(pb.GetRequestRequest(request=name)),
            h.stub.CancelRequest(pb.CancelRequestRequest(request=name)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask
            assert failure(caught.value).reason is Reason.UNAUTHENTICATED
        resume = h.stub.ResumeGenerate(pb.ResumeGenerateRequest(request=name))
        assert failure((await collect(resume))[1]).reason is Reason.UNAUTHENTICATED
        assert (await served(h, *bearer(ACME_KEY)))[0].tenant == "tenants/acme"


async def test_a_trusted_proxy_names_the_tenant() -> None:
    async with running(tenant_metadata="x-tenant", authentication="required") as h:
        publish(h, ACME)
        assert (await served(h, ("x-tenant", "acme")))[0].tenant == "tenants/acme"
        assert (await served(h, ("x-tenant", "tenants/acme")))[0].tenant == "tenants/acme"
        assert (await served(h, *bearer(ACME_KEY)))[0].tenant == "tenants/acme"
        for said in ("none", "", "x" * 64):
            assert (await refused(h, ("x-tenant", said))).reason is Reason.UNAUTHENTICATED
        assert (await refused(h, ("x-tenant", "acme"), ("x-tenant", "other"))).reason is Reason.UNAUTHENTICATED
        assert (await refused(h)).reason is Reason.UNAUTHENTICATED
    async with running(tenant_metadata="x-tenant") as h:
        assert (await served(h, ("x-tenant", "Org 7")))[0].tenant == "tenants/Org 7"


async def test_a_request_is_its_tenants_alone() -> None:
    async with running() as h:
        publish(h, ACME, OTHER)
        answer = call(h, *bearer(ACME_KEY))
        dispatch = await h.admitted()
        name = (await answer.read()).request
        for secret, fine in ((ACME_KEY, True), (OTHER_KEY, False)):
            ask = h.stub.GetRequest(pb.GetRequestRequest(request=name), metadata=bearer(secret))
            if fine:
                assert (await ask).name == name
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask
            assert failure(caught.value).reason is Reason.NOT_FOUND
        await finish(h, dispatch)
        await collect(answer)


async def test_a_revoked_or_deleted_key_is_refused_from_the_next_snapshot_on() -> None:
    async with running() as h:
        publish(h, ACME)
        running_call = asyncio.create_task(collect(call(h, *bearer(ACME_KEY))))
        dispatch = await h.admitted()
        publish(h, ACME, revoked=(Revocation("tenants/acme/keys/k", "stolen"),))
        found = await refused(h, *bearer(ACME_KEY))
        assert (found.reason, found.metadata["key"]) == (Reason.UNAUTHENTICATED, "tenants/acme/keys/k")
        await finish(h, dispatch)
        assert (await running_call)[1] is None, "what runs goes on"
        publish(h, ACME)
        await served(h, *bearer(ACME_KEY))
        publish(h, replace(ACME, keys=()))
        assert (await refused(h, *bearer(ACME_KEY))).reason is Reason.UNAUTHENTICATED


async def test_what_runs_with_a_revoked_key_is_ended_if_the_revocation_says_so() -> None:
    async with running() as h:
        publish(h, ACME, OTHER)
        mine, other = (asyncio.create_task(collect(call(h, *bearer(key)))) for key in (ACME_KEY, OTHER_KEY))
        dispatches = {d.tenant: d for d in [await h.admitted(), await h.admitted()]}
        publish(h, ACME, OTHER, revoked=(Revocation("tenants/acme/keys/k", "stolen", end_running=True),))
        cancel = await soon(h.scheduler.cancels)
        assert cancel.attempt == dispatches["tenants/acme"].attempt
        await h.scheduler.end(cancel.attempt, pb.FINISH_REASON_CANCELLED)
        assert failure((await mine)[1]).reason is Reason.REVOKED
        await finish(h, dispatches["tenants/other"])
        assert (await other)[1] is None


@pytest.mark.parametrize("past_hard_age", ["refuse", "serve"])
async def test_past_the_hard_age_credentials_start_nothing(past_hard_age: str) -> None:
    async with running(past_hard_age=past_hard_age) as h:
        publish(h, ACME)
        answer = call(h, *bearer(ACME_KEY))
        dispatch = await h.admitted()
        name = (await answer.read()).request
        h.routes.is_too_old = lambda: True
        assert (await refused(h, *bearer(ACME_KEY))).reason is Reason.SNAPSHOT_TOO_OLD
        if past_hard_age == "serve":
            await served(h)
        ask = pb.CancelRequestRequest(request=name)
        cancelled = asyncio.create_task(_awaited(h.stub.CancelRequest(ask, metadata=bearer(ACME_KEY))))
        assert (await soon(h.scheduler.cancels)).attempt == dispatch.attempt, "what runs may be cancelled"
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        assert (await cancelled).name == name
        await collect(answer)


async def _awaited(call: Any) -> Any:
    return await call


async def test_health_and_reflection_can_be_closed() -> None:
    async def watch(metadata: Any) -> Any:
        stream = health_pb2_grpc.HealthStub(h.channel).Watch(health_pb2.HealthCheckRequest(), metadata=metadata)
        try:
            return await stream.read()
        finally:
            stream.cancel()

    async def reflect(metadata: Any) -> Any:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = reflection_pb2_grpc.ServerReflectionStub(h.channel).ServerReflectionInfo(
            iter([ask]), metadata=metadata
        )
        return await stream.read()

    async def check(metadata: Any) -> Any:
        return await health_pb2_grpc.HealthStub(h.channel).Check(health_pb2.HealthCheckRequest(), metadata=metadata)

    for authentication in ("open", "required"):
        async with running(public_health=False, authentication=authentication) as h:
            publish(h, ACME)
            for ask in (check, watch, reflect):
                assert await ask(bearer(ACME_KEY)) is not None
                for metadata in ((), bearer("hr_unknown")):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await ask(metadata)
                    assert failure(caught.value).reason is Reason.UNAUTHENTICATED
    async with running(authentication="required") as h:
        for ask in (check, watch, reflect):
            assert await ask(()) is not None, "open unless the settings close it"


# What a tenant may do


@pytest.mark.parametrize(
    ("asked", "effective"),
    [
        (pb.PRIORITY_UNSPECIFIED, pb.PRIORITY_SHEDDABLE),
        (pb.PRIORITY_CRITICAL, pb.PRIORITY_BATCH),
        (pb.PRIORITY_SHEDDABLE, pb.PRIORITY_SHEDDABLE),
    ],
)
async def test_the_priority_is_at_most_the_ceiling_and_told(asked: pb.Priority, effective: pb.Priority) -> None:
    async with running() as h:
        publish(h, replace(ACME, default_priority=Priority.SHEDDABLE, priority_ceiling=Priority.BATCH, weight=7))
        dispatch, events = await served(h, *bearer(ACME_KEY), priority=asked)
        assert dispatch.tenant_weight == 7
        assert (dispatch.priority, events[0].accepted.effective_priority) == (effective, effective)
        found = await refused(h, *bearer(ACME_KEY), priority=9)
        assert (found.reason, found.field) == (Reason.INVALID_REQUEST, "priority")


async def test_a_model_that_is_not_allowed_is_refused_before_anything_starts() -> None:
    async with running() as h:
        publish(h, replace(ACME, allowed_models=("aliases/chat",)))
        await served(h, *bearer(ACME_KEY))
        found = await refused(h, *bearer(ACME_KEY), model=REVISION.name)
        assert (found.reason, found.metadata["resourceName"]) == (Reason.PERMISSION_DENIED, REVISION.name)
        assert (await refused(h, *bearer(ACME_KEY), model="none")).reason is Reason.MODEL_NOT_FOUND


async def test_the_output_of_one_request_is_bounded() -> None:
    async with running() as h:
        publish(h, replace(ACME, max_output_tokens=8))
        assert (await served(h, *bearer(ACME_KEY)))[0].output_tokens_max == 8
        assert (await served(h, *bearer(ACME_KEY), max_tokens=8))[0].generate.max_tokens == 8
        found = await refused(h, *bearer(ACME_KEY), max_tokens=9)
        assert (found.reason, found.field) == (Reason.INVALID_REQUEST, "max_tokens")
