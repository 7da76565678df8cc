"""Readers that remember: what each was told, in order, and which law that breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.adapters import shard_codec
from headrace.adapters.etcd import EtcdStore
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import STALE_S, Listing
from headrace.runtime.snapshot_follower import SnapshotFollower
from headrace.runtime.tasks import cancel_and_wait


def make_follower(store: EtcdStore) -> SnapshotFollower:
    """As the services make theirs."""
    return SnapshotFollower(store, shard_codec)


async def held_by(store: EtcdStore, timeout_s: float = 20.0) -> RoutingSnapshot:
    """What the store holds: the snapshot of a reader that begins now."""
    follower = make_follower(store)
    task = asyncio.create_task(follower.run())
    try:
        return await follower.wait_for(timeout_s=timeout_s)
    finally:
        await cancel_and_wait(task)


class Versions:
    """Versions that one reader showed, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken: list[str] = []
        self.history: list[tuple[str, int]] = []
        self._last: dict[str, tuple[int, str]] = {}
        self._at = ""

    @property
    def seen(self) -> int:
        """How many."""
        return len(self.history)

    def note(self, version: int, digest: str, incarnation: str = "") -> None:
        """Take in what it runs now."""
        last, last_digest = self._last.get(incarnation, (0, ""))
        if incarnation != self._at and incarnation in self._last:
            self.broken.append(f"{self.name} went back to incarnation {incarnation[:8]}")
        if version < last:
            self.broken.append(f"{self.name} went back from version {last} to {version}")
        if version == last and digest and last_digest and digest != last_digest:
            self.broken.append(f"{self.name} saw two contents of version {version}")
        if (version, incarnation) != (last, self._at):
            self.history.append((incarnation, version))
        self._at = incarnation
        self._last[incarnation] = (version, digest)


class Reader:
    """A SnapshotFollower, as every service has one. Use it as `async with`."""

    def __init__(self, name: str, store: EtcdStore) -> None:
        self.follower = make_follower(store)
        self.versions = Versions(name)
        self._task: asyncio.Task[None] | None = None
        self.follower.subscribe(
            lambda snapshot: self.versions.note(snapshot.version, snapshot.digest, snapshot.incarnation)
        )

    async def __aenter__(self) -> Reader:
        self._task = asyncio.create_task(self.follower.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        await cancel_and_wait(self._task)

    @property
    def is_fresh(self) -> bool:
        """Whether it hears the store."""
        return self.follower.state.is_fresh(time.monotonic(), STALE_S)


class Twin:
    """Keeps everything below a prefix, and which events it was told. Use it as `async with`."""

    def __init__(
        self,
        store: EtcdStore,
        prefix: str = "d/",
        check: Callable[[str, int, dict[str, bytes]], None] = lambda incarnation, revision, view: None,
    ) -> None:
        self._check = check
        self.view: dict[str, bytes] = {}
        self.told: set[tuple[str, int]] = set()
        self.broken: list[str] = []
        self.listed_at: list[int] = []
        """Revisions of its listings."""
        self._applied = 0
        self._incarnation = ""
        self.watch = store.watch(prefix, self._on_reset, self._on_changes)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Twin:
        self._task = asyncio.create_task(self.watch.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        await cancel_and_wait(self._task)

    def lost(self, promised: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Promised writes that it was neither told of nor has listed past."""
        listed = max(self.listed_at, default=0)
        return [event for event in promised if event not in self.told and event[1] > listed]

    def _on_reset(self, listing: Listing) -> None:
        if listing.incarnation == self._incarnation and listing.revision < self._applied:
            self.broken.append(f"a listing at {listing.revision} after events up to {self._applied}")
        if listing.incarnation != self._incarnation:
            self.listed_at, self.told = [], set()
        self._incarnation, self._applied = listing.incarnation, listing.revision
        self.listed_at.append(listing.revision)
        self.view = {kv.key: kv.value for kv in listing.items}
        self._check(self._incarnation, self._applied, self.view)

    def _on_changes(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            event = (change.key, change.mod_revision)
            is_late = change.mod_revision < self._applied or change.mod_revision <= self.listed_at[-1]
            if event in self.told or is_late:
                self.broken.append(f"{change.key} at {change.mod_revision} was applied twice or too late")
            self.told.add(event)
            self._applied = change.mod_revision
            if change.value is None:
                self.view.pop(change.key, None)
            else:
                self.view[change.key] = change.value
        self._check(self._incarnation, self._applied, self.view)
