"""What clients are told, built from what is known: pure functions from state to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from headrace.adapters.route_codec import EFFORTS
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.control.attempt_log import Attempted
from headrace.control.errors import Failure, Reason, Retry
from headrace.control.lifecycle import Finish, RequestRecord
from headrace.control.request import AttemptEnd, RequestMachine
from headrace.control.resources import Effort
from headrace.router.plan import Plan
from headrace.rpc import status

FINISH_NUMBER: dict[Finish, Any] = {f: pb.FinishReason.Value(f"FINISH_REASON_{f.name}") for f in Finish}
_FINISH = {number: finish for finish, number in FINISH_NUMBER.items()}

Ends = Mapping[int, scheduler_pb2.Ended]
"""What Schedulers have said of the ends of a request's attempts, by token."""
Logprob = tuple[float, list[tuple[int, float]]]
"""A token's log probability, and the likeliest tokens in its place with theirs."""

_REASON_OF: dict[Finish, Reason] = {
    Finish.CANCELLED: Reason.CLIENT_CANCELLED,
    Finish.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    Finish.SLOW_CONSUMER: Reason.SLOW_CONSUMER,
    Finish.INTERRUPTED: Reason.STREAM_INTERRUPTED,
    Finish.DRAINED: Reason.DRAINING,
    Finish.FAILED: Reason.ENGINE_FAILED,
}
"""Where a Scheduler names none."""
_SENTENCES: dict[Reason, str] = {
    Reason.CLIENT_CANCELLED: "The request was cancelled.",
    Reason.CLIENT_DISCONNECTED: "Nobody read the stream for as long as it may be resumed.",
    Reason.DEADLINE_EXCEEDED: "The deadline passed before the answer was complete.",
    Reason.QUEUE_TIMEOUT: "The request waited too long for a slot; nothing was computed.",
    Reason.EXECUTION_TIMEOUT: "The request ran longer than this service lets one run.",
    Reason.SLOW_CONSUMER: "The stream was not read for too long.",
    Reason.REVOKED: "What it ran on was revoked before the answer was complete.",
    Reason.DRAINING: "The worker was drained before the answer was complete.",
    Reason.SEQUENCE_GAP: "Output was lost on the way here; what was sent cannot be trusted to be whole.",
}


def attempt_end(ended: scheduler_pb2.Ended) -> AttemptEnd:
    """How an attempt ended, as the core understands it; an unknown number is a failure."""
    finish = _FINISH.get(ended.reason, Finish.FAILED)
    failure = status.from_proto(ended.error) if ended.HasField("error") else None
    reason = failure.reason if failure is not None else None
    names_delay = failure is not None and failure.retry_after_s != failure.rule.retry_after_s
    return AttemptEnd(
        finish,
        reason or _REASON_OF.get(finish),
        is_retryable=failure is not None and failure.rule.retry is Retry.ROUTER,
        is_free=reason in (Reason.DRAINING, Reason.STALE_EPOCH),
        push_back_s=failure.retry_after_s if failure is not None and names_delay else None,
        release_s=_seconds(ended.release) if ended.HasField("release") else None,
        output_tokens=ended.output_tokens if ended.HasField("output_tokens") else None,
    )


def lost(machine: RequestMachine, attempt: int) -> scheduler_pb2.Ended:
    """The end of an attempt whose link broke: what became of it is unknown here, and its Scheduler ends it."""
    record = machine.record
    before = record.first_output_at is None or attempt != record.attempt
    failure = (
        Failure(Reason.WORKER_LOST_BEFORE_OUTPUT, "The worker was lost before any output; send the request again.")
        if before
        else interrupted(record.output_tokens)
    )
    return scheduler_pb2.Ended(
        attempt=attempt,
        record_version=machine.version_of(attempt),
        reason=FINISH_NUMBER[Finish.FAILED if before else Finish.INTERRUPTED],
        error=status.to_proto(failure),
    )


