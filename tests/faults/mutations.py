"""Bugs put in on purpose: the laws of the simulation must notice each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from headrace.adapters import etcd_watch
from headrace.control.watch_cursor import Change, News, Relist, WatchCursor
from headrace.registry.publisher import Publisher
from headrace.runtime import snapshot_follower
from headrace.runtime.ports import Compare
from headrace.runtime.snapshot_follower import SnapshotFollower


class AppliesTwice(WatchCursor):
    """Hands on what it knows already."""

    def delivered(self, header_revision: int, changes: tuple[Change, ...] = (), **options: Any) -> Any:
        decision = super().delivered(header_revision, changes, **options)
        return News(changes) if isinstance(decision, News) else decision


class ResumesFromTheHeader(WatchCursor):
    """Takes the head that a header shows for what it has applied."""

    def delivered(self, header_revision: int, changes: tuple[Change, ...] = (), **options: Any) -> Any:
        decision = super().delivered(header_revision, changes, **options)
        if isinstance(decision, News):
            self.applied = max(self.applied, header_revision)
        return decision


class IgnoresCompaction(WatchCursor):
    """Goes on from the revision that the server names."""

    def delivered(self, header_revision: int, changes: tuple[Change, ...] = (), **options: Any) -> Any:
        compacted = options.pop("compact_revision", 0)
        if compacted:
            self.applied = compacted
            return Relist("compacted")
        return super().delivered(header_revision, changes, **options)


class IgnoresGaps(WatchCursor):
    """Does not look at the versions of keys."""

    def delivered(self, header_revision: int, changes: tuple[Change, ...] = (), **options: Any) -> Any:
        decision = super().delivered(header_revision, changes, **options)
        if decision == Relist("event_lost"):
            self.needs_list = False
            fresh = tuple(change for change in changes if change.mod_revision > self.applied)
            self.applied = max((change.mod_revision for change in fresh), default=self.applied)
            return News(fresh)
        return decision


class TrustsAnyStore(WatchCursor):
    """Does not notice that the store is another one."""

    def checked(self, incarnation: str, revision: int) -> Relist | None:
        return None


def _cursor(broken: type[WatchCursor]) -> Callable[[], Any]:
    return lambda: mock.patch.object(etcd_watch, "WatchCursor", broken)


def _unfenced() -> Any:
    return mock.patch.object(Publisher, "_leading", return_value=Compare("nothing", create_revision=0))


def _takes_any_version() -> Any:
    return mock.patch.object(snapshot_follower, "check_successor", return_value=None)


def _forgets_incarnation() -> Any:
    real = SnapshotFollower._on_reset

    def reset(self: SnapshotFollower, listing: Any) -> None:
        before = self._incarnation
        real(self, listing)
        self._incarnation = before or listing.incarnation

    return mock.patch.object(SnapshotFollower, "_on_reset", reset)


def _keeps_epoch() -> Any:
    real = Publisher._on_reset

    def reset(self: Publisher, listing: Any) -> None:
        epoch = self._leader_epoch
        real(self, listing)
        self._leader_epoch = epoch

    return mock.patch.object(Publisher, "_on_reset", reset)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "events are applied twice": _cursor(AppliesTwice),
    "a watch resumes from the header's revision": _cursor(ResumesFromTheHeader),
    "compaction is skipped over": _cursor(IgnoresCompaction),
    "a lost event goes unnoticed": _cursor(IgnoresGaps),
    "a wiped store goes unnoticed": _cursor(TrustsAnyStore),
    "an old leader is not fenced": _unfenced,
    "an old snapshot is taken over": _takes_any_version,
    "a reader stays with the incarnation it began with": _forgets_incarnation,
    "an epoch outlives its store": _keeps_epoch,
}
BLIND = "the root is not compared"
"""This one is in the simulated etcd."""
