"""Where a watch of the store stands: which deliveries are news, where to resume, when only a new listing helps.

    NEEDS_LIST --listed--> FOLLOWING --delivered: news, or nothing--> FOLLOWING
         ^                    |
         +--------------------+   compacted, cancelled, wiped, gone back, or an event was lost

Invariants: `applied` never goes back, unless the store itself did (wiped, or restored from a backup: then there is
a listing first, never an event); no (key, revision) is handed on twice between listings; after every hand-over the
reader's view equals the store's at revision `applied`, as far as its prefix goes.

Sans-io: the adapter lists, opens streams, and passes on what comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Stored(Protocol):
    """What the cursor reads of a stored key."""

    @property
    def key(self) -> str:
        """Its name."""

    @property
    def version(self) -> int:
        """Counts its writes since it was created, from 1."""


@dataclass(frozen=True, slots=True)
class Change:
    """One event of the watch. A deletion has no value, and version 0."""

    key: str
    mod_revision: int
    value: bytes | None
    create_revision: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Changes to apply, oldest first; empty when there was nothing new."""

    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Relist:
    """List again, and watch from there."""

    reason: str
    """compacted, cancelled, wiped, went_back or event_lost: a bounded set, for a metric's label."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The store seems to have gone back: read its head, and pass that to `checked`."""


RELIST_REASONS = ("compacted", "cancelled", "wiped", "went_back", "event_lost")


class WatchCursor:
    """The decision part of one list-and-watch."""

    def __init__(self) -> None:
        self.incarnation = ""
        """Which store the last listing came from."""
        self.applied = 0
        """Revision up to which everything was handed on."""
        self.needs_list = True
        """Whether the next step is a listing."""
        self.duplicates = 0
        """Events dropped because they were known."""
        self.regressions = 0
        """Listings of the same store that were older than what was applied: it was restored from a backup."""
        self._versions: dict[str, int] = {}

    @property
    def start_revision(self) -> int:
        """What to watch from.

        The last applied revision, not the one after it, and never the head that a header shows. A catching-up watch
        shows heads far beyond its events; and newer etcds answer no progress request on a watch that begins in the
        future, which would look like silence. The event seen twice is dropped here.
        """
        return max(self.applied, 1)

    def listed(self, incarnation: str, revision: int, items: Iterable[Stored]) -> None:
        """Take in a listing; its reader replaces all it has. It is linearizable, so an older one is the truth too."""
        if incarnation == self.incarnation and revision < self.applied:
            self.regressions += 1
        self.incarnation = incarnation
        self.applied = revision
        self.needs_list = False
        self._versions = {item.key: item.version for item in items}

    def checked(self, incarnation: str, revision: int) -> Relist | None:
        """Compare a linearizable read of the store's head, made after the watch was opened."""
        if incarnation != self.incarnation:
            return self.restart("wiped")
        if revision < self.applied:
            return self.restart("went_back")
        return None

    def delivered(
        self,
        header_revision: int,
        changes: tuple[Change, ...] = (),
        *,
        cancelled: bool = False,
        compact_revision: int = 0,
    ) -> News | Relist | Doubt:
        """Take in one response of the watch."""
        if compact_revision:
            return self.restart("compacted")
        if cancelled:
            return self.restart("cancelled")
        if header_revision < self.applied:
            return Doubt()
        fresh: list[Change] = []
        seen: set[tuple[str, int]] = set()
        for change in sorted(changes, key=lambda c: c.mod_revision):  # a stable sort: order within a revision stays
            if change.mod_revision <= self.applied or (change.key, change.mod_revision) in seen:
                self.duplicates += 1
                continue
            seen.add((change.key, change.mod_revision))
            fresh.append(change)
        # Checked before anything is handed on: versions of a key count up by one, so a jump is a lost event.
        versions: dict[str, int] = {}
        for change in fresh:
            known = versions.get(change.key, self._versions.get(change.key, 0))
            if change.value is not None and change.version != known + 1:
                return self.restart("event_lost")
            versions[change.key] = change.version
        for key, version in versions.items():
            if version:
                self._versions[key] = version
            else:
                self._versions.pop(key, None)
        if fresh:
            self.applied = fresh[-1].mod_revision
        return News(tuple(fresh))

    def restart(self, reason: str) -> Relist:
        """Ask for a new listing."""
        self.needs_list = True
        return Relist(reason)