def interrupted(tokens: int) -> Failure:
    """The failure of a stream that was cut after `tokens` tokens of output."""
    return Failure(
        Reason.STREAM_INTERRUPTED,
        "The worker was lost after output had been sent; nothing is replayed.",
        metadata={"outputTokens": str(tokens)},
    )


def failure_of(machine: RequestMachine, ended: scheduler_pb2.Ended | None) -> Failure:
    """Why a request did not end well. `ended`: of its last attempt."""
    failure = _failure_of(machine.record, ended)
    if machine.refused_retry:
        failure.metadata = {**failure.metadata, "retry": machine.refused_retry}
    return failure


def _failure_of(record: RequestRecord, ended: scheduler_pb2.Ended | None) -> Failure:
    if ended is not None and ended.HasField("error"):
        said = status.from_proto(ended.error)
        if said.reason is record.reason:
            return said
    if record.finish is Finish.INTERRUPTED:
        return interrupted(record.output_tokens)
    reason = record.reason or Reason.ENGINE_FAILED
    sentence = _SENTENCES.get(reason, "The engine failed on this request.")
    return Failure(reason, sentence, metadata={"outputTokens": str(record.output_tokens)})


def accepted(event: pb.GenerateEvent, plan: Plan, machine: RequestMachine, admitted: scheduler_pb2.Admitted) -> None:
    """Fill in that the engine has begun."""
    told = event.accepted
    told.revision = plan.revision.name
    told.replica = machine.current.replica
    told.attempt = machine.current.number
    fixed(told, plan)
    told.snapshot_version = plan.snapshot.version
    told.prompt_tokens = admitted.prompt_tokens
    told.cached_prompt_tokens = admitted.cached_prompt_tokens
    told.window_tokens = plan.window_tokens
    if plan.retention is not None:
        told.retention.events_max = plan.retention.events_max
        told.retention.bytes_max = plan.retention.bytes_max
        told.retention.window.CopyFrom(_duration(plan.retention.window_s))


def fixed(told: pb.Accepted | pb.Request, plan: Plan) -> None:
    """Fill in the efforts, which never stand for one another, and the priority."""
    told.requested_effort = _effort_number(plan.efforts.requested)
    told.default_effort = _effort_number(plan.efforts.default)
    told.effective_effort = _effort_number(plan.efforts.effective)
    told.effective_priority = plan.generate.priority


def retried(event: pb.GenerateEvent, attempt: int) -> None:
    """Fill in that it began again."""
    event.notice.kind = pb.Notice.KIND_RETRIED
    event.notice.message = "The request started again on another worker; nothing had been sent."
    event.notice.attempt = attempt


def continued(event: pb.GenerateEvent, plan: Plan, attempt: int) -> None:
    """Fill in that another worker goes on."""
    is_greedy = plan.generate.sampling.temperature == 0  # unset, too: the engine's default
    event.notice.kind = pb.Notice.KIND_CONTINUED
    event.notice.message = "The worker was lost; another one goes on behind the last token that was generated."
    event.notice.attempt = attempt
    event.notice.exactness = pb.Notice.EXACTNESS_EXACT if is_greedy else pb.Notice.EXACTNESS_APPROXIMATE


def paused(event: pb.GenerateEvent, attempt: int) -> None:
    """Fill in that generation waits."""
    event.notice.kind = pb.Notice.KIND_PAUSED
    event.notice.message = "Generation waits for this stream to be read."
    event.notice.attempt = attempt


def delta(event: pb.GenerateEvent, text: bytes, token_ids: Sequence[int], logprobs: Sequence[Logprob]) -> None:
    """Fill in output. On the hot path."""
    told = event.delta
    told.text = text.decode("utf-8")
    told.token_ids.extend(token_ids)
    if logprobs:
        for token_id, (logprob, alternatives) in zip(token_ids, logprobs, strict=True):
            entry = told.logprobs.add(token_id=token_id, logprob=logprob)
            for other_id, other_logprob in alternatives:
                entry.alternatives.add(token_id=other_id, logprob=other_logprob)


