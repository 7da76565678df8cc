"""What is revoked is not started, not retried on, and ended if it says so; an old snapshot starts nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Reason
from headrace.control.revocation import Revocation
from router.harness import REVISION, Harness, collect, failure, kinds, running, soon


def revoke(h: Harness, name: str, *, end_running: bool = False) -> None:
    """Swap in a snapshot with this revocation, as the Router does."""
    assert h.routes.snapshot is not None
    revoked = replace(
        h.routes.snapshot, version=h.routes.snapshot.version + 1, revocations=(Revocation(name, "", end_running),)
    )
    h.routes.apply(revoked)
    h.service.sessions.end_revoked(revoked)


@pytest.mark.parametrize("model", ["chat", REVISION.name])
async def test_a_revoked_revision_is_refused_by_either_name(model: str) -> None:
    async with running() as h:
        revoke(h, REVISION.name)
        events, error = await collect(h.generate(model=model))
    assert events == []
    assert failure(error).reason is Reason.REVOKED


async def test_a_revoked_replica_gets_nothing_and_the_other_does() -> None:
    async with running(replicas=2) as h:
        revoke(h, "replicas/r0")
        for _ in range(5):
            call = asyncio.create_task(collect(h.generate()))
            dispatch = await h.admitted()
            assert dispatch.replica == "replicas/r1"
            await h.scheduler.end(dispatch.attempt, usage=pb.Usage(generated_tokens=0))
            await call


@pytest.mark.parametrize("name", [REVISION.name, "replicas/r0"])
async def test_what_runs_is_ended_if_the_revocation_says_so(name: str) -> None:
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.admitted()
        await h.scheduler.deltas(dispatch.attempt, "so far")
        while h.metrics.writes < 2:
            await asyncio.sleep(0)
        revoke(h, name, end_running=True)
        cancel = await soon(h.scheduler.cancels)
        assert cancel.cause == pb.FINISH_REASON_CANCELLED
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        events, error = await answer
    assert kinds(events)[-1] == "terminal"
    assert events[-1].terminal.finish_reason == pb.FINISH_REASON_FAILED
    assert failure(error).reason is Reason.REVOKED


@pytest.mark.parametrize(("name", "end_running"), [(REVISION.name, False), ("replicas/r9", True)])
async def test_what_runs_goes_on_otherwise(name: str, end_running: bool) -> None:
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.admitted()
        revoke(h, name, end_running=end_running)
        await h.scheduler.deltas(dispatch.attempt, "whole")
        await h.scheduler.end(dispatch.attempt, stop=pb.StopMatch(eos_token_id=7), usage=pb.Usage(generated_tokens=1))
        events, error = await answer
    assert error is None
    assert events[-1].terminal.finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(("setting", "refused"), [("refuse", True), ("serve", False)])
async def test_past_the_hard_age_nothing_new_is_started_unless_the_operator_says_so(
    setting: str, refused: bool
) -> None:
    async with running(past_hard_age=setting) as h:
        before = asyncio.create_task(collect(h.generate()))
        first = await h.admitted()
        h.routes.is_too_old = lambda: True
        after = asyncio.create_task(collect(h.generate()))
        if not refused:
            second = await h.admitted()
            await h.scheduler.end(second.attempt, stop=pb.StopMatch(eos_token_id=7))
        _, error = await after
        assert (failure(error).reason if refused else error) is (Reason.SNAPSHOT_TOO_OLD if refused else None)
        await h.scheduler.end(first.attempt, stop=pb.StopMatch(eos_token_id=7))
        assert (await before)[1] is None, "what runs goes on"
