"""The events of a request that can be resumed: the newest ones, within bounds of count and bytes.

What is kept are the very bytes that were sent, so that a resumed stream is the same to the byte. An event that does
not fit is never refused: the oldest give way, and a reader that still wants those is told so. Sans-io.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


class LoggedEvent(NamedTuple):
    """One event; `tokens_through` counts the tokens of all events up to and with this one."""

    sequence: int
    data: bytes
    tokens: int
    tokens_through: int


class EventsExpired(Exception):
    """Events that were asked for are gone; `first` is the oldest that is kept."""

    def __init__(self, first: int) -> None:
        super().__init__(f"the oldest event that is kept is {first}")
        self.first = first


class UnknownSequence(Exception):
    """The reader claims an event that was never written; `last` is the newest one."""

    def __init__(self, last: int) -> None:
        super().__init__(f"the newest event is {last}")
        self.last = last


@dataclass(frozen=True, slots=True)
class Retention:
    """Bounds of what one request keeps."""

    events_max: int
    bytes_max: int
    window_s: float
    """Without a reader, and after the end."""


class EventLog:
    """Sequences are contiguous: first, first + 1, ..., last."""

    def __init__(self, retention: Retention) -> None:
        self.retention = retention
        self.size = 0
        """Bytes kept."""
        self.last = 0
        self.tokens = 0
        """Tokens of all events ever written."""
        self._events: deque[LoggedEvent] = deque()

    @property
    def first(self) -> int:
        """Sequence of the oldest event kept; last + 1 if there is none."""
        return self._events[0].sequence if self._events else self.last + 1

    def __len__(self) -> int:
        return len(self._events)

    def append(self, sequence: int, data: bytes, tokens: int) -> None:
        """Keep an event; the oldest ones give way."""
        assert sequence == self.last + 1, "events are written in order"
        self.last = sequence
        self.tokens += tokens
        self._events.append(LoggedEvent(sequence, data, tokens, self.tokens))
        self.size += len(data)
        while len(self._events) > self.retention.events_max or self.size > self.retention.bytes_max:
            self._drop()

    def has_room(self, data_bytes: int) -> bool:
        """Whether another event of that size would push none out."""
        kept = self.retention
        return len(self._events) < kept.events_max and self.size + data_bytes <= kept.bytes_max

    def after(self, sequence: int) -> list[LoggedEvent]:
        """All events behind `sequence`.

        Raises:
            EventsExpired: some of them are gone.
            UnknownSequence: there was no such event yet.
        """
        if sequence > self.last:
            raise UnknownSequence(self.last)
        if sequence + 1 < self.first:
            raise EventsExpired(self.first)
        # From the newest end: readers that keep up want the last one of thousands.
        behind = list(itertools.islice(reversed(self._events), self.last - sequence))
        behind.reverse()
        return behind

    def tokens_through(self, sequence: int) -> int:
        """Tokens of all events up to and with `sequence`, which must not lie before what `after` would give."""
        behind = self.after(sequence)
        return behind[0].tokens_through - behind[0].tokens if behind else self.tokens

    def clear(self) -> int:
        """Forget all; returns the bytes that this frees."""
        freed, self.size = self.size, 0
        self._events.clear()
        return freed

    def _drop(self) -> None:
        oldest = self._events.popleft()
        self.size -= len(oldest.data)
