"""Publishing: watch everything, compile, and write the root key while leading.

    watch ──> catalogue ──(settle 10 ms)──> lead? ──> compile ──> digest new? ──> new shards ──> txn ──> root
                                             │no                                                  │
                                             └── claim the leader's key if free                   └ refused: someone
                                                                                                    was first

The transaction compares the leader's key and the root key with what was read, so neither an old leader nor one that
reads late can publish over a newer snapshot. New shards go in the same transaction, as far as it has room; the others
are written before. A revocation does not wait for what else may change.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from headrace.adapters.shard_codec import SnapshotEncoder, StoredSnapshot, encode_root
from headrace.control.errors import Failure
from headrace.control.last_good import with_last_good
from headrace.control.replica_hold import ReplicaHold
from headrace.control.shards import bucket_counts
from headrace.control.snapshot import InconsistentSnapshot, RoutingSnapshot
from headrace.control.watch_cursor import Change
from headrace.registry.catalogue import LEADER_KEY, REVOCATION_PREFIX, Catalogue
from headrace.registry.shard_keeping import ShardKeeping, batches, shard_puts
from headrace.runtime.membership import Membership
from headrace.runtime.ports import Compare, LeaseNotFound, Listing, Put, Store, WatchState
from headrace.runtime.snapshot_follower import ROOT_KEY
from headrace.runtime.telemetry import get_logger

SETTLE_S = 0.01
"""Changes this close together are published as one, seconds."""

GAP_S = 0.05
"""Least time between two publications, seconds: each of them costs every reader a little."""

RETRY_S = 0.5
IDLE_S = 5.0
"""How often it looks again without a reason, seconds: a leader's key may have been lost with its lease."""

CALL_S = 3.0


