"""What the laws have seen of one session, each fact noted when it happened."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.control.credit import Reader
from headrace.control.holdings import Resource
from headrace.control.lifecycle import Finish
from headrace.control.request import Step
from sim.router import Session


@dataclass(slots=True)
class Track:
    """What was seen of one session."""

    session: Session
    through: list[int] = field(default_factory=lambda: [0])
    """Tokens of all events told up to and with each sequence."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    steps: list[Step] = field(default_factory=list)
    is_refused: bool = False
    reader: Reader = Reader.IMPLICIT
    written: int = 0
    """Newest sequence written to the reader; `known`: that counts as read by it."""
    known: int = 0
    attempt: int = 0
    attempt_version: int = 0
    is_admitted: bool = False
    is_ended: bool = True
    is_unannounced: bool = False
    """Its attempt is a continuation, and the reader does not know."""
    granted: int = 0
    version: int = 0
    finish: Finish | None = None
    sent: int = 0
    acknowledged: int = 0
    confirmed: int = 0
    """Tokens that readers said they have."""
    held: frozenset[Resource] = frozenset()
    state: tuple[object, ...] = ()
    """Of the counts, when they were checked last."""

    @property
    def is_told(self) -> bool:
        return self.is_refused or (bool(self.steps) and self.steps[-1] is Step.TERMINAL)
