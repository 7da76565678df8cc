"""How much of what a replica's prefix cache held was removed since the last report of it.

    tokens stored and removed since the engine's start -> blocks that are not to be believed in any more

Engines remove what was used longest ago, and a Router's index forgets in that order, too: so the share that an engine
removed is the share of the index's blocks of it to go, the oldest first. That holds whoever filled the cache, this
Router or others. Sans-io.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Seen:
    stored: int
    removed: int
    owed: float = 0.0
    """Share that was removed and was less than a block of the index's."""


class Evictions:
    """Of one Router, by replica."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def take(self, replica: str, stored: int, removed: int, blocks: int) -> int:
        """A report has come: how many of the `blocks` that the index has of the replica are gone.

        Args:
            replica: its name.
            stored: tokens that its cache stored since its engine's start; 0 where that is not told.
            removed: those of them that it removed.
            blocks: in the index.
        """
        if not stored:
            return 0
        seen = self._seen.get(replica)
        if seen is None or stored < seen.stored or removed < seen.removed:  # the first word of this engine
            self._seen[replica] = _Seen(stored, removed)
            return 0
        held = stored - seen.removed  # before, and what has come since
        share = (removed - seen.removed) / held if held > 0 else 0.0
        seen.stored, seen.removed = stored, removed
        seen.owed = 1.0 - (1.0 - seen.owed) * (1.0 - min(1.0, share))
        gone = int(seen.owed * blocks)
        if gone:
            seen.owed = max(0.0, seen.owed - gone / blocks)
        return gone

    def forget(self, replica: str) -> None:
        """It is gone, or another process is behind it."""
        self._seen.pop(replica, None)
