"""An answer whose worker is lost goes on elsewhere, where its caller asked for that: over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from router.harness import DEADLINE_S, Harness, collect, failure, kinds, running, soon, until

CUT = status.to_proto(Failure(Reason.STREAM_INTERRUPTED, "The worker was lost after output had been sent."))
R = pb.AttemptRecord


def columns(attempt: int, *parts: tuple[list[int], str]) -> sp.Deltas:
    return sp.Deltas(
        attempts=[attempt] * len(parts),
        token_counts=[len(ids) for ids, _ in parts],
        token_ids=[token for ids, _ in parts for token in ids],
        text_lengths=[len(text.encode()) for _, text in parts],
        text="".join(text for _, text in parts).encode(),
    )


async def begin(h: Harness, *parts: tuple[list[int], str], **fields: Any) -> tuple[asyncio.Task[Any], sp.Dispatch]:
    """A request whose first worker has said `parts`, and was lost then: both in one frame, nothing was told yet."""
    answer = asyncio.create_task(collect(h.generate(recovery=pb.RECOVERY_CONTINUE, **fields)))
    dispatch = await h.admitted()
    ended = sp.Ended(
        attempt=dispatch.attempt,
        record_version=dispatch.record_version,
        reason=pb.FINISH_REASON_INTERRUPTED,
        error=CUT,
    )
    await h.scheduler.send(deltas=columns(dispatch.attempt, *parts), ended=[ended])
    return answer, dispatch


async def test_the_next_worker_begins_with_what_is_known_and_the_story_goes_on() -> None:
    async with running(replicas=2, execution_timeout_s=60, ttft_target_s=25) as h:
        answer, first = await begin(h, ([7], "Grü"), ([8, 9], "ße"))
        second = await h.admitted()
        assert list(second.continuation.token_ids) == [7, 8, 9], "also those that were not told yet"
        assert second.continuation.text_bytes == len("Grüße".encode())
        assert not first.HasField("continuation")
        assert second.cause == R.CAUSE_CONTINUATION
        assert second.credit_limit >= first.credit_limit, "counted from the answer's first token"
        assert (second.revision, second.generate) == (first.revision, first.generate)
        assert second.replica != first.replica
        assert 50 < second.execution_timeout.ToTimedelta().total_seconds() < 60
        assert second.queue_timeout.ToTimedelta().total_seconds() == 20, "its own wait"
        await h.scheduler.send(deltas=columns(second.attempt, ([10, 11], " Gott")))
        usage = pb.Usage(prompt_tokens=3, generated_tokens=3, cached_prompt_tokens=2)
        stop = pb.StopMatch(eos_token_id=2)
        await h.scheduler.end(second.attempt, usage=usage, stop=stop, output_tokens=2)
        events, error = await answer
    assert error is None
    assert kinds(events) == ["accepted", "delta", "notice", "delta", "terminal"]
    assert "".join(event.delta.text for event in events) == "Grüße Gott"
    assert [i for event in events for i in event.delta.token_ids] == [7, 8, 9, 10, 11]
    notice = events[2].notice
    assert (notice.kind, notice.attempt, notice.exactness) == (pb.Notice.KIND_CONTINUED, 2, pb.Notice.EXACTNESS_EXACT)
    told = events[-1].terminal
    assert (told.finish_reason, told.stop, told.attempts) == (pb.FINISH_REASON_STOP, stop, 2)
    assert [(a.attempt, a.cause, a.finish_reason, a.delivered, a.replica) for a in told.attempt_records] == [
        (1, R.CAUSE_FIRST, pb.FINISH_REASON_INTERRUPTED, True, first.replica),
        (2, R.CAUSE_CONTINUATION, pb.FINISH_REASON_STOP, True, second.replica),
    ]
    assert [a.usage.generated_tokens for a in told.attempt_records] == [3, 3], "each its own"
    used = told.usage
    assert (used.prompt_tokens, used.generated_tokens, used.sent_tokens) == (3, 6, 5), "the prompt counts once"


@pytest.mark.parametrize(
    ("sampling", "exactness"),
    [
        (pb.SamplingParameters(temperature=0.7, seed=5), pb.Notice.EXACTNESS_APPROXIMATE),
        (pb.SamplingParameters(temperature=0, frequency_penalty=1), pb.Notice.EXACTNESS_EXACT),
        (None, pb.Notice.EXACTNESS_EXACT),
    ],
    ids=["sampled", "greedy with penalties", "the revision's default"],
)
async def test_the_notice_says_whether_what_follows_is_exact(sampling: Any, exactness: int) -> None:
    async with running(replicas=2) as h:
        answer, _ = await begin(h, ([7], "a"), sampling=sampling)
        second = await h.admitted()
        await h.scheduler.end(second.attempt, pb.FINISH_REASON_LENGTH, output_tokens=0)
        events, error = await answer
    assert error is None
    (notice,) = [event.notice for event in events if event.HasField("notice")]
    assert notice.exactness == exactness
    assert kinds(events) == ["accepted", "delta", "notice", "terminal"], "it was complete already"


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"replicas": 2}, {"recovery": pb.RECOVERY_INTERRUPT}),
        ({"replicas": 2}, {"recovery": pb.RECOVERY_UNSPECIFIED}),
        ({"replicas": 2, "continue_tokens_max": 1}, {}),
        ({"replicas": 2, "continue_tokens_max": 0}, {}),
        ({"replicas": 2, "retry_floor": 0}, {}),
        ({"replicas": 2, "attempts_max": 1}, {}),
        ({"replicas": 1}, {}),
    ],
    ids=["interrupt", "by default", "more than is kept", "switched off", "no budget", "no attempt left", "nobody else"],
)
async def test_what_is_not_continued_is_interrupted(settings: dict[str, Any], fields: dict[str, Any]) -> None:
    async with running(**settings) as h:
        request = {"recovery": pb.RECOVERY_CONTINUE, **fields}
        answer = asyncio.create_task(collect(h.generate(**request)))
        dispatch = await h.admitted()
        await h.scheduler.send(deltas=columns(dispatch.attempt, ([1, 2], "ab")))
        await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_INTERRUPTED, error=CUT)
        events, error = await answer
        assert h.scheduler.dispatches.empty()
    assert events[-1].terminal.finish_reason == pb.FINISH_REASON_INTERRUPTED
    assert events[-1].terminal.attempts == 1
    assert isinstance(error, grpc.RpcError)
    assert failure(error).reason is Reason.STREAM_INTERRUPTED


async def test_a_drained_worker_is_left_behind_too() -> None:
    async with running(replicas=2, retry_floor=0) as h:
        answer = asyncio.create_task(collect(h.generate(recovery=pb.RECOVERY_CONTINUE)))
        first = await h.admitted()
        await h.scheduler.send(deltas=columns(first.attempt, ([1], "a")))
        drained = status.to_proto(Failure(Reason.DRAINING, "The worker was drained before the answer was complete."))
        await h.scheduler.end(first.attempt, pb.FINISH_REASON_DRAINED, error=drained, output_tokens=1)
        second = await h.admitted()
        assert list(second.continuation.token_ids) == [1]
        await h.scheduler.end(second.attempt, output_tokens=0)
        events, error = await answer
    assert error is None, "and it costs nothing of the budget"
    assert events[-1].terminal.finish_reason == pb.FINISH_REASON_STOP


async def test_a_refused_continuation_is_tried_elsewhere_and_then_the_loss_is_told() -> None:
    refusal = status.to_proto(Failure(Reason.OVERLOADED, "Too many attempts wait for this replica."))
    async with running(replicas=4) as h:
        answer, _ = await begin(h, ([1, 2], "ab"))
        for _ in range(2):
            again = await h.dispatched()
            assert list(again.continuation.token_ids) == [1, 2]
            await h.scheduler.end(again.attempt, pb.FINISH_REASON_REJECTED, error=refusal)
        events, error = await answer
    assert kinds(events) == ["accepted", "delta", "terminal"], "nobody has continued it, and nobody says so"
    told = events[-1].terminal
    assert (told.finish_reason, told.attempts) == (pb.FINISH_REASON_INTERRUPTED, 3)
    assert failure(error).reason is Reason.STREAM_INTERRUPTED
    assert [a.delivered for a in told.attempt_records] == [True, False, False]


async def test_text_without_a_token_of_its_own_is_told() -> None:
    """What the lost engine had held back of a token that is known."""
    async with running(replicas=2) as h:
        answer, _ = await begin(h, ([1], "a"))
        second = await h.admitted()
        await h.scheduler.send(deltas=columns(second.attempt, ([], "E")))
        await h.scheduler.end(second.attempt, output_tokens=0)
        events, error = await answer
    assert error is None
    assert "".join(event.delta.text for event in events) == "aE"
    assert [i for event in events for i in event.delta.token_ids] == [1]


async def test_a_continued_answer_is_resumed_as_one_story() -> None:
    async with running(replicas=2) as h:
        call = h.generate(recovery=pb.RECOVERY_CONTINUE, on_disconnect=pb.ON_DISCONNECT_CONTINUE)
        first = await h.admitted()
        await h.scheduler.send(deltas=columns(first.attempt, ([1, 2], "ab")))
        read = [await call.read(), await call.read()]
        call.cancel()
        await until(lambda: h.service.sessions.detached == 1)
        await h.scheduler.end(first.attempt, pb.FINISH_REASON_INTERRUPTED, error=CUT)
        second = await h.admitted()  # without a reader
        await h.scheduler.send(deltas=columns(second.attempt, ([3], "c")))
        await h.scheduler.end(second.attempt, output_tokens=1, usage=pb.Usage(generated_tokens=1, prompt_tokens=3))
        resume = pb.ResumeGenerateRequest(request=read[0].request, after_sequence=0)
        events, error = await collect(h.stub.ResumeGenerate(resume, timeout=DEADLINE_S))
        kept = h.service.sessions.find(read[0].request, "tenants/anonymous")
        assert kept._attempts.known is None, "what is only kept for readers needs no tokens"
    assert error is None
    assert kinds(events) == ["accepted", "delta", "notice", "delta", "terminal"]
    assert events[:2] == read
    assert events[-1].terminal.usage.generated_tokens == 3


async def test_credit_goes_on_from_where_the_reader_is() -> None:
    async with running(replicas=2) as h:
        call = await h.interactive(recovery=pb.RECOVERY_CONTINUE, window_tokens=8)
        first = await h.admitted()
        assert first.credit_limit == 8
        await h.scheduler.send(deltas=columns(first.attempt, ([1, 2, 3, 4, 5, 6, 7, 8], "abcdefgh")))
        events = [await call.read(), await call.read()]
        await h.scheduler.end(first.attempt, pb.FINISH_REASON_INTERRUPTED, error=CUT)
        second = await h.admitted()
        assert second.credit_limit == 8, "all of it is unread: it waits"
        await call.write(pb.ClientFrame(acknowledge=pb.Acknowledge(sequence=events[-1].sequence)))
        credit = await soon(h.scheduler.credits)
        assert (credit.attempt, credit.limit) == (second.attempt, 16)
        await h.scheduler.end(second.attempt, output_tokens=0)
        events, error = await collect(call)
    assert error is None
    assert events[-1].terminal.finish_reason == pb.FINISH_REASON_STOP
