"""One request's life in the Router, from receipt to exactly one end.

Sans-io. The Router feeds in what happened and carries out what is returned.

    RECEIVED -> QUEUED -> PREFILL -> DECODE -> TERMINAL
                  ^          |          |
                  |-- retry -'          |         (a retry needs: no output sent yet)
                  '--- continuation ----'         (a continuation needs: output, all of it known)
        every state ------------------> TERMINAL  (the first to end it wins)

Each change raises `version`. What arrives for another attempt than the current one, for another version than that
attempt was made at, or after the end, changes nothing and is counted by the caller as late.

The end is one fact; that the engine has stopped and that its resources are free are two others, each with its time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.control.errors import Reason


class Phase(enum.Enum):
    """Where a request is."""

    RECEIVED = "received"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    TERMINAL = "terminal"


class Finish(enum.Enum):
    """How a request ended; the same as headrace.api.inference.v1.FinishReason."""

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

    @property
    def is_ok(self) -> bool:
        """Whether the answer is whole, and the status OK."""
        return self in (Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS)


FINISH_OF: Mapping[Reason, Finish] = {
    Reason.CLIENT_CANCELLED: Finish.CANCELLED,
    Reason.CLIENT_DISCONNECTED: Finish.CANCELLED,
    Reason.DEADLINE_EXCEEDED: Finish.DEADLINE_EXCEEDED,
    Reason.EXECUTION_TIMEOUT: Finish.DEADLINE_EXCEEDED,
    Reason.QUEUE_TIMEOUT: Finish.REJECTED,
    Reason.SLOW_CONSUMER: Finish.SLOW_CONSUMER,
    Reason.DRAINING: Finish.DRAINED,
    Reason.REVOKED: Finish.FAILED,
}
"""How a request ends that is ended from this side, by cause. Different causes may share an end, never a reason."""


@dataclass(slots=True)
class RequestRecord:
    """The record of one request.

    Invariants: `attempt` names the only attempt whose messages count; `finish` is set once, together with
    TERMINAL; no retry once `sent_tokens` or `first_output_at` says that output has left, only a continuation.
    """

    received_at: float
    """Monotonic seconds, like every time here."""
    phase: Phase = Phase.RECEIVED
    version: int = 0
    attempt: int = 0
    """Token of the current attempt; 0 before the first."""
    attempts: int = 0
    attempts_free: int = 0
    """Of them, those that were refused by a worker that drains: they cost nothing."""
    overloads: int = 0
    """Of them, those that were refused for overload."""
    attempt_version: int = 0
    """`version` when the current attempt was made."""
    admitted_at: float | None = None
    first_output_at: float | None = None
    last_output_at: float | None = None
    output_tokens: int = 0
    """Tokens that arrived here, of all attempts that counted."""
    known_tokens: int = 0
    """Of them, those that the current attempt began with."""
    sent_tokens: int = 0
    """Tokens handed to the transport towards the client."""
    finish: Finish | None = None
    reason: Reason | None = None
    """Why, where it is not a complete answer."""
    asked_at: float | None = None
    """When its end was asked for; the first time counts."""
    stopped_at: float | None = None
    """When the engine stopped computing the last attempt."""
    freed_at: float | None = None
    """When its slot and KV were confirmed free."""
    tried: list[str] = field(default_factory=list)
    """Replicas of the attempts so far."""

    def dispatch(self, attempt: int, replica: str) -> bool:
        """Start an attempt; False, and no change, once output was seen or the request is over."""
        if self.phase is Phase.TERMINAL or self.first_output_at is not None:
            return False
        self._become(Phase.QUEUED)
        self.attempt = attempt
        self.attempt_version = self.version
        self.attempts += 1
        self.admitted_at = None
        self.tried.append(replica)
        return True

    def go_on(self, attempt: int, replica: str) -> bool:
        """Start an attempt behind the output so far; False, and no change, without any or once the request is over.

        `admitted_at` stays the first one: what the engine may work on a request, it may over all continuations.
        """
        if self.phase is Phase.TERMINAL or self.first_output_at is None:
            return False
        self._become(Phase.QUEUED)
        self.attempt = attempt
        self.attempt_version = self.version
        self.attempts += 1
        self.known_tokens = self.output_tokens
        self.tried.append(replica)
        return True

    def beside(self, replica: str) -> int:
        """A second attempt starts while the current one goes on to count; returns the version that is its fence."""
        self.version += 1
        self.attempts += 1
        self.tried.append(replica)
        return self.version

    def switch(self, attempt: int, version: int, admitted_at: float | None) -> None:
        """That second attempt is the one that counts from now on. Only while there is no output."""
        assert self.finish is None
        assert self.first_output_at is None
        self._become(Phase.QUEUED if admitted_at is None else Phase.PREFILL)
        self.attempt, self.attempt_version, self.admitted_at = attempt, version, admitted_at

    def admit(self, attempt: int, version: int, now: float) -> bool:
        """The engine has begun; False if that is late news."""
        if (attempt, version) != (self.attempt, self.attempt_version) or self.phase is not Phase.QUEUED:
            return False
        self._become(Phase.PREFILL)
        if self.admitted_at is None:
            self.admitted_at = now
        return True

    def output(self, attempt: int, tokens: int, now: float) -> bool:
        """Count output; False if it is of an attempt that no longer counts. On the hot path."""
        if attempt != self.attempt or self.phase is Phase.TERMINAL:
            return False
        if self.phase is not Phase.DECODE:
            self._become(Phase.DECODE)
            if self.first_output_at is None:
                self.first_output_at = now
        self.last_output_at = now
        self.output_tokens += tokens
        return True

    def may_retry(self, attempts_max: int) -> bool:
        """Whether another attempt is allowed by what has been seen of this one: no output of its own, for a start."""
        is_fresh = self.phase in (Phase.QUEUED, Phase.PREFILL)
        return is_fresh and self.attempts - self.attempts_free < attempts_max

    def end(self, finish: Finish, reason: Reason | None = None) -> bool:
        """Decide the end: compare-and-set. True for the first caller; the others read `finish`."""
        if self.finish is not None:
            return False
        self._become(Phase.TERMINAL)
        self.finish = finish
        self.reason = reason
        return True

    def time_to_first_token_s(self) -> float | None:
        """Seconds from receipt to the first output; None if there was none."""
        return None if self.first_output_at is None else self.first_output_at - self.received_at

    def time_per_output_token_s(self) -> float | None:
        """Mean seconds between tokens after the first; None below two tokens (not zero: there is no gap)."""
        if self.output_tokens < 2 or self.first_output_at is None or self.last_output_at is None:
            return None
        return (self.last_output_at - self.first_output_at) / (self.output_tokens - 1)

    def _become(self, phase: Phase) -> None:
        self.phase = phase
        self.version += 1