class Publisher:
    """Keeps the root key up to date.

    Args:
        store: where.
        membership: the lease that leadership lives under.
        name: of this Registry, in the leader's key.
        soft_age_s: written into each snapshot.
        hard_age_s: written into each snapshot.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        membership: Membership,
        *,
        name: str,
        soft_age_s: float,
        hard_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._membership = membership
        self._name = name.encode()
        self._soft_age_s = soft_age_s
        self._hard_age_s = hard_age_s
        self._clock = clock
        self._catalogue = Catalogue()
        self._watch = store.watch("", self._on_reset, self._on_changes)
        self._hold: ReplicaHold | None = None
        self._encoder = SnapshotEncoder()
        self._shards = ShardKeeping(store, self._catalogue, clock)
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        """A revocation came or was lifted."""
        self._leader_epoch = 0
        self._last: tuple[str, RoutingSnapshot] | None = None
        """The published snapshot, by its digest."""
        self._had_content_in = ""
        """The last incarnation of the store that held something to publish."""
        self.settled = asyncio.Event()
        """Set once the store was read and a snapshot is published, by this Registry or another."""
        self.version = 0
        self.published = 0
        self.conflicts = 0
        self.failures = 0
        self.suspects = 0
        self.problems: tuple[str, ...] = ()
        """What the last snapshot leaves out, and why."""
        self.content_lost = False
        """The store was wiped: nothing is published before something is registered again."""

    async def run(self) -> None:
        """Publish until cancelled; outages of the store are waited out."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            tasks.create_task(self._publish_for_ever())

    @property
    def is_leader(self) -> bool:
        """Whether this Registry publishes, as far as it knows."""
        entry = self._catalogue.entry(LEADER_KEY)
        return entry is not None and entry.create_revision == self._leader_epoch

    @property
    def state(self) -> WatchState:
        """State of the watch."""
        return self._watch.state

    async def resign(self) -> None:
        """Let another Registry lead at once."""
        if self._leader_epoch:
            await self._store.txn([self._leading()], deletes=[LEADER_KEY], timeout_s=CALL_S)

    def _on_reset(self, listing: Listing) -> None:
        if listing.incarnation != self._catalogue.incarnation:
            if self._hold is not None:
                self._hold.lose_store(self._clock())
            self._leader_epoch = 0  # revisions begin anew: another's epoch may be the same number
        self._catalogue.reset(listing)
        self._wake.set()

    def _on_changes(self, changes: tuple[Change, ...]) -> None:
        if self._catalogue.apply(changes):
            self._wake.set()
        if any(change.key.startswith(REVOCATION_PREFIX) for change in changes):
            self._urgent.set()

    async def _publish_for_ever(self) -> None:
        while True:
            await self._wait()
            await self._pause(SETTLE_S)
            self._wake.clear()
            self._urgent.clear()
            if not self._catalogue.is_empty:
                self._had_content_in = self._catalogue.incarnation
            try:
                if self._catalogue.incarnation and await self._lead():
                    await self._publish()
                    await self._shards.collect(self._leading())
            except (Failure, LeaseNotFound, InconsistentSnapshot) as error:
                self.failures += 1
                why = "the lease was lost" if isinstance(error, LeaseNotFound) else str(error)
                get_logger().warning("publish_failed", why=why)
                self._wake.set()
                await asyncio.sleep(RETRY_S)
            if self._catalogue.entry(ROOT_KEY) is not None:
                self.settled.set()
            await self._pause(GAP_S)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not longer than until a revocation comes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._urgent.wait()

    async def _wait(self) -> None:
        timeout_s = IDLE_S
        deadline = self._hold.next_deadline() if self._hold else None
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - self._clock()))
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _lead(self) -> bool:
        """Whether this Registry leads, after claiming what is free or was its own in an earlier life."""
        entry = self._catalogue.entry(LEADER_KEY)
        if entry is not None and entry.create_revision == self._leader_epoch:
            return True
        if entry is not None and entry.value != self._name:
            return False
        if entry is not None and not self._leader_epoch:
            # Names are unique: the process that wrote this before our start was killed.
            theirs = Compare(LEADER_KEY, create_revision=entry.create_revision)
            await self._store.txn([theirs], deletes=[LEADER_KEY], timeout_s=CALL_S)
        # A key with our name that is not known as ours: the answer to an earlier claim was lost.
        epoch = await self._membership.claim(LEADER_KEY, self._name)
        if epoch is None:
            return False
        self._leader_epoch = epoch
        self._catalogue.apply((Change(LEADER_KEY, epoch, self._name, epoch, 1),))
        get_logger().info("registry_leads", epoch=epoch)
        return True

    async def _publish(self) -> None:
        """Compile, and write what is new: shards, then the root that names them."""
        root_entry, root = self._catalogue.entry(ROOT_KEY), self._catalogue.root()
        if self._is_content_lost():
            return
        if self._watch.state.revision < self._leader_epoch:
            self._wake.set()  # an earlier leader may have deleted shards that are not known to be gone yet
            return
        snapshot = self._compile()
        stored = self._encoder.encode(snapshot, bucket_counts(ref.name for ref in root.shards) if root else {})
        missing = self._shards.missing(stored)
        published = (root.digest, root.incarnation) if root else None
        if root is not None and not missing and published == (stored.root.digest, stored.root.incarnation):
            self.version = root.version
            return
        *before, last = [*batches(missing)] or [[]]
        for batch in before:
            if not await self._shards.put(batch, self._leading()):
                self._note_conflict(snapshot.version)
                return
        value = encode_root(stored.root)
        kept, dropped = self._shards.history(stored.root, value)
        done = await self._store.txn(
            [self._leading(), Compare(ROOT_KEY, mod_revision=root_entry.mod_revision if root_entry else 0)],
            [*shard_puts(last), Put(ROOT_KEY, value), *kept],
            dropped,
            timeout_s=CALL_S,
        )
        if not done.succeeded:
            self._note_conflict(snapshot.version)
            return  # the watch brings what has changed, and wakes this again
        created = root_entry.create_revision if root_entry else done.revision
        self._catalogue.apply((Change(ROOT_KEY, done.revision, value, created, 1),))
        self._shards.note_put(last, done.revision)
        self._note_published(snapshot, stored, len(missing))

    def _compile(self) -> RoutingSnapshot:
        if self._hold is None:  # replicas that an earlier Registry published, and that are gone, are news too
            published = self._published()
            here = published is not None and published.incarnation == self._catalogue.incarnation
            self._hold = ReplicaHold(published.replicas if published is not None and here else ())
        replicas, problems = self._catalogue.replicas()
        held = self._hold.observe(replicas, self._clock())
        self._note_suspects(held.suspects)
        compiled = self._catalogue.compile(
            held.replicas,
            version=self._catalogue.next_version(),
            soft_age_s=self._soft_age_s,
            hard_age_s=self._hard_age_s,
            publish_time_ms=int(time.time() * 1000),
        )
        self._note_problems((*problems, *compiled.problems))
        return with_last_good(compiled.snapshot, self._published())

    def _published(self) -> RoutingSnapshot | None:
        """What readers run now. Kept, because to put it together means to decode all shards."""
        root = self._catalogue.root()
        if root is None:
            self._last = None
        elif self._last is None or self._last[0] != root.digest:
            published = self._catalogue.published()
            self._last = (root.digest, published) if published is not None else None
        return self._last[1] if self._last else None

    def _leading(self) -> Compare:
        return Compare(LEADER_KEY, create_revision=self._leader_epoch)

    def _note_conflict(self, version: int) -> None:
        self.conflicts += 1
        get_logger().info("publish_refused", version=version, why="the leader or the root has changed")

    def _note_published(self, snapshot: RoutingSnapshot, stored: StoredSnapshot, written: int) -> None:
        self.version, self.published = snapshot.version, self.published + 1
        self._last = stored.root.digest, snapshot
        get_logger().info(
            "snapshot_published",
            version=snapshot.version,
            digest=stored.root.digest[:12],
            revisions=len(snapshot.revisions),
            aliases=len(snapshot.aliases),
            replicas=len(snapshot.replicas),
            shards=len(stored.shards),
            shards_written=written,
        )

    def _is_content_lost(self) -> bool:
        """A wiped store must not make every reader forget its models: readers keep their last snapshot meanwhile."""
        catalogue = self._catalogue
        lost = catalogue.is_empty and self._had_content_in not in ("", catalogue.incarnation)
        if lost and not self.content_lost:
            get_logger().error(
                "store_was_wiped",
                advice="register artifacts, revisions and aliases again, or restore a backup; readers keep their last "
                "snapshot until then",
            )
        self.content_lost = lost
        return lost

    def _note_suspects(self, suspects: int) -> None:
        if suspects and not self.suspects:
            get_logger().error("replicas_vanished_together", suspects=suspects, advice="look at etcd and its disk")
        self.suspects = suspects

    def _note_problems(self, problems: tuple[str, ...]) -> None:
        for problem in set(problems) - set(self.problems):
            get_logger().warning("left_out_of_snapshot", problem=problem)
        self.problems = problems
