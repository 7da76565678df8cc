"""The stored side of snapshots: shards are written before the root that names them, and deleted when nothing does.

    put ──> the last shards, root and history in one transaction (the Publisher's) ──> collect, a while later

Every write has the leader's key as its condition, so two Registries never write or delete against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from headrace.adapters.shard_codec import StoredShard, StoredSnapshot
from headrace.control.shards import REPLICAS, TENANTS, Root, ShardRef
from headrace.control.watch_cursor import Change
from headrace.registry.catalogue import Catalogue, history_key
from headrace.runtime.ports import Compare, Put, Store
from headrace.runtime.snapshot_follower import SHARD_PREFIX, shard_key

SNAPSHOTS_KEPT = 32
"""Earlier snapshots kept for a rollback: the newest whose models or aliases differ from the one before."""

GRACE_S = 60.0
"""How long a shard that no root names any more is kept, seconds: a slow reader may still be about to read it."""

BATCH_SHARDS = 80
BATCH_BYTES = 768 * 1024
"""Bounds of the shards in one transaction; etcd takes 128 operations and 1.5 MiB, and the root may be there, too."""

DROPS_MAX = 40
"""Earlier snapshots deleted in one transaction."""

CALL_S = 3.0


class ShardKeeping:
    """Writes shards and deletes those that are not needed.

    Args:
        store: where.
        catalogue: what is stored, as far as is known; what is written here is entered there at once.
        clock: monotonic seconds.
    """

    def __init__(self, store: Store, catalogue: Catalogue, clock: Callable[[], float]) -> None:
        self._store = store
        self._catalogue = catalogue
        self._clock = clock
        self._unused_since: dict[str, float] = {}

    def missing(self, snapshot: StoredSnapshot) -> list[StoredShard]:
        """Shards of a snapshot that the store does not have."""
        return [shard for shard in snapshot.shards if self._catalogue.entry(shard_key(shard.ref.digest)) is None]

    async def put(self, batch: list[StoredShard], leader: Compare) -> bool:
        """Write some shards. Returns whether this Registry still led."""
        done = await self._store.txn([leader], shard_puts(batch), timeout_s=CALL_S)
        if done.succeeded:
            self.note_put(batch, done.revision)
        return done.succeeded

    def note_put(self, batch: list[StoredShard], revision: int) -> None:
        """They were written at `revision`."""
        puts = shard_puts(batch)
        self._catalogue.apply(tuple(Change(put.key, revision, put.value, revision, 1) for put in puts))

    def history(self, new: Root, value: bytes) -> tuple[list[Put], list[str]]:
        """What to write and to delete below history/ when `new` is published."""
        before = self._catalogue.root()
        if before is not None and lasting(before) == lasting(new):
            return [], []
        kept = sorted(self._catalogue.below("history/"))
        return [Put(history_key(new.version), value)], kept[: max(0, len(kept) + 1 - SNAPSHOTS_KEPT)][:DROPS_MAX]

    async def collect(self, leader: Compare) -> int:
        """Delete shards that no root has named for GRACE_S. Returns how many."""
        now, used = self._clock(), self._used()
        unused = {key for key in self._catalogue.below("snapshot/") if key.startswith(SHARD_PREFIX)} - used
        self._unused_since = {key: self._unused_since.get(key, now) for key in unused}
        due = sorted(key for key, since in self._unused_since.items() if now - since >= GRACE_S)[:BATCH_SHARDS]
        if not due:
            return 0
        done = await self._store.txn([leader], deletes=due, timeout_s=CALL_S)
        if not done.succeeded:
            return 0
        self._catalogue.apply(tuple(Change(key, done.revision, None) for key in due))
        return len(due)

    def _used(self) -> set[str]:
        root = self._catalogue.root()
        refs = list(root.shards) if root is not None else []
        for kept in self._catalogue.kept_roots().values():
            refs += lasting(kept)
        return {shard_key(ref.digest) for ref in refs}


def lasting(root: Root) -> tuple[ShardRef, ...]:
    """Shards that an earlier snapshot still has: models and aliases. Replicas and keys of then mean nothing now."""
    return tuple(ref for ref in root.shards if not ref.name.startswith((REPLICAS, TENANTS)))


def shard_puts(shards: Iterable[StoredShard]) -> list[Put]:
    """How shards are written."""
    return [Put(shard_key(shard.ref.digest), shard.data) for shard in shards]


def batches(shards: Iterable[StoredShard]) -> Iterator[list[StoredShard]]:
    """Cut into what one transaction may hold; a shard that is larger alone goes alone."""
    batch: list[StoredShard] = []
    size = 0
    for shard in shards:
        if batch and (len(batch) == BATCH_SHARDS or size + len(shard.data) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(shard)
        size += len(shard.data)
    if batch:
        yield batch
