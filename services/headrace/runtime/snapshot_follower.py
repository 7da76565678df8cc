"""The routing snapshot that this process runs: followed in etcd, checked, swapped whole; the last good one stays.

    root key ──watch──> decode ──> check ──> current (one reference)
                           └──────────┴──> refusal, kept until the next good one

Readers take `current` once and use that value throughout: it never changes under them. Without news from the store
they go on with it, for as long as `freshness` and their own policy allow.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable

from headrace.control.errors import Failure
from headrace.control.snapshot import RoutingSnapshot, check_successor
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import STALE_S, Listing, Store, WatchState
from headrace.runtime.telemetry import get_logger

ROOT_PREFIX = "snapshot/"
ROOT_KEY = "snapshot/root"

Subscriber = Callable[[RoutingSnapshot], None]


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
    """Follows the root key. Run `run` in a task of its own.

    Args:
        store: where.
        decode: bytes of the root key to a snapshot; raises ValueError with the reason.
        clock: monotonic seconds.
    """

    def __init__(
        self, store: Store, decode: Callable[[bytes], RoutingSnapshot], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._decode = decode
        self._clock = clock
        self._watch = store.watch(ROOT_PREFIX, self._on_reset, self._on_changes)
        self._incarnation = ""
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
        await self._watch.run()

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
        root = next((kv for kv in listing.items if kv.key == ROOT_KEY), None)
        if root is not None:
            self._take(root.value)
        elif self.current is not None:
            self._refuse("the store holds no snapshot; the last one stays in use")

    def _on_changes(self, changes: tuple[Change, ...]) -> None:
        newest = next((change for change in reversed(changes) if change.key == ROOT_KEY), None)
        if newest is None:
            return
        if newest.value is None:
            self._refuse("the snapshot was deleted; the last one stays in use")
        else:
            self._take(newest.value)

    def _take(self, data: bytes) -> None:
        try:
            snapshot = self._decode(data)
        except ValueError as error:
            self._refuse(str(error))
            return
        if snapshot.incarnation != self._incarnation:
            self._refuse("it was published for another incarnation of the store")
            return
        have = self.current
        if have is not None and _same(have, snapshot):
            self._accept_again()
            return
        try:
            check_successor(have, snapshot)
        except Failure as failure:
            self._refuse(failure.message)
            return
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


def _same(one: RoutingSnapshot, other: RoutingSnapshot) -> bool:
    return (one.incarnation, one.version, one.digest) == (other.incarnation, other.version, other.digest)
