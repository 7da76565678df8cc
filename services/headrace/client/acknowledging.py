"""When a reader tells the service what it has read: events in, "acknowledge up to n" and "look again at t" out.

    consume()  the caller has asked for the event after this one
    look()     time has passed: at `due_at`, or later

Coalesced: at half of the window; or when nothing more was read for ACK_DELAY_S; or ACK_LATEST_S after the first token
that is not confirmed. So a steady stream costs two messages for each window, a slow one at most 1 / ACK_DELAY_S a
second, and one whose reader has stopped costs none: then the service stops generating, which is the point. Sans-io.
"""

from __future__ import annotations

from headrace.control.credit import WINDOW_MIN

ACK_DELAY_S = 0.06
ACK_LATEST_S = 0.5


class Acknowledging:
    """Invariant: `due_at` is set exactly while tokens were consumed that are not acknowledged."""

    __slots__ = ("_half", "_latest_at", "_sequence", "_unconfirmed", "due_at")

    def __init__(self) -> None:
        self._half = WINDOW_MIN // 2
        self._sequence = 0
        self._unconfirmed = 0
        self._latest_at = 0.0
        self.due_at: float | None = None
        """When to `look` at the latest, monotonic seconds."""

    def window(self, tokens: int) -> None:
        """The request's window is known; until then the smallest that there is is assumed. 0: it was not told."""
        self._half = max(1, (tokens or WINDOW_MIN) // 2)

    def consume(self, sequence: int, tokens: int, now: float) -> int | None:
        """An event was consumed; returns the sequence to acknowledge now, if any. On the hot path."""
        if not tokens:
            return None
        self._sequence = sequence
        self._unconfirmed += tokens
        if self._unconfirmed >= self._half:
            return self._confirm()
        if self.due_at is None:
            self._latest_at = now + ACK_LATEST_S
        self.due_at = min(now + ACK_DELAY_S, self._latest_at)
        return None

    def look(self, now: float) -> int | None:
        """Return the sequence to acknowledge now, if any."""
        return self._confirm() if self.due_at is not None and now >= self.due_at else None

    def restart(self) -> None:
        """Another call begins: what it continues behind, or starts anew, needs no confirmation."""
        self._unconfirmed = 0
        self.due_at = None

    def _confirm(self) -> int:
        self._unconfirmed = 0
        self.due_at = None
        return self._sequence
