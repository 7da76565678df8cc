"""The words between a request's machine and its shell: what comes next, how an attempt ended, what is fixed.

The machine itself is headrace.control.request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace.control.errors import Reason
from headrace.control.lifecycle import Finish


class Step(enum.Enum):
    """What comes next for the reader."""

    WAIT = "wait"
    ACCEPTED = "accepted"
    RETRIED = "retried"
    CONTINUED = "continued"
    PAUSED = "paused"
    DELTA = "delta"
    RETRY = "retry"
    """Nothing to tell: dispatch another attempt, or say that nobody can take it (`give_up`). While its time has not
    come, `next` says WAIT and `retry_at` when to look again."""
    TERMINAL = "terminal"
    REFUSED = "refused"
    """It ended before anything was told: a plain status, no event."""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended, as its Scheduler said."""

    finish: Finish
    reason: Reason | None = None
    is_retryable: bool = False
    """Whether another worker may do better."""
    is_free: bool = False
    """Whether it costs no attempt: the worker drains and had not begun."""
    push_back_s: float | None = None
    """Seconds for which the server asks not to be tried again; None: it names none of its own."""
    release_s: float | None = None
    """From the engine's stop to the confirmation that all is free, as far as the Scheduler saw it."""
    output_tokens: int | None = None
    """Tokens that the engine handed out; None where nobody knows."""

    @property
    def is_for_load(self) -> bool:
        """Whether it was refused for what waits there, so that another replica may take it.

        A deadline that would not be met without any wait names no delay: it is met nowhere.
        """
        if self.reason is Reason.DEADLINE_UNMEETABLE:
            return self.push_back_s is not None
        return self.reason is Reason.OVERLOADED


@dataclass(frozen=True, slots=True)
class Terms:
    """What is fixed for a request when it is received."""

    attempts_max: int
    slow_consumer_s: float
    """Longest that generation, or a write, waits for the reader."""
    resume_s: float | None = None
    """How long it runs on without a reader; None: not at all."""
    known_max: int = 0
    """Output tokens up to which another worker goes on when its own is lost; 0: none does."""