def terminal(event: pb.GenerateEvent, machine: RequestMachine, ends: Ends, now: float) -> None:
    """Fill in the end. `ends`: what Schedulers have said of each attempt's, by token."""
    record, ended = machine.record, ends.get(machine.record.attempt)
    assert record.finish is not None
    told = event.terminal
    told.finish_reason = FINISH_NUMBER[record.finish]
    told.usage.CopyFrom(usage(machine, ends))
    told.attempts = record.attempts
    told.timing.CopyFrom(timing(record, now))
    told.attempt_records.extend(attempt_record(one, ends.get(one.token)) for one in machine.attempted)
    if ended is not None and ended.HasField("stop") and record.finish is Finish.STOP:
        told.stop.CopyFrom(ended.stop)
    if not record.finish.is_ok:
        told.error.CopyFrom(status.to_proto(failure_of(machine, ended)))


def attempt_record(attempted: Attempted, ended: scheduler_pb2.Ended | None) -> pb.AttemptRecord:
    """What became of one attempt; without a finish reason where that is not known."""
    is_lost = attempted.reason is Reason.WORKER_LOST_BEFORE_OUTPUT
    finish = Finish.INTERRUPTED if is_lost else attempted.finish
    return pb.AttemptRecord(
        attempt=attempted.number,
        replica=attempted.replica,
        cause=int(attempted.cause),  # type: ignore[arg-type]
        finish_reason=FINISH_NUMBER[finish] if finish is not None else None,
        usage=_used(attempted, ended),
        delivered=attempted.is_delivered,
    )


def usage(machine: RequestMachine, ends: Ends) -> pb.Usage:
    """What the request used, over all attempts: generated tokens are summed, the prompt counts once."""
    total = pb.Usage()
    for one in machine.attempted:
        used = _used(one, ends.get(one.token))
        total.proposed_tokens += used.proposed_tokens
        total.generated_tokens += used.generated_tokens
        total.reasoning_tokens += used.reasoning_tokens
        if used.prompt_tokens and (one is machine.current or not total.prompt_tokens):
            total.prompt_tokens, total.cached_prompt_tokens = used.prompt_tokens, used.cached_prompt_tokens
    total.sent_tokens = machine.window.sent
    total.acknowledged_tokens = machine.window.acknowledged
    return total


def _used(attempted: Attempted, ended: scheduler_pb2.Ended | None) -> pb.Usage:
    """What one attempt used, by the engine's count; by ours where the engine was lost, or has not said yet."""
    if ended is not None and ended.HasField("usage"):
        used = pb.Usage()
        used.CopyFrom(ended.usage)
        return used
    return pb.Usage(generated_tokens=attempted.output_tokens)


def timing(record: RequestRecord, now: float) -> pb.Timing:
    """Where the time went."""
    told = pb.Timing(total=_duration(now - record.received_at))
    if record.admitted_at is not None:
        told.queue.CopyFrom(_duration(record.admitted_at - record.received_at))
    ttft_s, tpot_s = record.time_to_first_token_s(), record.time_per_output_token_s()
    if ttft_s is not None:
        told.time_to_first_token.CopyFrom(_duration(ttft_s))
    if tpot_s is not None:
        told.time_per_output_token.CopyFrom(_duration(tpot_s))
    if record.asked_at is not None:
        if record.stopped_at is not None:
            told.cancel_to_stopped.CopyFrom(_duration(record.stopped_at - record.asked_at))
        if record.freed_at is not None:
            told.cancel_to_freed.CopyFrom(_duration(record.freed_at - record.asked_at))
    return told


def _effort_number(effort: Effort | None) -> Any:
    return EFFORTS[effort] if effort is not None else pb.REASONING_EFFORT_UNSPECIFIED


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(max(0, round(seconds * 1e6)))
    return duration
