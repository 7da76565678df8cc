"""What can go wrong for a caller, by what the caller should do about it.

    HeadraceError
    ├── RequestError             change the request; the same one will fail again
    │   ├── InvalidRequest       `violations` name each field that is wrong
    │   ├── NotFound             no such model, or no such request
    │   ├── NotAllowed           no key that is known, or one that may not do this
    │   └── KeyReused            the idempotency key was used for a request with other content
    ├── TryLater                 nothing was lost: send it again, `retry_after_s` says when
    │   ├── Overloaded           the service sheds load
    │   │   ├── QuotaExceeded    your own limit is used up; `quota` names it
    │   │   └── Throttled        not sent: this client's own requests were refused too often of late
    │   └── Unavailable          no connection, or nothing can serve it now
    ├── Incomplete               it began and did not finish; `answer` holds what arrived
    │   ├── Cancelled            you asked for it
    │   ├── DeadlineExceeded     allow more time or ask for less
    │   ├── SlowConsumer         read the stream as it comes
    │   ├── TakenOver            another call reads it now, by resume()
    │   ├── Detached             you left it running by detach()
    │   ├── Interrupted          output had arrived and then the worker was lost: decide what to do with it
    │   └── OriginLost           it was in a Router that is gone: decide about another run, under a new key
    └── ServiceError             report it, with `metadata`
        └── ProtocolError        the service broke its own contract
            └── SequenceGap      an event is missing or came twice

gRPC's own exceptions never leave the client; they are the `__cause__` where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.client.events import Answer
from headrace.control.errors import RULES, Failure, Reason, Violation
from headrace.control.errors import InvalidRequest as InvalidRequestFailure


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """A limit that is used up."""

    subject: str
    """Whose it is ("tenants/acme")."""
    description: str
    metric: str = ""
    """What is counted, where the service says it."""
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known about a failure, for a program."""

    code: str = ""
    """Name of the gRPC status code; "" where no call was made."""
    reason: Reason | None = None
    """The service's stable name for it; None where the transport failed, or an answer made no sense."""
    field: str = ""
    """Path of the request field at fault ("sampling.top_p"), or "" if none is."""
    violations: tuple[Violation, ...] = ()
    """Every field at fault."""
    metadata: Mapping[str, str] | None = None
    """Facts with their units in the keys ("limitTokens")."""
    retry_after_s: float | None = None
    """When trying again makes sense, seconds; None means that waiting does not help."""
    quota: tuple[QuotaViolation, ...] = ()
    """Every limit that is used up."""


_NOTHING = Facts()


class HeadraceError(Exception):
    """A request did not complete.

    Args:
        message: one sentence: what happened and what to do.
        facts: see Facts; its fields are this exception's.
    """

    def __init__(self, message: str, facts: Facts = _NOTHING) -> None:
        super().__init__(message)
        self.message = message
        self.code = facts.code
        self.reason = facts.reason
        self.field = facts.field
        self.violations = facts.violations
        self.metadata: Mapping[str, str] = facts.metadata or {}
        self.retry_after_s = facts.retry_after_s
        self.quota = facts.quota
        self.answer: Answer | None = None
        """What had arrived, with usage if the service still told it; None if no call was made."""
        self.calls = 0
        """Calls that the client made for the request."""


class RequestError(HeadraceError):
    """Change the request; the same one will fail again."""


class InvalidRequest(RequestError):
    """Fields of the request are wrong; `violations` name them."""


class NotFound(RequestError):
    """What the request names does not exist."""


class NotAllowed(RequestError):
    """The caller is not known to the service, or may not do this."""


class KeyReused(RequestError):
    """The idempotency key was used before, for a request with other content."""


class TryLater(HeadraceError):
    """Nothing was lost: send it again, after `retry_after_s` if that is set."""


class Overloaded(TryLater):
    """The service sheds load."""


class QuotaExceeded(Overloaded):
    """The caller's own limit is used up; `quota` names it."""


class Throttled(Overloaded):
    """Nothing was sent: too many of this client's requests were refused of late. Switched off by `throttle=None`."""


class Unavailable(TryLater):
    """There is no connection, or nothing that can serve the request now."""


class Incomplete(HeadraceError):
    """The request began and did not finish; `answer` holds what arrived."""


class Cancelled(Incomplete):
    """The caller asked for it: by cancel(), by closing the client, or at the service."""


class DeadlineExceeded(Incomplete):
    """The request took longer than `timeout_s`, or than the service lets one run."""


class SlowConsumer(Incomplete):
    """The stream was not read for too long."""


class TakenOver(Incomplete):
    """Another call has resumed the stream and reads it now."""


class Detached(Incomplete):
    """The stream was left by detach(); the request runs on."""


