"""The routing snapshot that this process runs: followed in etcd, checked, swapped whole; the last good one stays.

    shards ──watch──┐
    root ───watch──> decode ──> all shards here? ──> assemble ──> check ──> current (one reference)
                       │          │ no: read them        │          │
                       └──────────┴──────────────────────┴──────────┴──> refusal, kept until the next good one

Shards are written before the root that names them, so they are here already. Each is decoded when a root needs it that
the last one did not, and shared by all snapshots in a row that have it; of others the bytes are kept while the store
has them. So there are the objects of one snapshot, however often it changes: Python's collector looks through them all.

Readers take `current` once and use that value throughout: it never changes under them. Without news from the store
they go on with it, for as long as `freshness` and their own policy allow.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from typing import Protocol

from headrace.control.errors import Failure
from headrace.control.shards import Root, Shard, ShardRef, assemble
from headrace.control.snapshot import RoutingSnapshot, check_successor
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import STALE_S, Listing, Store, WatchState
from headrace.runtime.telemetry import get_logger

ROOT_PREFIX = "snapshot/"
ROOT_KEY = "snapshot/root"
SHARD_PREFIX = "snapshot/shards/"

FETCH_RETRY_S = 0.5
"""Pause before missing shards are read again from a store that did not answer, seconds."""

Subscriber = Callable[[RoutingSnapshot], None]


def shard_key(digest: bytes) -> str:
    """Key of the shard with this digest."""
    return SHARD_PREFIX + digest.hex()[:32]


class Codec(Protocol):
    """Decodes what the store holds; `headrace.adapters.shard_codec` is one. Both raise ValueError with the reason."""

    def parse_root(self, data: bytes) -> Root:
        """Decode the root key."""

    def parse_shard(self, ref: ShardRef, data: bytes) -> Shard:
        """Decode a shard, after comparing its digest."""


class Freshness(enum.Enum):
    """How old what this process knows may be, by the snapshot's own limits."""

    NONE = "none"
    """There is no snapshot yet."""
    FRESH = "fresh"
    STALE = "stale"
    """The store is silent; younger than the soft age. Serve."""
    SOFT = "soft"
    """Past the soft age: serve, and say so."""
    HARD = "hard"
    """Past the hard age: what needs fresh authority fails closed."""


