"""What a stream tells, as frozen values: the messages of headrace.api.inference.v1 without their wire.

Accepted, Delta, Notice, Terminal    in that order, Terminal once and last
Answer                               all of it together; in part, where a request did not complete
RequestInfo                          the record of a request, for whoever has its name
"""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headrace.control.errors import Failure
from headrace.control.event_log import Retention
from headrace.control.priority import Priority
from headrace.control.resources import Effort


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
    CONTINUED = "continued"
    """The worker was lost after output, and another one goes on behind it; only with recovery="continue"."""
    UNKNOWN = "unknown"
    """A kind of a newer service."""


class Exactness(enum.Enum):
    """What output is that another worker continued."""

    EXACT = "exact"
    """Greedy: what follows is what would have followed, up to the rounding of the engine."""
    APPROXIMATE = "approximate"
    """Sampled: the draws from here on are others than those that were lost."""


class AttemptCause(enum.Enum):
    """Why an attempt was made."""

    FIRST = "first"
    RETRY = "retry"
    HEDGE = "hedge"
    CONTINUATION = "continuation"
    UNKNOWN = "unknown"
    """A cause of a newer service."""


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
    effective_priority: Priority | None = None
    """The priority in force; None where the service did not say."""


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
    exactness: Exactness | None = None
    """For CONTINUED: what the output from here on is."""


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
class AttemptRecord:
    """What became of one attempt."""

    attempt: int
    replica: str
    cause: AttemptCause
    finish_reason: FinishReason | None
    """INTERRUPTED where its worker was lost, CANCELLED where it lost a hedge."""
    usage: Usage
    """As far as its worker could still tell."""
    delivered: bool
    """Whether output of it was delivered."""


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
    attempt_records: tuple[AttemptRecord, ...] = ()
    """Each attempt, in order; `usage` is their sum, the prompt counted once."""


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
