"""What a session hands out, and what it needs of those around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.control.errors import Failure
from headrace.control.resources import Replica
from headrace.router.links import SchedulerLink
from headrace.router.retrying import Retrying

if TYPE_CHECKING:
    from headrace.router.session import Session


class Event(NamedTuple):
    """One serialized event, ready to be written."""

    sequence: int
    data: bytes
    tokens: int


class SessionReader(Protocol):
    """The call that reads a session."""

    def wake(self) -> None:
        """There may be something to take."""

    def break_off(self, failure: Failure) -> None:
        """End the call with `failure`, even if a write is held up."""


class Owner(Protocol):
    """Who keeps the sessions."""

    @property
    def retrying(self) -> Retrying:
        """What they share for attempts beyond the first."""

    def place(self, session: Session) -> tuple[SchedulerLink, Replica]:
        """Choose where the next attempt runs.

        Raises:
            Failure: nobody can take it.
        """

    def on_over(self, session: Session) -> None:
        """The end is decided and nothing is held in an engine any more. Once."""

    def release(self, session: Session) -> None:
        """Nobody reads it now."""
