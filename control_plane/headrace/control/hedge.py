"""Hedging the wait for a first token: a second attempt beside the first; the first of both to answer wins.

    hedge           a rival starts, on another replica, inside the retry budget
    first output    whoever it comes from counts from now on; the other has lost, and is cancelled
    one fails       the other goes on, and nothing is retried
    the end         of the request is over only when the loser's engine has confirmed: its slot is held until then

At most one rival for a request, and never once there is output. What the loser still sends is dropped by its token.

Sans-io: the state here is the attempt beside the one that counts; headrace.control.request holds both.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.control.attempt_log import Attempted
from headrace.control.holdings import Holdings


@dataclass(slots=True)
class Beside:
    """The attempt beside the one that counts: a rival, or a loser whose end is not confirmed yet."""

    attempted: Attempted
    version: int
    """Of the record, when the attempt was made."""
    holdings: Holdings
    """What it holds in its engine."""
    admitted_at: float | None = None
    lost_at: float | None = None
    """When it lost; None: it may still win."""

    @property
    def token(self) -> int:
        """Its attempt token."""
        return self.attempted.token

    @property
    def is_rival(self) -> bool:
        """Whether it may still win."""
        return self.lost_at is None


def is_due(after_s: float, dispatched_at: float, now: float) -> bool:
    """Whether the wait for a first token has been long enough for a rival; `after_s` 0: never."""
    return after_s > 0 and now - dispatched_at >= after_s