class Interrupted(Incomplete):
    """The worker was lost after output had arrived, or the connection was and could not be resumed."""


class OriginLost(Incomplete):
    """The request with this idempotency key, or this name, was in a Router that is gone; nobody can tell its end."""


class ServiceError(HeadraceError):
    """The service failed; report it, with `metadata`."""


class ProtocolError(ServiceError):
    """The service broke its own contract."""


class SequenceGap(ProtocolError):
    """An event is missing or came twice."""


_BY_REASON: Mapping[Reason, type[HeadraceError]] = {
    Reason.INVALID_REQUEST: InvalidRequest,
    Reason.CONTEXT_LENGTH_EXCEEDED: InvalidRequest,
    Reason.REQUEST_TOO_LARGE: InvalidRequest,
    Reason.CHAT_TEMPLATE_MISSING: InvalidRequest,
    Reason.EFFORT_UNSUPPORTED: InvalidRequest,
    Reason.GUIDED_DECODING_UNSUPPORTED: InvalidRequest,
    Reason.MODEL_NOT_FOUND: NotFound,
    Reason.NOT_FOUND: NotFound,
    Reason.ALREADY_EXISTS: RequestError,
    Reason.ETAG_MISMATCH: RequestError,
    Reason.MODEL_LOADING: Unavailable,
    Reason.NO_HEALTHY_WORKER: Unavailable,
    Reason.OVERLOADED: Overloaded,
    Reason.DRAINING: Unavailable,
    Reason.NO_SNAPSHOT: Unavailable,
    Reason.STALE_EPOCH: Unavailable,
    Reason.WORKER_LOST_BEFORE_OUTPUT: Unavailable,
    Reason.STREAM_INTERRUPTED: Interrupted,
    Reason.CLIENT_CANCELLED: Cancelled,
    Reason.DEADLINE_EXCEEDED: DeadlineExceeded,
    Reason.SLOW_CONSUMER: SlowConsumer,
    Reason.ENGINE_FAILED: ServiceError,
    Reason.SEQUENCE_GAP: SequenceGap,
    Reason.STORE_UNAVAILABLE: Unavailable,
    Reason.INTERNAL: ServiceError,
    Reason.QUEUE_TIMEOUT: Overloaded,
    Reason.EXECUTION_TIMEOUT: DeadlineExceeded,
    Reason.CLIENT_DISCONNECTED: Cancelled,
    Reason.NOT_RESUMABLE: RequestError,
    Reason.EVENTS_EXPIRED: RequestError,
    Reason.STREAM_TAKEN_OVER: TakenOver,
    Reason.RESOURCE_IN_USE: RequestError,
    Reason.SNAPSHOT_TOO_OLD: Unavailable,
    Reason.REVOKED: RequestError,
    Reason.UNAUTHENTICATED: NotAllowed,
    Reason.PERMISSION_DENIED: NotAllowed,
    Reason.QUOTA_EXCEEDED: QuotaExceeded,
    Reason.DEADLINE_UNMEETABLE: Overloaded,
    Reason.IDEMPOTENCY_KEY_REUSED: KeyReused,
    Reason.IDEMPOTENCY_ORIGIN_LOST: OriginLost,
    Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE: Unavailable,
}

_BY_CODE: Mapping[str, type[HeadraceError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "NOT_FOUND": NotFound,
    "UNAUTHENTICATED": NotAllowed,
    "PERMISSION_DENIED": NotAllowed,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "ABORTED": Interrupted,
}
"""For statuses that carry no reason: from the transport, a proxy, or a server that is not Headrace."""


def from_failure(failure: Failure, *, output: bool, quota: tuple[QuotaViolation, ...] = ()) -> HeadraceError:
    """Build the exception for what the service said.

    Args:
        failure: what it said.
        quota: limits that its status names.
        output: whether output had arrived; then to try again is no longer free, and only the caller can decide it.
    """
    if isinstance(failure, InvalidRequestFailure):
        violations = failure.violations
    else:
        violations = (Violation(failure.field, failure.message),) if failure.field else ()
    facts = Facts(
        code=RULES[failure.reason].code,
        reason=failure.reason,
        field=failure.field,
        violations=violations,
        metadata=failure.metadata,
        retry_after_s=failure.retry_after_s,
        quota=quota,
    )
    return _after_output(_BY_REASON[failure.reason], output)(failure.message, facts)


def from_code(code: str, details: str, *, output: bool) -> HeadraceError:
    """Build the exception for a status that carries no reason of ours."""
    kind = _after_output(_BY_CODE.get(code, ServiceError), output)
    return kind(f"{code}: {details or 'no details'}", Facts(code=code))


def _after_output(kind: type[HeadraceError], output: bool) -> type[HeadraceError]:
    return Interrupted if output and issubclass(kind, TryLater) else kind
