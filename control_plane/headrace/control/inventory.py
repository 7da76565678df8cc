"""Compares a Router's attempts at one Scheduler with those that the Scheduler knows of its session, both ways.

    dispatched before the question, not in the answer    over, and nobody said so: its owner is told that it is lost
    in the answer, not known here                        it takes a slot for nobody: it is cancelled

Frames are in order both ways. The question travels behind all dispatches that were made before it, and the answer
behind the ends of all attempts that are not in it. So a single answer is enough, whatever else is on the way. With
it, what is counted in flight is what is in flight.

Sans-io.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

ASK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Difference:
    """What an answer shows."""

    lost: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()


@dataclass(slots=True)
class Inventory:
    """The questions of one session. Invariant: at most one is open; a newer one takes the place of the one before."""

    number: int = 0
    """Of the newest question."""
    lost: int = 0
    """Attempts found lost, ever."""
    unknown: int = 0
    """Attempts found that nobody here knew, ever."""
    _asked: frozenset[int] | None = field(default=None)
    """Attempts that were known when the open question was put; None: none is open."""

    def ask(self, known: Iterable[int]) -> int:
        """Put a question, in a frame behind the dispatches of all `known` attempts; returns its number."""
        self.number += 1
        self._asked = frozenset(known)
        return self.number

    def answer(self, number: int, there: Iterable[int], known: Set[int]) -> Difference:
        """Take an answer, when everything before it has been taken; one to an older question says nothing.

        Args:
            number: of the question that it answers.
            there: attempts that the Scheduler has.
            known: attempts that have not ended here.
        """
        if self._asked is None or number != self.number:
            return Difference()
        asked, self._asked = self._asked, None
        found = frozenset(there)
        difference = Difference(tuple(sorted((asked & known) - found)), tuple(sorted(found - known)))
        self.lost += len(difference.lost)
        self.unknown += len(difference.unknown)
        return difference

    def close(self) -> None:
        """The session is over: what was asked is not answered any more."""
        self._asked = None
