"""Events and records of the public API from the wire, as the frozen values of `headrace.client.events`."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration

from headrace.adapters.route_codec import EFFORTS
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.events import (
    Accepted,
    Alternative,
    AttemptCause,
    AttemptRecord,
    Delta,
    Event,
    Exactness,
    FinishReason,
    Notice,
    NoticeKind,
    RequestInfo,
    RequestState,
    StopMatch,
    Terminal,
    Timing,
    TokenLogprob,
    Usage,
)
from headrace.control.event_log import Retention
from headrace.control.priority import Priority
from headrace.control.resources import Effort
from headrace.rpc import status

_FINISH: Mapping[int, FinishReason] = {
    number: FinishReason[name.removeprefix("FINISH_REASON_")] for name, number in pb.FinishReason.items() if number
}
_NOTICE: Mapping[int, NoticeKind] = {
    number: NoticeKind[name.removeprefix("KIND_")] for name, number in pb.Notice.Kind.items() if number
}
_STATE: Mapping[int, RequestState] = {
    number: RequestState[name.removeprefix("STATE_")] for name, number in pb.Request.State.items() if number
}
_EXACTNESS: Mapping[int, Exactness] = {
    number: Exactness[name.removeprefix("EXACTNESS_")] for name, number in pb.Notice.Exactness.items() if number
}
_CAUSE: Mapping[int, AttemptCause] = {
    number: AttemptCause[name.removeprefix("CAUSE_")] for name, number in pb.AttemptRecord.Cause.items() if number
}
_PRIORITY: Mapping[int, Priority] = {int(priority): priority for priority in Priority}
EFFORT_OF: Mapping[int, Effort] = {number: effort for effort, number in EFFORTS.items()}


def event_from_proto(message: pb.GenerateEvent) -> Event | None:
    """Decode an event; None for a kind that only a newer service knows."""
    decode = _DECODERS.get(message.WhichOneof("event") or "")
    return decode(message) if decode is not None else None


def request_from_proto(message: pb.Request) -> RequestInfo:
    """Decode the record of a request."""
    received = message.receive_time.ToDatetime(datetime.UTC) if message.HasField("receive_time") else None
    return RequestInfo(
        name=message.name,
        state=_STATE.get(message.state, RequestState.UNKNOWN),
        version=message.version,
        revision=message.revision,
        replica=message.replica,
        attempts=message.attempts,
        last_sequence=message.last_sequence,
        attached=message.attached,
        finish_reason=_FINISH.get(message.finish_reason, FinishReason.UNKNOWN) if message.finish_reason else None,
        failure=status.from_proto(message.error) if message.HasField("error") else None,
        usage=_usage(message.usage),
        timing=_timing(message.timing),
        receive_time=received,
    )


def _accepted(message: pb.GenerateEvent) -> Accepted:
    body = message.accepted
    return Accepted(
        sequence=message.sequence,
        request=message.request,
        revision=body.revision,
        replica=body.replica,
        attempt=body.attempt,
        requested_effort=EFFORT_OF.get(body.requested_effort),
        default_effort=EFFORT_OF.get(body.default_effort),
        effective_effort=EFFORT_OF.get(body.effective_effort),
        snapshot_version=body.snapshot_version,
        prompt_tokens=body.prompt_tokens,
        cached_prompt_tokens=body.cached_prompt_tokens,
        window_tokens=body.window_tokens,
        retention=_retention(body.retention) if body.HasField("retention") else None,
        effective_priority=_PRIORITY.get(body.effective_priority),
    )


def _retention(body: pb.Retention) -> Retention:
    return Retention(body.events_max, body.bytes_max, _seconds(body.window))


def _delta(message: pb.GenerateEvent) -> Delta:
    body = message.delta
    logprobs = tuple(map(_logprob, body.logprobs)) if body.logprobs else ()
    return Delta(message.sequence, body.text, tuple(body.token_ids), logprobs)


def _logprob(entry: pb.TokenLogprob) -> TokenLogprob:
    alternatives = tuple(Alternative(a.token_id, a.logprob) for a in entry.alternatives)
    return TokenLogprob(entry.token_id, entry.logprob, alternatives)


def _notice(message: pb.GenerateEvent) -> Notice:
    body = message.notice
    kind = _NOTICE.get(body.kind, NoticeKind.UNKNOWN)
    return Notice(message.sequence, kind, body.message, body.attempt, _EXACTNESS.get(body.exactness))


def _terminal(message: pb.GenerateEvent) -> Terminal:
    body = message.terminal
    return Terminal(
        sequence=message.sequence,
        finish_reason=_FINISH.get(body.finish_reason, FinishReason.UNKNOWN),
        stop=_stop(body.stop),
        usage=_usage(body.usage),
        attempts=body.attempts,
        timing=_timing(body.timing),
        failure=status.from_proto(body.error) if body.HasField("error") else None,
        attempt_records=tuple(map(_attempt, body.attempt_records)),
    )


def _attempt(record: pb.AttemptRecord) -> AttemptRecord:
    return AttemptRecord(
        attempt=record.attempt,
        replica=record.replica,
        cause=_CAUSE.get(record.cause, AttemptCause.UNKNOWN),
        finish_reason=_FINISH.get(record.finish_reason, FinishReason.UNKNOWN) if record.finish_reason else None,
        usage=_usage(record.usage),
        delivered=record.delivered,
    )


def _stop(match: pb.StopMatch) -> StopMatch | None:
    kind = match.WhichOneof("match")
    if kind == "eos_token_id":
        return StopMatch("eos", match.eos_token_id)
    if kind == "token_id":
        return StopMatch("token", match.token_id)
    return StopMatch("string", match.string) if kind == "string" else None


def _usage(usage: pb.Usage) -> Usage:
    return Usage(*(getattr(usage, name) for name in Usage.__slots__))


def _timing(timing: pb.Timing) -> Timing:
    return Timing(
        **{
            f"{field.name}_s": _seconds(duration)
            for field, duration in timing.ListFields()
            if f"{field.name}_s" in _TIMES
        }
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


_TIMES = frozenset(Timing.__slots__)
_DECODERS: Mapping[str, Callable[[Any], Event]] = {
    "accepted": _accepted,
    "delta": _delta,
    "notice": _notice,
    "terminal": _terminal,
}
