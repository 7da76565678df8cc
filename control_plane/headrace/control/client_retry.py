"""When a client may send a request again, or go on reading one: once a failure is known, wait how long, or give up.

    attempt fails -> decide_retry(policy, failure, ...)  -> seconds to wait, or None: the failure stands
    stream breaks -> decide_resume(policy, broken, ...)  -> the same

Sans-io: chance comes in as a number. The Router retries, with a budget for the fleet; a client does not multiply that:
it repeats what was refused or did not arrive, before the first event. The one exception needs another Router and an
idempotency key: a Router that is lost before the first output is failed over, once. To resume sends nothing again: the
request ran on, and its reader comes back for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.control.errors import RULES, Reason, Retry


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how patiently.

    Raises:
        ValueError: a number makes no sense.
    """

    attempts_max: int = 3
    """Calls in all, the first included."""
    backoff_first_s: float = 0.05
    """Upper end of the first wait where the service names none; it doubles for each further one."""
    backoff_max_s: float = 1.0
    refusals_max: int = 6
    """Calls beyond `attempts_max` that instances which stop may refuse: they have not begun, so they cost nothing."""
    fails_over: bool = True
    """Whether a request whose Router is lost is taken to another one. For that, each request of a client with several
    Routers gets an idempotency key, which costs its Router a transaction with the store."""

    def __post_init__(self) -> None:
        """Check."""
        if self.attempts_max < 1:
            raise ValueError(f"attempts_max must be 1 or more, got {self.attempts_max}")
        if not 0 <= self.backoff_first_s <= self.backoff_max_s:
            raise ValueError("backoff_first_s must be 0 or more and at most backoff_max_s")


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """How one call failed, and how far it had come."""

    code: str
    """Name of the gRPC status code."""
    reason: Reason | None
    """None where the failure is the transport's own: no service said anything."""
    begun: bool = False
    """Whether any event had arrived: the service had taken the request."""
    output: bool = False
    """Whether any output had arrived."""
    retry_after_s: float | None = None
    """What the service named, seconds."""
    pushback: str | None = None
    """Trailer grpc-retry-pushback-ms as it came."""


def decide_retry(
    policy: RetryPolicy | None,
    failure: AttemptFailure,
    *,
    attempts: int,
    refusals: int = 0,
    remaining_s: float | None,
    jitter: float,
    may_fail_over: bool = False,
) -> float | None:
    """Decide what follows a failed call.

    Args:
        policy: None means never again.
        failure: the latest.
        attempts: calls made so far, 1 or more.
        refusals: how many of them are refusals of a fleet that restarts, `is_refusal`; the latest is one if 1 or more.
        remaining_s: until the request's deadline; None for no deadline.
        jitter: drawn evenly from 0 to 1.
        may_fail_over: whether there is another Router, the request has an idempotency key, and this was not done yet.

    Returns:
        Seconds to wait before the next call, or None if there is to be none. The server's delay is kept exactly; a
        wait that would reach the deadline is not begun, so the caller hears of the real failure now.
    """
    if policy is None or failure.output:
        return None
    if not (_is_retryable(failure, attempts) or (may_fail_over and is_lost(failure))):
        return None
    if attempts - min(refusals, policy.refusals_max) >= policy.attempts_max:
        return None
    wait_s = _named_wait_s(failure)
    if refusals > 1 and (wait_s is None or wait_s == 0):
        # The first instance said "another one, at once", and that one is no better: give them time to come back.
        wait_s = (0.5 + jitter / 2) * min(policy.backoff_max_s, 2 * policy.backoff_first_s * 2 ** min(refusals - 2, 16))
    if wait_s is None:
        # Full jitter: the whole interval, so that clients that failed together do not return together.
        wait_s = jitter * min(policy.backoff_max_s, policy.backoff_first_s * 2 ** (attempts - 1))
    if wait_s < 0 or (remaining_s is not None and wait_s >= remaining_s):
        return None
    return wait_s


