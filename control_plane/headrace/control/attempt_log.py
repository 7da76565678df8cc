"""What became of each attempt of a request, in order. Sans-io."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace.control.errors import Reason
from headrace.control.lifecycle import Finish


class AttemptCause(enum.IntEnum):
    """Why an attempt is made; the numbers of headrace.api.inference.v1.AttemptRecord.Cause."""

    FIRST = 1
    RETRY = 2
    """The one before failed before any output."""
    HEDGE = 3
    """The one before took long to begin."""
    CONTINUATION = 4
    """The one before was lost after output."""


@dataclass(slots=True)
class Attempted:
    """One attempt."""

    token: int
    number: int
    """Of this request's, from 1."""
    replica: str
    cause: AttemptCause
    finish: Finish | None = None
    """None: it has not ended."""
    reason: Reason | None = None
    output_tokens: int = 0
    """Tokens of it that arrived here and counted."""

    @property
    def is_delivered(self) -> bool:
        """Whether output of it was, or will be, delivered."""
        return self.output_tokens > 0
