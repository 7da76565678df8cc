"""Generate over the wire: numbered events, one end, truthful statuses, no waste."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.control.resources import Alias, AliasTarget
from headrace.rpc import status
from router.harness import DEADLINE_S, REVISION, collect, failure, kinds, running


async def test_a_whole_answer() -> None:
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate(max_tokens=9)))
        dispatch = await h.dispatched()
        assert (dispatch.revision, dispatch.replica, dispatch.epoch) == (REVISION.name, "replicas/r0", 40)
        assert dispatch.generate.prompt == "hello"
        assert dispatch.generate.max_tokens == 9
        assert dispatch.generate.sampling.HasField("temperature"), "the revision's defaults are filled in"
        assert 8 < dispatch.remaining.ToTimedelta().total_seconds() < DEADLINE_S + 0.2
        await h.scheduler.admit(dispatch.attempt)
        await h.scheduler.deltas(dispatch.attempt, "Grüß", " Gott")
        await h.scheduler.end(
            dispatch.attempt,
            stop=pb.StopMatch(eos_token_id=7),
            usage=pb.Usage(prompt_tokens=3, cached_prompt_tokens=1, generated_tokens=3),
        )
        events, error = await answer
    assert error is None
    assert kinds(events)[0] == "accepted"
    assert kinds(events)[-1] == "terminal"
    accepted, terminal = events[0].accepted, events[-1].terminal
    assert (accepted.revision, accepted.replica, accepted.attempt) == (REVISION.name, "replicas/r0", 1)
    assert (accepted.snapshot_version, accepted.prompt_tokens, accepted.cached_prompt_tokens) == (5, 3, 1)
    assert "".join(event.delta.text for event in events) == "Grüß Gott"
    assert [i for event in events for i in event.delta.token_ids] == [1, 2]
    assert terminal.finish_reason == pb.FINISH_REASON_STOP
    assert terminal.stop.eos_token_id == 7
    usage = terminal.usage
    assert (usage.prompt_tokens, usage.generated_tokens, usage.sent_tokens) == (3, 3, 2)
    assert terminal.timing.HasField("time_to_first_token")


async def test_output_that_waits_together_travels_together() -> None:
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        assert not dispatch.generate.HasField("max_tokens")
        assert dispatch.output_tokens_max == 32
        await h.scheduler.admit(dispatch.attempt)
        await h.scheduler.deltas(dispatch.attempt, *"abcdefgh")
        await h.scheduler.end(dispatch.attempt, usage=pb.Usage(generated_tokens=8))
        events, error = await answer
    assert error is None
    assert kinds(events) == ["accepted", "delta", "terminal"]
    assert events[1].delta.text == "abcdefgh"
    assert h.metrics.writes == 3


@pytest.mark.parametrize(
    ("reason", "failed", "code"),
    [
        (pb.FINISH_REASON_FAILED, Failure(Reason.ENGINE_FAILED, "x"), grpc.StatusCode.INTERNAL),
        (pb.FINISH_REASON_DEADLINE_EXCEEDED, None, grpc.StatusCode.DEADLINE_EXCEEDED),
        (pb.FINISH_REASON_INTERRUPTED, None, grpc.StatusCode.ABORTED),
        (pb.FINISH_REASON_DRAINED, None, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_the_status_mirrors_the_terminal_event(
    reason: int, failed: Failure | None, code: grpc.StatusCode
) -> None:
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        await h.scheduler.admit(dispatch.attempt)
        await h.scheduler.deltas(dispatch.attempt, "a")
        await h.scheduler.end(dispatch.attempt, reason, error=status.to_proto(failed) if failed else None)
        events, error = await answer
    assert events[-1].terminal.finish_reason == reason
    assert error is not None
    assert error.code() is code
    in_event = status.from_proto(events[-1].terminal.error)
    assert in_event.reason is failure(error).reason
    assert in_event.message == failure(error).message


async def test_a_refusal_before_admission_is_a_plain_status_without_events() -> None:
    refusal = Failure(Reason.CONTEXT_LENGTH_EXCEEDED, "Too long.", field="prompt", metadata={"limitTokens": "64"})
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_REJECTED, error=status.to_proto(refusal))
        events, error = await answer
    assert events == []
    assert failure(error).reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert failure(error).field == "prompt"
    assert failure(error).metadata["limitTokens"] == "64"


async def test_a_worker_lost_before_output_is_retried_elsewhere_and_the_client_is_told() -> None:
    lost = status.to_proto(Failure(Reason.WORKER_LOST_BEFORE_OUTPUT, "Lost."))
    async with running(replicas=2) as h:
        answer = asyncio.create_task(collect(h.generate()))
        first = await h.dispatched()
        await h.scheduler.admit(first.attempt)
        await h.scheduler.end(first.attempt, pb.FINISH_REASON_FAILED, error=lost)
        second = await h.dispatched()
        assert second.attempt != first.attempt
        assert {first.replica, second.replica} == {"replicas/r0", "replicas/r1"}
        await h.scheduler.deltas(first.attempt, "late")
        await h.scheduler.admit(second.attempt)
        await h.scheduler.deltas(second.attempt, "good")
        await h.scheduler.end(second.attempt, usage=pb.Usage(generated_tokens=1))
        events, error = await answer
        late = sum(link.late_messages for link in h.routes.links)
    assert error is None
    assert kinds(events) == ["accepted", "notice", "delta", "terminal"]
    assert events[1].notice.kind == pb.Notice.KIND_RETRIED
    assert events[2].delta.text == "good", "nothing of the old attempt"
    assert events[3].terminal.attempts == 2
    assert late == 1


async def test_a_worker_lost_after_output_is_never_retried() -> None:
    async with running(replicas=2) as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        await h.scheduler.admit(dispatch.attempt)
        await h.scheduler.deltas(dispatch.attempt, "a", "b")
        while h.metrics.writes < 2:
            await asyncio.sleep(0)
        h.scheduler.cut()
        events, error = await answer
        assert h.scheduler.dispatches.empty()
    assert events[-1].terminal.finish_reason == pb.FINISH_REASON_INTERRUPTED
    assert error is not None
    assert error.code() is grpc.StatusCode.ABORTED
    assert failure(error).metadata["outputTokens"] == "2"
    assert events[-1].terminal.usage.sent_tokens == 2


async def test_nobody_else_to_try_tells_the_first_failure() -> None:
    draining = status.to_proto(Failure(Reason.DRAINING, "The worker drains."))
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_REJECTED, error=draining)
        events, error = await answer
    assert events == []
    assert failure(error).reason is Reason.DRAINING


async def test_attempts_are_bounded() -> None:
    lost = status.to_proto(Failure(Reason.WORKER_LOST_BEFORE_OUTPUT, "Lost."))
    async with running(replicas=4, attempts_max=2) as h:
        answer = asyncio.create_task(collect(h.generate()))
        for _ in range(2):
            dispatch = await h.dispatched()
            await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_FAILED, error=lost)
        _events, error = await answer
        assert h.scheduler.dispatches.empty()
    assert failure(error).reason is Reason.WORKER_LOST_BEFORE_OUTPUT


async def test_a_client_that_cancels_ends_the_attempt() -> None:
    async with running() as h:
        call = h.generate()
        reading = asyncio.create_task(call.read())
        dispatch = await h.dispatched()
        await h.scheduler.admit(dispatch.attempt)
        await reading
        call.cancel()
        async with asyncio.timeout(DEADLINE_S):
            cancel = await h.scheduler.cancels.get()
        assert (cancel.attempt, cancel.cause) == (dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        assert h.routes.in_flight == {"replicas/r0": 1}, "not free before the engine says so"
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_CANCELLED)
        async with asyncio.timeout(DEADLINE_S):
            while h.routes.in_flight:
                await asyncio.sleep(0)
        assert len(h.service.sessions) == 0
        assert h.service.sessions.resources.references == 0


async def test_a_deadline_reaches_the_engine_before_the_client_gives_up() -> None:
    async with running() as h:
        call = h.stub.Generate(pb.GenerateRequest(model="chat", prompt="x"), timeout=0.3)
        answer = asyncio.create_task(collect(call))
        dispatch = await h.dispatched()
        assert dispatch.remaining.ToTimedelta().total_seconds() < 0.28
        _events, error = await answer
        assert error is not None
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(DEADLINE_S):
            cancel = await h.scheduler.cancels.get()
        assert cancel.cause == pb.FINISH_REASON_DEADLINE_EXCEEDED


@pytest.mark.parametrize("begun", [False, True], ids=["before any event", "after output"])
async def test_a_caller_without_a_deadline_is_not_left_waiting_by_a_scheduler_that_hangs(begun: bool) -> None:
    async with running(deadline_s_default=0.3) as h:
        answer = asyncio.create_task(collect(h.stub.Generate(pb.GenerateRequest(model="chat", prompt="x"))))
        dispatch = await h.dispatched()
        if begun:
            await h.scheduler.admit(dispatch.attempt)
            await h.scheduler.deltas(dispatch.attempt, "a")
        async with asyncio.timeout(DEADLINE_S):
            events, error = await answer
            cancel = await h.scheduler.cancels.get()
        assert (cancel.attempt, cancel.cause) == (dispatch.attempt, pb.FINISH_REASON_DEADLINE_EXCEEDED)
        assert h.routes.in_flight == {"replicas/r0": 1}, "not free before the engine says so"
    assert failure(error).reason is Reason.DEADLINE_EXCEEDED
    assert kinds(events) == (["accepted", "delta", "terminal"] if begun else [])
    if begun:
        assert events[-1].terminal.finish_reason == pb.FINISH_REASON_DEADLINE_EXCEEDED


async def test_credit_follows_what_the_transport_takes() -> None:
    async with running(credit_window_tokens=8) as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        assert dispatch.credit_limit == 8
        await h.scheduler.admit(dispatch.attempt)
        await h.scheduler.deltas(dispatch.attempt, *"abcd")
        async with asyncio.timeout(DEADLINE_S):
            credit = await h.scheduler.credits.get()
        assert (credit.attempt, credit.limit) == (dispatch.attempt, 12)
        await h.scheduler.end(dispatch.attempt)
        await answer


async def test_requests_are_bounded() -> None:
    async with running(requests_max=1) as h:
        first = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        _events, error = await collect(h.generate())
        assert failure(error).reason is Reason.OVERLOADED
        assert failure(error).retry_after_s is not None
        await h.scheduler.end(dispatch.attempt)
        await first


async def test_a_drain_refuses_new_work_finishes_what_runs_and_ends_the_rest_as_drained() -> None:
    async with running() as h:
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        await h.scheduler.admit(dispatch.attempt)
        draining = asyncio.create_task(h.service.drain(0.05))
        async with asyncio.timeout(DEADLINE_S):
            cancel = await h.scheduler.cancels.get()
        _events, error = await collect(h.generate())
        assert failure(error).reason is Reason.DRAINING
        await h.scheduler.end(cancel.attempt, pb.FINISH_REASON_CANCELLED)
        events, error = await answer
        await draining
    assert events[-1].terminal.finish_reason == pb.FINISH_REASON_DRAINED
    assert failure(error).reason is Reason.DRAINING


_CHOICE = {"choice": {"strings": ["yes", "no"]}}


async def test_a_guide_goes_with_every_attempt_to_one_that_can_follow_it() -> None:
    async with running(replicas=3) as h:
        before = h.routes.snapshot
        assert before is not None
        able, *others = before.replicas
        plain = tuple(replace(one, guided=frozenset()) for one in others)
        h.routes.apply(replace(before, version=6, replicas=(able, *plain)))
        for _ in range(4):
            call = h.generate(guided_decoding=_CHOICE)
            dispatch = await h.admitted()
            assert dispatch.replica == able.name
            assert list(dispatch.generate.guided_decoding.choice.strings) == ["yes", "no"]
            await h.scheduler.end(dispatch.attempt)
            await collect(call)


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"model": "nope"}, Reason.MODEL_NOT_FOUND, "model"),
        ({"prompt": ""}, Reason.INVALID_REQUEST, "prompt"),
        ({"prompt": "x" * 200_000}, Reason.REQUEST_TOO_LARGE, "prompt"),
        ({"max_tokens": 33}, Reason.INVALID_REQUEST, "max_tokens"),
        ({"sampling": {"temperature": -1.0}}, Reason.INVALID_REQUEST, "sampling.temperature"),
        ({"sampling": {"top_p": float("nan")}}, Reason.INVALID_REQUEST, "sampling.top_p"),
        ({"stop": {"strings": ["x"] * 10_000}}, Reason.INVALID_REQUEST, "stop.strings"),
        ({"priority": 99}, Reason.INVALID_REQUEST, "priority"),
        ({"recovery": 99}, Reason.INVALID_REQUEST, "recovery"),
        ({"affinity_key": "x" * 129}, Reason.INVALID_REQUEST, "affinity_key"),
        ({"idempotency_key": "a\nb"}, Reason.INVALID_REQUEST, "idempotency_key"),
        ({"reasoning_effort": 99}, Reason.INVALID_REQUEST, "reasoning_effort"),
        ({"reasoning_effort": pb.REASONING_EFFORT_HIGH}, Reason.EFFORT_UNSUPPORTED, "reasoning_effort"),
        ({"guided_decoding": {}}, Reason.INVALID_REQUEST, "guided_decoding"),
        ({"guided_decoding": {"json_schema": "{"}}, Reason.INVALID_REQUEST, "guided_decoding.json_schema"),
        ({"guided_decoding": {"json_object": False}}, Reason.INVALID_REQUEST, "guided_decoding.json_object"),
        ({"guided_decoding": {"choice": {}}}, Reason.INVALID_REQUEST, "guided_decoding.choice.strings"),
        ({"guided_decoding": _CHOICE, "recovery": pb.RECOVERY_CONTINUE}, Reason.INVALID_REQUEST, "recovery"),
        ({"guided_decoding": _CHOICE, "stop": {"ignore_eos": True}}, Reason.INVALID_REQUEST, "stop.ignore_eos"),
        ({"guided_decoding": {"regex": "a"}}, Reason.GUIDED_DECODING_UNSUPPORTED, "guided_decoding.regex"),
    ],
)
async def test_bad_input_names_its_field_and_never_reaches_a_scheduler(
    changes: dict[str, Any], reason: Reason, field: str
) -> None:
    async with running() as h:
        events, error = await collect(h.generate(**changes))
        assert h.scheduler.dispatches.empty()
    assert events == []
    assert (failure(error).reason, failure(error).field) == (reason, field)


async def test_an_alias_that_moves_to_a_revision_that_loads_takes_nothing_away() -> None:
    async with running() as h:
        before = h.routes.snapshot
        assert before is not None
        successor = replace(REVISION, execution=replace(REVISION.execution, slots=5))
        old = (AliasTarget(REVISION.name, 1),)
        moved = (Alias("aliases/chat", (AliasTarget(successor.name, 1),), last_good=old),)
        h.routes.apply(replace(before, version=6, revisions=(REVISION, successor), aliases=moved))
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.admitted()
        assert dispatch.revision == REVISION.name
        await h.scheduler.end(dispatch.attempt)
        events, error = await answer
    assert error is None
    assert events[0].accepted.revision == REVISION.name