def is_refusal(failure: AttemptFailure, *, refusals: int) -> bool:
    """Whether a call was refused by an instance that stops, or, once one has said so, by one that is not there.

    Args:
        failure: the latest.
        refusals: those before it.
    """
    if failure.begun or failure.output:
        return False
    return failure.reason is Reason.DRAINING or (
        refusals > 0 and failure.reason is None and failure.code == "UNAVAILABLE"
    )


def is_lost(failure: AttemptFailure) -> bool:
    """Whether the connection broke off, rather than the service having said anything."""
    return failure.reason is None and failure.code in _BROKEN_CODES


@dataclass(frozen=True, slots=True)
class BrokenStream:
    """How reading a request that can be resumed broke off."""

    code: str
    """Name of the gRPC status code."""
    reason: Reason | None
    """None where the failure is the transport's own: no service said anything."""
    failures: int
    """Calls that failed in a row without an event in between, this one included."""
    broken_s: float
    """Since the first of them, seconds."""
    window_s: float
    """How long the service keeps a request that nobody reads."""
    retry_after_s: float | None = None
    """What the service named, seconds."""
    pushback: str | None = None
    """Trailer grpc-retry-pushback-ms as it came."""


_BROKEN_CODES = frozenset({"UNAVAILABLE", "INTERNAL", "UNKNOWN"})
"""What gRPC calls a lost connection or a reset stream; to ask for the rest is harmless if it was something else."""
_NOT_NOW = frozenset(
    {
        Reason.OVERLOADED,
        Reason.DRAINING,
        Reason.NO_SNAPSHOT,
        Reason.STORE_UNAVAILABLE,
        Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE,
    }
)
"""Refusals of a call that say nothing about the request."""


def is_resumable(code: str, reason: Reason | None) -> bool:
    """Whether a call may have broken off while its request runs on."""
    return code in _BROKEN_CODES if reason is None else reason in _NOT_NOW


def decide_resume(
    policy: RetryPolicy, broken: BrokenStream, *, remaining_s: float | None, jitter: float
) -> float | None:
    """Decide what follows a broken stream. How often is bounded by time alone: the window, and the deadline.

    Args:
        policy: for its backoff.
        broken: the latest.
        remaining_s: until the request's deadline; None for no deadline.
        jitter: drawn evenly from 0 to 1.

    Returns:
        Seconds to wait before the call that goes on, or None if there is to be none.
    """
    if not is_resumable(broken.code, broken.reason):
        return None
    wait_s = _named_wait_s(broken)
    if wait_s is None:
        doublings = min(broken.failures - 1, 32)
        wait_s = jitter * min(policy.backoff_max_s, policy.backoff_first_s * 2**doublings)
    if wait_s < 0 or broken.broken_s + wait_s >= broken.window_s or (remaining_s is not None and wait_s >= remaining_s):
        return None
    return wait_s


def _is_retryable(failure: AttemptFailure, attempts: int) -> bool:
    if failure.begun:
        return False
    if failure.reason is None:
        return failure.code == "UNAVAILABLE"
    if failure.reason is Reason.DEADLINE_EXCEEDED:  # the application may, with a new deadline
        return False
    if failure.reason is Reason.QUOTA_EXCEEDED:  # the limit is the caller's own: as the service says, or not at all
        return attempts == 1 and (failure.retry_after_s is not None or failure.pushback is not None)
    return failure.reason is Reason.DRAINING or RULES[failure.reason].retry is Retry.CLIENT


def _named_wait_s(failure: AttemptFailure | BrokenStream) -> float | None:
    """The wait that the service asks for; negative for "do not", which an unreadable pushback means too (gRFC A6)."""
    if failure.pushback is None:
        return failure.retry_after_s
    try:
        return int(failure.pushback) / 1000
    except ValueError:
        return -1.0
