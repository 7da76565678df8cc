"""Every way in which a call can fail, as data: the one table that codes, details and docs come from.

    Failure                 what is raised, carried in events, and mapped to a status at the edge
      reason  -> RULES      code, blame, whether and where a retry makes sense, what to do

Sans-io: nothing here knows gRPC; codes are their names. `headrace.rpc.status` turns a Failure into a
status with google.rpc details, `docs/errors.md` is generated from RULES, and a test walks both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DOMAIN = "headrace"


class Reason(enum.Enum):
    """Stable names of failures; the same as in headrace.api.errors.v1.Reason, without its prefix."""

    INVALID_REQUEST = "INVALID_REQUEST"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    CHAT_TEMPLATE_MISSING = "CHAT_TEMPLATE_MISSING"
    EFFORT_UNSUPPORTED = "EFFORT_UNSUPPORTED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    ETAG_MISMATCH = "ETAG_MISMATCH"
    MODEL_LOADING = "MODEL_LOADING"
    NO_HEALTHY_WORKER = "NO_HEALTHY_WORKER"
    OVERLOADED = "OVERLOADED"
    DRAINING = "DRAINING"
    NO_SNAPSHOT = "NO_SNAPSHOT"
    STALE_EPOCH = "STALE_EPOCH"
    WORKER_LOST_BEFORE_OUTPUT = "WORKER_LOST_BEFORE_OUTPUT"
    STREAM_INTERRUPTED = "STREAM_INTERRUPTED"
    CLIENT_CANCELLED = "CLIENT_CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    SLOW_CONSUMER = "SLOW_CONSUMER"
    ENGINE_FAILED = "ENGINE_FAILED"
    SEQUENCE_GAP = "SEQUENCE_GAP"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    INTERNAL = "INTERNAL"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    EXECUTION_TIMEOUT = "EXECUTION_TIMEOUT"
    CLIENT_DISCONNECTED = "CLIENT_DISCONNECTED"
    NOT_RESUMABLE = "NOT_RESUMABLE"
    EVENTS_EXPIRED = "EVENTS_EXPIRED"
    STREAM_TAKEN_OVER = "STREAM_TAKEN_OVER"
    RESOURCE_IN_USE = "RESOURCE_IN_USE"
    SNAPSHOT_TOO_OLD = "SNAPSHOT_TOO_OLD"
    REVOKED = "REVOKED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    DEADLINE_UNMEETABLE = "DEADLINE_UNMEETABLE"
    IDEMPOTENCY_KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
    IDEMPOTENCY_ORIGIN_LOST = "IDEMPOTENCY_ORIGIN_LOST"
    IDEMPOTENCY_ORIGIN_UNREACHABLE = "IDEMPOTENCY_ORIGIN_UNREACHABLE"
    GUIDED_DECODING_UNSUPPORTED = "GUIDED_DECODING_UNSUPPORTED"


class Blame(enum.Enum):
    """Who has to change something."""

    CALLER = "caller"
    SYSTEM = "system"
    BUG = "bug"


class Retry(enum.Enum):
    """Who may try again."""

    NOBODY = "nobody"
    ROUTER = "the Router, on another worker, before any output"
    CLIENT = "the client, after the delay that the error names"
    APPLICATION = "only the application, as a new request"


@dataclass(frozen=True, slots=True)
class Rule:
    """What one reason means on the wire and for whoever sees it."""

    code: str
    """Name of the gRPC status code."""
    blame: Blame
    retry: Retry
    advice: str
    """What to do, one sentence, for docs/errors.md."""
    retry_after_s: float | None = None
    """Default of the delay in RetryInfo, seconds; None where waiting does not help."""


_C, _S, _B = Blame.CALLER, Blame.SYSTEM, Blame.BUG

RULES: Mapping[Reason, Rule] = MappingProxyType(
    {
        Reason.INVALID_REQUEST: Rule("INVALID_ARGUMENT", _C, Retry.NOBODY, "Correct the field that BadRequest names."),
        Reason.CONTEXT_LENGTH_EXCEEDED: Rule(
            "INVALID_ARGUMENT",
            _C,
            Retry.NOBODY,
            "Shorten the prompt or lower max_tokens; metadata has both numbers.",
        ),
        Reason.REQUEST_TOO_LARGE: Rule("INVALID_ARGUMENT", _C, Retry.NOBODY, "Send less; metadata names the limit."),
        Reason.CHAT_TEMPLATE_MISSING: Rule(
            "INVALID_ARGUMENT",
            _C,
            Retry.NOBODY,
            "Send `prompt`, or register the artifact with a chat template.",
        ),
        Reason.EFFORT_UNSUPPORTED: Rule(
            "INVALID_ARGUMENT", _C, Retry.NOBODY, "Leave reasoning_effort unset or ask for a supported one."
        ),
        Reason.GUIDED_DECODING_UNSUPPORTED: Rule(
            "INVALID_ARGUMENT", _C, Retry.NOBODY, "Ask for a kind that metadata names, or for another model."
        ),
        Reason.MODEL_NOT_FOUND: Rule(
            "NOT_FOUND",
            _C,
            Retry.NOBODY,
            "Name a registered alias or revision; `headrace status` lists them.",
        ),
        Reason.NOT_FOUND: Rule("NOT_FOUND", _C, Retry.NOBODY, "Check the resource's name."),
        Reason.ALREADY_EXISTS: Rule(
            "ALREADY_EXISTS", _C, Retry.NOBODY, "Choose another name, or send the same content."
        ),
        Reason.ETAG_MISMATCH: Rule("ABORTED", _C, Retry.APPLICATION, "Read the resource again and repeat the change."),
        Reason.MODEL_LOADING: Rule("UNAVAILABLE", _S, Retry.CLIENT, "Wait for the model to load.", 1.0),
        Reason.NO_HEALTHY_WORKER: Rule(
            "UNAVAILABLE", _S, Retry.CLIENT, "Try again shortly; operators look at `headrace status`.", 1.0
        ),
        Reason.OVERLOADED: Rule("RESOURCE_EXHAUSTED", _S, Retry.CLIENT, "Send less, or later.", 0.5),
        Reason.DRAINING: Rule("UNAVAILABLE", _S, Retry.ROUTER, "Try another instance at once.", 0.0),
        Reason.NO_SNAPSHOT: Rule(
            "UNAVAILABLE", _S, Retry.CLIENT, "The Router has just started, or has never reached etcd.", 1.0
        ),
        Reason.STALE_EPOCH: Rule(
            "FAILED_PRECONDITION", _S, Retry.ROUTER, "The Router picks again; never shown to clients."
        ),
        Reason.WORKER_LOST_BEFORE_OUTPUT: Rule(
            "UNAVAILABLE", _S, Retry.ROUTER, "Nothing was sent; send the request again.", 0.5
        ),
        Reason.STREAM_INTERRUPTED: Rule(
            "ABORTED",
            _S,
            Retry.APPLICATION,
            "Output was sent and then the worker was lost; decide what to do with it.",
        ),
        Reason.CLIENT_CANCELLED: Rule("CANCELLED", _C, Retry.NOBODY, "The caller asked for it."),
        Reason.DEADLINE_EXCEEDED: Rule("DEADLINE_EXCEEDED", _C, Retry.CLIENT, "Ask for less, or allow more time."),
        Reason.SLOW_CONSUMER: Rule("RESOURCE_EXHAUSTED", _C, Retry.CLIENT, "Read the stream as it comes.", 0.5),
        Reason.ENGINE_FAILED: Rule(
            "INTERNAL", _S, Retry.APPLICATION, "Operators find the error id in the worker's log."
        ),
        Reason.SEQUENCE_GAP: Rule("DATA_LOSS", _B, Retry.NOBODY, "A hop lost a message: report it."),
        Reason.STORE_UNAVAILABLE: Rule("UNAVAILABLE", _S, Retry.CLIENT, "etcd does not answer; serving goes on.", 1.0),
        Reason.INTERNAL: Rule("INTERNAL", _B, Retry.NOBODY, "Operators find the error id in the service's log."),
        Reason.QUEUE_TIMEOUT: Rule(
            "RESOURCE_EXHAUSTED", _S, Retry.CLIENT, "All slots were busy for too long; send less, or later.", 1.0
        ),
        Reason.EXECUTION_TIMEOUT: Rule(
            "DEADLINE_EXCEEDED", _S, Retry.APPLICATION, "Ask for less output; operators set how long a request may run."
        ),
        Reason.CLIENT_DISCONNECTED: Rule(
            "CANCELLED", _C, Retry.NOBODY, "Resume within the window that `accepted` states."
        ),
        Reason.NOT_RESUMABLE: Rule(
            "FAILED_PRECONDITION", _C, Retry.NOBODY, "Ask for on_disconnect CONTINUE when you make the request."
        ),
        Reason.EVENTS_EXPIRED: Rule(
            "OUT_OF_RANGE",
            _C,
            Retry.NOBODY,
            "Resume sooner, or from a later event; metadata has the oldest.",
        ),
        Reason.STREAM_TAKEN_OVER: Rule(
            "ABORTED", _C, Retry.NOBODY, "Nothing: the call that resumed the stream has it."
        ),
        Reason.RESOURCE_IN_USE: Rule(
            "FAILED_PRECONDITION", _C, Retry.NOBODY, "Change or delete first what metadata names in `usedBy`."
        ),
        Reason.SNAPSHOT_TOO_OLD: Rule(
            "UNAVAILABLE", _S, Retry.CLIENT, "Use another Router; this one has not heard etcd for too long.", 1.0
        ),
        Reason.REVOKED: Rule(
            "FAILED_PRECONDITION", _C, Retry.NOBODY, "Name another model; operators see why: `headrace revoke`."
        ),
        Reason.UNAUTHENTICATED: Rule(
            "UNAUTHENTICATED", _C, Retry.NOBODY, "Send metadata `authorization: Bearer KEY`, or a client certificate."
        ),
        Reason.PERMISSION_DENIED: Rule(
            "PERMISSION_DENIED", _C, Retry.NOBODY, "Ask operators: `headrace tenant` shows and sets what is allowed."
        ),
        Reason.QUOTA_EXCEEDED: Rule(
            "RESOURCE_EXHAUSTED", _C, Retry.CLIENT, "Send less, or later; QuotaFailure names the limit.", 1.0
        ),
        Reason.DEADLINE_UNMEETABLE: Rule(
            "RESOURCE_EXHAUSTED", _S, Retry.CLIENT, "Allow more time, ask for less, or send it later.", 1.0
        ),
        Reason.IDEMPOTENCY_KEY_REUSED: Rule(
            "INVALID_ARGUMENT", _C, Retry.NOBODY, "Make a new key for a request with other content."
        ),
        Reason.IDEMPOTENCY_ORIGIN_LOST: Rule(
            "ABORTED", _S, Retry.APPLICATION, "Decide whether to run it again, with a new key."
        ),
        Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE: Rule(
            "UNAVAILABLE", _S, Retry.CLIENT, "Try again, with the same key; nothing is run twice.", 1.0
        ),
    }
)


class Failure(Exception):
    """A failed call, ready to be shown to its caller.

    Args:
        reason: which entry of RULES.
        message: one sentence: what happened and what to do. Never prompt, output or exception text.
        field: path of the request field at fault, or "".
        metadata: facts for a program, lowerCamelCase keys with units.
        retry_after_s: overrides the rule's delay.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.retry_after_s = RULES[reason].retry_after_s if retry_after_s is None else retry_after_s

    @property
    def rule(self) -> Rule:
        """What this reason means."""
        return RULES[self.reason]


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that is wrong."""

    field: str
    description: str


class InvalidRequest(Failure):
    """A request with one or more wrong fields, all named at once."""

    def __init__(self, violations: tuple[Violation, ...], reason: Reason = Reason.INVALID_REQUEST) -> None:
        assert violations
        text = "; ".join(f"{v.field}: {v.description}" for v in violations[:3])
        more = f"; and {len(violations) - 3} more" if len(violations) > 3 else ""
        super().__init__(reason, f"{text}{more}.", field=violations[0].field)
        self.violations = violations
