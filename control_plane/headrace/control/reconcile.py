"""Compares the sequences that live in an engine with the attempts in the Scheduler's books, both ways.

    in the engine, not in the books: an orphan; it takes a slot for nobody and is to be cancelled
    in the books, not in the engine: unknown there; it will never end by itself and is to be ended here

The engine's answer comes in order with all its other events, so at the moment that it is read both sides speak of the
same instant, but for what is on the way: an attempt that was dispatched after the question, or whose refusal comes by
another stream. Hence only attempts from before the question count, and only what two looks in a row have found.

Sans-io.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.control.attempt_book import Attempt

LOOK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What one look has found for the second time."""

    orphans: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()


@dataclass(slots=True)
class Reconciler:
    """The looks at one run of one engine. Invariant: at most one question is out."""

    opened_at: float
    _asked_at: float | None = None
    _looked_at: float | None = None
    _strangers: frozenset[int] = field(default_factory=frozenset)
    _missing: frozenset[int] = field(default_factory=frozenset)

    def ask(self, now: float) -> bool:
        """Whether the engine is to be asked now; the question then counts as out."""
        if self._asked_at is not None:
            return False
        last = self.opened_at if self._looked_at is None else self._looked_at
        if now - last < LOOK_EVERY_S:
            return False
        self._asked_at = now
        return True

    def compare(self, attempts: Mapping[int, Attempt], live: Iterable[int], now: float) -> Findings:
        """Take the engine's answer; one that was not asked for counts for nothing."""
        if self._asked_at is None:
            return Findings()
        there = frozenset(live)
        strangers = frozenset(there.difference(attempts))
        missing = frozenset(
            token
            for token, one in attempts.items()
            if token not in there and one.handed_at is not None and one.handed_at < self._asked_at
        )
        found = Findings(tuple(sorted(strangers & self._strangers)), tuple(sorted(missing & self._missing)))
        self._strangers, self._missing = strangers, missing
        self._asked_at, self._looked_at = None, now
        return found
