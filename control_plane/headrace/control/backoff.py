"""When a request whose attempt failed before any output is tried again, and when it is not: the rules, as data.

    DRAINING, STALE_EPOCH    at once; the refused attempt counts as not made
    OVERLOADED               at once, one time, on a replica that is not known to be overloaded
    DEADLINE_UNMEETABLE      the same, where it is a wait that makes it too late
    what the Router retries  after the server's push-back, or else full jitter: 0 to min(1 s, 50 ms * 2^n)
    everything else          never

A push-back is a delay that an error names and that is not its reason's default. It is obeyed to the instant.

Sans-io: clock readings and the source of chance are arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.control.errors import Reason
from headrace.control.lifecycle import RequestRecord
from headrace.control.retry_budget import RetryBudget
from headrace.control.steps import AttemptEnd

BASE_S = 0.05
CAP_S = 1.0
FREE_MAX = 8
"""Attempts of one request that may be refused without being charged; a plan that is that wrong is an error."""
OVERLOADED_S = 0.5
"""How long a replica counts as overloaded that names no delay of its own."""
REMEMBERED_MAX = 4096
"""Replicas whose refusals are remembered."""


def full_jitter_s(failures: int, random: Callable[[], float]) -> float:
    """Seconds to wait after so many failures, 1 or more. Spread over the whole range: clients must not march in step.

    Marc Brooker, "Exponential Backoff And Jitter".
    """
    return random() * min(CAP_S, BASE_S * 2.0 ** min(failures - 1, 30))


class Retries:
    """What the requests of one Router share for their retries.

    Args:
        budget: the fleet's, as this Router sees it.
        random: draws from [0, 1).
    """

    def __init__(self, budget: RetryBudget, random: Callable[[], float]) -> None:
        self.budget = budget
        self._random = random
        self._overloaded: dict[str, float] = {}
        """Until when, by replica."""

    def next_at(
        self, record: RequestRecord, replica: str, end: AttemptEnd, attempts_max: int, now: float
    ) -> float | None:
        """When the attempt after one that ended so may start; None: never. Takes nothing of the budget.

        Args:
            record: the request, the attempt that ended included.
            replica: where that attempt ran.
            end: how it ended.
            attempts_max: attempts that one request may have.
            now: monotonic seconds.
        """
        if end.is_for_load:
            if end.reason is Reason.OVERLOADED:
                self.overloaded(replica, end.push_back_s, now)
            return now if record.overloads <= 1 and record.may_retry(attempts_max) else None
        if not end.is_retryable or not record.may_retry(attempts_max):
            return None
        if end.is_free:
            return now if record.attempts_free <= FREE_MAX else None
        if end.push_back_s is not None:
            return now + end.push_back_s
        return now + full_jitter_s(record.attempts - record.attempts_free, self._random)

    def overloaded(self, replica: str, push_back_s: float | None, now: float) -> None:
        """A replica has refused for overload."""
        if len(self._overloaded) >= REMEMBERED_MAX:
            self._overloaded = {name: until for name, until in self._overloaded.items() if until > now}
        self._overloaded[replica] = now + (OVERLOADED_S if push_back_s is None else push_back_s)

    def avoid(self, now: float) -> list[str]:
        """Replicas that are known to be overloaded: a request that one of them refused does not go to another."""
        return [name for name, until in self._overloaded.items() if until > now]


def has_time_for(remaining_s: float, expected_s: float | None) -> bool:
    """Whether another attempt makes sense in the time that is left.

    Args:
        remaining_s: seconds to the request's deadline.
        expected_s: expected time to its first token there; None: not known.
    """
    return remaining_s > (expected_s or 0.0)
