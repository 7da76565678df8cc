"""How far generation may run ahead of the reader: one request's credit window.

    granted  = taken + window          what the engine may generate, counted from the attempt's start
    produced <= granted                or the engine breaks its contract
    produced == granted                it is paused; nothing comes before more is granted

The reader has *taken* what its transport has accepted, or, where it sends acknowledgements, what it confirmed; where
there is no reader, what the event log keeps for it. Everything between `taken` and `produced` is the request's bounded
send queue, wherever it waits. At the high watermark (the whole window) the engine pauses; it goes on at the low one
(half of it), so that a reader of any speed costs at most one grant for each half window.

Sans-io. `output` runs once for each part of output: an addition and a comparison.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

WINDOW_MIN = 8


class Reader(enum.Enum):
    """Who takes the output."""

    IMPLICIT = "implicit"
    """A call without acknowledgements: what its transport has accepted is taken."""
    EXPLICIT = "explicit"
    """A call that acknowledges."""
    NONE = "none"
    """Nobody: what the event log keeps is taken."""


@dataclass(slots=True)
class CreditWindow:
    """Invariants: acknowledged <= sent <= produced <= granted; granted never falls while an attempt runs."""

    window: int
    """High watermark, tokens."""
    reader: Reader = Reader.IMPLICIT
    produced: int = 0
    """Tokens that arrived from the current attempt, and from those that it continues."""
    position: int = 0
    """Tokens written to the current reader, or to the log, counted from the start of the answer."""
    taken: int = 0
    """Of them, those that count as read."""
    sent: int = 0
    """Tokens ever handed to a transport; a repetition does not count twice."""
    acknowledged: int = 0
    """Tokens ever confirmed by a reader."""
    granted: int = 0
    paused_at: float | None = None
    """Since when the engine can do nothing for want of credit; monotonic seconds."""
    overrun: int = 0
    """Most tokens by which an attempt exceeded its credit: the engine's breach, counted."""
    low: int = -1
    """Low watermark, tokens: with this many outstanding, more is granted. By default half the window."""
    _unconfirmed: deque[tuple[int, int]] = field(default_factory=deque)
    """(sequence, position behind that event), oldest first; only where the reader acknowledges."""
    _confirmed: int = 0
    """Newest sequence that the current reader has confirmed."""

    def __post_init__(self) -> None:
        if self.low < 0:
            self.low = self.window // 2

    @property
    def outstanding(self) -> int:
        """Tokens granted that the reader does not have."""
        return self.granted - self.taken

    def open(self) -> int:
        """An attempt starts; returns its first limit."""
        self.produced = 0
        self.granted = self.window
        self.paused_at = None
        return self.granted

    def reopen(self, now: float) -> int:
        """An attempt goes on behind what was produced; returns its limit, which is counted from the answer's start."""
        self.granted = max(self.granted, self.taken + self.window)
        self.paused_at = now if self.produced >= self.granted else None
        return self.granted

    def output(self, tokens: int, now: float) -> None:
        """Tokens arrived. On the hot path."""
        self.produced += tokens
        if self.produced >= self.granted:
            self._exhaust(now)

    def _exhaust(self, now: float) -> None:
        self.overrun = max(self.overrun, self.produced - self.granted)
        if self.paused_at is None:
            self.paused_at = now

    def write(self, tokens: int, sequence: int) -> None:
        """The transport, or the log where there is no reader, has taken an event with so many tokens."""
        self.position += tokens
        if self.reader is Reader.NONE:
            self.taken = self.position
            return
        self.sent = max(self.sent, self.position)
        if self.reader is Reader.IMPLICIT:
            self.taken = self.position
        elif sequence <= self._confirmed:  # the reader was faster than the news that the transport had taken it
            self.taken = self.position
            self.acknowledged = max(self.acknowledged, self.taken)
        elif tokens:
            self._unconfirmed.append((sequence, self.position))

    def acknowledge(self, sequence: int) -> None:
        """The reader confirms all events up to `sequence`; a repeated or older confirmation changes nothing.

        It may come before `write` says that the event is out, but never for one that was not begun: the caller sees to
        that.
        """
        self._confirmed = max(self._confirmed, sequence)
        unconfirmed = self._unconfirmed
        if not unconfirmed or unconfirmed[0][0] > sequence:
            return
        while unconfirmed and unconfirmed[0][0] <= sequence:
            self.taken = unconfirmed.popleft()[1]
        self.acknowledged = max(self.acknowledged, min(self.taken, self.sent))

    def attach(self, reader: Reader, position: int) -> None:
        """Another reader, or none, goes on behind `position` tokens."""
        self.reader = reader
        self.position = self.taken = position
        self._unconfirmed.clear()
        self._confirmed = 0
        if reader is Reader.EXPLICIT:  # it has said how far it read
            self.acknowledged = max(self.acknowledged, min(position, self.sent))

    def grant(self) -> int | None:
        """The new limit, once the low watermark is reached; None while there is nothing to grant."""
        limit = self.taken + self.window
        if limit - self.granted < self.window - self.low:
            return None
        self.granted = limit
        self.paused_at = None
        return limit
