"""What a stream tells, as frozen values: the messages of headrace.api.inference.v1 without their wire.

Accepted, Delta, Notice, Terminal    in that order, Terminal once and last
Answer                               all of it together; in part, where a request did not complete
RequestInfo                          the record of a request, for whoever has its name
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from google.protobuf.duration_pb2 import Duration

from headrace.adapters.route_codec import EFFORTS
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure
from headrace.control.event_log import Retention
from headrace.control.resources import Effort
from headrace.rpc import status


class FinishReason(enum.Enum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    SLOW_CONSUMER = "slow_consumer"
    INTERRUPTED = "interrupted"
    DRAINED = "drained"
    REJECTED = "rejected"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """A reason of a newer service."""


class RequestState(enum.Enum):
    """Where a request is in its life."""

    RECEIVED = "received"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    TERMINAL = "terminal"
    UNKNOWN = "unknown"
    """A state of a newer service."""


class NoticeKind(enum.Enum):
    """What a notice is about."""

    RETRIED = "retried"
    PAUSED = "paused"
    DEGRADED = "degraded"
    UNKNOWN = "unknown"
    """A kind of a newer service."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What was fixed before the first token. After a retry there is another one."""

    sequence: int
    request: str
    """Name of the request, for questions to the operators."""
    revision: str
    replica: str
    attempt: int
    requested_effort: Effort | None
    default_effort: Effort | None
    effective_effort: Effort | None
    snapshot_version: int
    prompt_tokens: int
    cached_prompt_tokens: int
    window_tokens: int = 0
    """Tokens that may be generated ahead of what was read; 0 where the service did not say."""
    retention: Retention | None = None
    """How much of the stream can be resumed, and for how long; None: nothing."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have stood there, with its natural-log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was, and the likeliest ones in its place."""

    token_id: int
    logprob: float
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """More output; the texts of all deltas together are the answer."""

    sequence: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """News that changes nothing about the output."""

    sequence: int
    kind: NoticeKind
    message: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What ended the answer: an end-of-generation token, a token id or a string of the request."""

    kind: Literal["eos", "token", "string"]
    value: int | str


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; generated, sent and acknowledged never stand for one another."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    proposed_tokens: int = 0
    generated_tokens: int = 0
    sent_tokens: int = 0
    acknowledged_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, seconds, as the services measured it; None where it did not happen."""

    queue_s: float | None = None
    time_to_first_token_s: float | None = None
    time_per_output_token_s: float | None = None
    total_s: float | None = None
    cancel_to_stopped_s: float | None = None
    """From when its end was asked for to when the engine stopped computing it."""
    cancel_to_freed_s: float | None = None
    """From when its end was asked for to the confirmation that all it held is free."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """The one end of a request."""

    sequence: int
    finish_reason: FinishReason
    stop: StopMatch | None
    usage: Usage
    attempts: int
    timing: Timing
    failure: Failure | None
    """Why, when the end is not STOP or LENGTH; it is raised after this event."""


Event = Accepted | Delta | Notice | Terminal


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or as much of it as arrived: then `finish_reason` may be None and `usage` and `timing` too."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop: StopMatch | None
    usage: Usage | None
    timing: Timing | None
    request: str
    revision: str
    replica: str
    attempts: int
    """Attempts that the service made, 0 where it did not say."""
    effective_effort: Effort | None


class ResumePoint(NamedTuple):
    """Where to go on with a stream: `client.resume(*stream.resume_point)`."""

    request: str
    sequence: int
    """Of the last event that was read."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The record of a request that runs, or ended lately."""

    name: str
    state: RequestState
    version: int
    """Raised by each change of the record."""
    revision: str
    replica: str
    """Of the latest attempt; "" before the first."""
    attempts: int
    last_sequence: int
    """Of the latest event."""
    attached: bool
    """Whether a call reads it now."""
    finish_reason: FinishReason | None
    """None while it runs."""
    failure: Failure | None
    """Why, when the end is not STOP or LENGTH."""
    usage: Usage
    """By the newest counts."""
    timing: Timing
    receive_time: datetime.datetime | None
    """By the service's clock, UTC."""


_FINISH: Mapping[int, FinishReason] = {
    number: FinishReason[name.removeprefix("FINISH_REASON_")] for name, number in pb.FinishReason.items() if number
}
_NOTICE: Mapping[int, NoticeKind] = {
    number: NoticeKind[name.removeprefix("KIND_")] for name, number in pb.Notice.Kind.items() if number
}
_STATE: Mapping[int, RequestState] = {
    number: RequestState[name.removeprefix("STATE_")] for name, number in pb.Request.State.items() if number
}
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
    return Notice(message.sequence, _NOTICE.get(body.kind, NoticeKind.UNKNOWN), body.message, body.attempt)


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