class SnapshotFollower:
    """Follows the root key and the shards. Run `run` in a task of its own.

    Args:
        store: where.
        codec: what the bytes there mean.
        clock: monotonic seconds.
    """

    def __init__(self, store: Store, codec: Codec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._codec = codec
        self._clock = clock
        self._watch = store.watch(ROOT_PREFIX, self._on_reset, self._on_changes)
        self._incarnation = ""
        self._stored: dict[str, bytes] = {}
        """Shards in the store, by key."""
        self._shards: dict[bytes, Shard] = {}
        """Those of the current snapshot, decoded, by digest."""
        self._awaited: Root | None = None
        """A root whose shards are being read."""
        self._wake = asyncio.Event()
        self._subscribers: list[Subscriber] = []
        self._observers: list[Callable[[], None]] = []
        self._waiters: set[asyncio.Future[None]] = set()
        self.current: RoutingSnapshot | None = None
        """What to route on; None until the first one."""
        self.refusal = ""
        """Why the newest snapshot was refused; "" when it was not."""
        self.applied = 0
        """Snapshots taken over so far."""
        self.refused = 0
        """Snapshots refused so far."""

    async def run(self) -> None:
        """Follow until cancelled; outages of the store are waited out."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            tasks.create_task(self._fetch_for_ever())

    @property
    def state(self) -> WatchState:
        """State of the watch."""
        return self._watch.state

    def subscribe(self, subscriber: Subscriber, *, now: bool = True) -> None:
        """Call `subscriber` with each new snapshot, after the swap; it must not block. With `now` also for the
        current one.
        """
        self._subscribers.append(subscriber)
        if now and self.current is not None:
            self._tell(subscriber, self.current)

    def observe(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each change of `current` or `refusal`."""
        self._observers.append(observer)

    async def wait_for(
        self, predicate: Callable[[RoutingSnapshot], bool] = lambda snapshot: True, *, timeout_s: float
    ) -> RoutingSnapshot:
        """Return the first snapshot, current or later, for which `predicate` holds.

        Raises:
            TimeoutError: none within `timeout_s` seconds.
        """
        async with asyncio.timeout(timeout_s):
            while self.current is None or not predicate(self.current):
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.add(waiter)
                try:
                    await waiter
                finally:
                    self._waiters.discard(waiter)
            return self.current

    def age_s(self, now: float) -> float | None:
        """Seconds since the store was last heard; None before the first snapshot."""
        heard_at = self._watch.state.heard_at
        if self.current is None or heard_at is None:
            return None
        return max(0.0, now - heard_at)

    def freshness(self, now: float) -> Freshness:
        """How old what this process knows may be."""
        age_s = self.age_s(now)
        if self.current is None or age_s is None:
            return Freshness.NONE
        if age_s > self.current.hard_age_s:
            return Freshness.HARD
        if age_s > self.current.soft_age_s:
            return Freshness.SOFT
        return Freshness.STALE if age_s > STALE_S else Freshness.FRESH

    def _on_reset(self, listing: Listing) -> None:
        self._incarnation = listing.incarnation
        self._awaited = None
        self._stored = {kv.key: kv.value for kv in listing.items if kv.key.startswith(SHARD_PREFIX)}
        root = next((kv for kv in listing.items if kv.key == ROOT_KEY), None)
        if root is not None:
            self._take(root.value)
        elif self.current is not None:
            self._refuse("the store holds no snapshot; the last one stays in use")

    def _on_changes(self, changes: tuple[Change, ...]) -> None:
        newest = None
        for change in changes:
            if change.key == ROOT_KEY:
                newest = change
            elif not change.key.startswith(SHARD_PREFIX):
                continue
            elif change.value is None:
                self._stored.pop(change.key, None)
            else:
                self._stored[change.key] = change.value
        if newest is None:
            return
        if newest.value is None:
            self._awaited = None
            self._refuse("the snapshot was deleted; the last one stays in use")
        else:
            self._take(newest.value)

    def _take(self, data: bytes) -> None:
        """Take over a root, now or when its missing shards were read."""
        self._awaited = None
        try:
            root = self._codec.parse_root(data)
        except ValueError as error:
            self._refuse(str(error))
            return
        if root.incarnation != self._incarnation:
            self._refuse("it was published for another incarnation of the store")
            return
        have = self.current
        if have is not None and _same(have, root):
            self._accept_again()
            return
        try:
            check_successor(have, root)
        except Failure as failure:
            self._refuse(failure.message)
            return
        if any(self._is_missing(ref) for ref in root.shards):
            self._awaited = root
            self._wake.set()
            return
        self._swap(root)

    def _is_missing(self, ref: ShardRef) -> bool:
        return ref.digest not in self._shards and shard_key(ref.digest) not in self._stored

    def _swap(self, root: Root) -> None:
        """Assemble and use it, or refuse it; all its shards are here."""
        try:
            shards = {ref.digest: self._shards.get(ref.digest) or self._decode(ref) for ref in root.shards}
            snapshot = assemble(root, shards)
        except ValueError as error:
            self._refuse(str(error))
            return
        self._shards = shards
        self.current = snapshot
        self.refusal = ""
        self.applied += 1
        get_logger().info(
            "snapshot_applied",
            version=snapshot.version,
            digest=snapshot.digest[:12],
            revisions=len(snapshot.revisions),
            replicas=len(snapshot.replicas),
        )
        for subscriber in self._subscribers:
            self._tell(subscriber, snapshot)
        self._notify()

    def _decode(self, ref: ShardRef) -> Shard:
        return self._codec.parse_shard(ref, self._stored[shard_key(ref.digest)])

    async def _fetch_for_ever(self) -> None:
        """Read shards that a root names and the watch did not bring."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            root = self._awaited
            if root is None:
                continue
            try:
                gone = await self._fetch(root)
            except Failure as failure:
                get_logger().info("shards_not_read", version=root.version, why=failure.message)
                await asyncio.sleep(FETCH_RETRY_S)
                self._wake.set()
                continue
            if self._awaited is not root:  # a newer root has come meanwhile
                continue
            self._awaited = None
            if gone is not None:
                self._refuse(f"the shard {gone.name} of snapshot {root.version} is not in the store")
            else:
                self._swap(root)

    async def _fetch(self, root: Root) -> ShardRef | None:
        """Read what is missing; returns a shard that the store does not have, if there is one."""
        for ref in root.shards:
            if self._is_missing(ref):
                found = await self._store.get(shard_key(ref.digest))
                if found is None:
                    return ref
                self._stored[found.key] = found.value
        return None

    def _accept_again(self) -> None:
        """A new listing holds what runs here already."""
        if self.refusal:
            self.refusal = ""
            self._notify()

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        self.refusal = reason
        get_logger().warning(
            "snapshot_refused", reason=reason, version_kept=self.current.version if self.current else 0
        )
        self._notify()

    def _tell(self, subscriber: Subscriber, snapshot: RoutingSnapshot) -> None:
        """One subscriber's bug must keep the snapshot neither from the others nor from being current."""
        try:
            subscriber(snapshot)
        except Exception as error:
            get_logger().error("snapshot_subscriber_failed", version=snapshot.version, exc_info=error)

    def _notify(self) -> None:
        for observer in self._observers:
            observer()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def _same(one: RoutingSnapshot, other: Root) -> bool:
    return (one.incarnation, one.version, one.digest) == (other.incarnation, other.version, other.digest)
