"""How a client spares a service that refuses it: adaptive throttling, and a budget for its retries.

    admit(now, draw)  before each call: a Ticket, or None: do not send, fail here
    refused(ticket)   the service shed the call of this ticket
    retry(now)        whether one more call for the same request is within the budget

The form is that of the SRE book ("Handling Overload"): with R requests of the last two minutes, of which A were not
refused, hold one back with the probability (R - K * A) / (R + 1). A call counts when it is sent, as one that is not
refused until it is: a client that counted at the end would not see its own burst, and one that waited for good news
would hold itself back for nothing while many long streams begin. What is held back counts as asked for and refused.

Two bounds are added. Below `refusals_min` nothing is held back, so that a small client never notices; and at least
1 - hold_max of the calls are sent, so that the client hears of it when the service is well again. Sans-io.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.control.errors import Reason

_SLICES = 12
"""What the window forgets at a time is one of them."""
_SHED = frozenset({Reason.OVERLOADED, Reason.QUEUE_TIMEOUT, Reason.QUOTA_EXCEEDED})


def is_shed(reason: Reason | None) -> bool:
    """Whether a call failed because there were too many: fewer of them would help."""
    return reason in _SHED


@dataclass(frozen=True, slots=True)
class ThrottlePolicy:
    """How soon a client holds back.

    Raises:
        ValueError: a number makes no sense.
    """

    ratio: float = 2.0
    """K: calls sent for each one that is not refused; smaller spares the service more."""
    window_s: float = 120.0
    refusals_min: int = 100
    """Fewer refusals in the window hold nothing back."""
    hold_max: float = 0.95
    """Largest probability to hold a call back."""
    retry_share: float = 0.1
    """Retries for each request."""
    retries_min: int = 10
    """Retries in a window that are free, whatever the share."""

    def __post_init__(self) -> None:
        """Check."""
        if not (self.ratio >= 1 and self.window_s > 0 and self.refusals_min >= 0):
            raise ValueError("ratio must be 1 or more, window_s more than 0, refusals_min 0 or more")
        if not (0 <= self.hold_max < 1 and 0 <= self.retry_share <= 1 and self.retries_min >= 0):
            raise ValueError("hold_max must be 0 or more and below 1, retry_share 0 to 1, retries_min 0 or more")


@dataclass(slots=True, eq=False)
class Ticket:
    """The slice of the window that a call counts in; a refusal is remembered as long as its call."""

    begins_at: float
    requests: int = field(default=0)
    not_served: int = field(default=0)
    """Refused by the service, or held back here."""
    refused: int = field(default=0)
    retries: int = field(default=0)


class ClientThrottle:
    """What one client knows of one service; see the module.

    Args:
        policy: its bounds.
    """

    def __init__(self, policy: ThrottlePolicy) -> None:
        self._policy = policy
        self._slices: deque[Ticket] = deque()

    def admit(self, now: float, draw: float) -> Ticket | None:
        """Count a call that is about to be sent.

        Args:
            now: monotonic seconds.
            draw: evenly from 0 to 1.

        Returns:
            None if it is held back.
        """
        is_held = draw < self.hold_probability(now)
        current = self._current(now)
        current.requests += 1
        current.not_served += is_held
        return None if is_held else current

    def refused(self, ticket: Ticket) -> None:
        """The service refused the call, see `is_shed`; at most once for each."""
        ticket.refused += 1
        ticket.not_served += 1

    def retry(self, now: float) -> bool:
        """Whether a retry is within the budget; then it is counted."""
        current = self._current(now)
        requests = sum(part.requests for part in self._slices)
        retries = sum(part.retries for part in self._slices)
        # Retries are among the requests; the share is of those that somebody asked for.
        if retries >= self._policy.retries_min + self._policy.retry_share * (requests - retries):
            return False
        current.retries += 1
        return True

    def hold_probability(self, now: float) -> float:
        """How likely the next call is to be held back."""
        self._forget(now)
        if sum(part.refused for part in self._slices) < self._policy.refusals_min:
            return 0.0
        requests = sum(part.requests for part in self._slices)
        served = requests - sum(part.not_served for part in self._slices)
        return min(self._policy.hold_max, max(0.0, (requests - self._policy.ratio * served) / (requests + 1)))

    def _current(self, now: float) -> Ticket:
        self._forget(now)
        if not self._slices or now >= self._slices[-1].begins_at + self._policy.window_s / _SLICES:
            self._slices.append(Ticket(now))
        return self._slices[-1]

    def _forget(self, now: float) -> None:
        while self._slices and now - self._slices[0].begins_at >= self._policy.window_s:
            self._slices.popleft()
