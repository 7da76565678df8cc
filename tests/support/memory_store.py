"""A store in memory with the operations that idempotency keys need, and the ways in which a real one fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from headrace.adapters.etcd_transport import StoreUnavailable
from headrace.api.registry.v1 import resources_pb2
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import Compare, KeyValue, LeaseNotFound, Listing, Put, SwapResult, TxnResult, WatchState


class MemoryStore:
    """See headrace.runtime.ports.Store."""

    def __init__(self) -> None:
        self.items: dict[str, KeyValue] = {}
        self.leases: dict[int, int] = {}
        """Seconds that each was granted for."""
        self.calls: list[str] = []
        self.revision = 0
        self.is_down = False
        self.changed = asyncio.Event()
        self.answers = asyncio.Event()
        """While cleared, what is asked is done and not answered."""
        self.answers.set()

    def register(self, router: str, incarnation: str, admin_endpoint: str = "") -> None:
        """The service record of a Router."""
        record = resources_pb2.ServiceRecord(name=router, incarnation=incarnation, admin_endpoint=admin_endpoint)
        self._put(Put(f"services/{router}", record.SerializeToString()))

    def unregister(self, router: str) -> None:
        """The record is gone."""
        del self.items[f"services/{router}"]
        self.changed.set()

    def watch(
        self,
        prefix: str,
        on_reset: Callable[[Listing], None],
        on_changes: Callable[[tuple[Change, ...]], None],
    ) -> MemoryWatch:
        return MemoryWatch(self, prefix, on_reset, on_changes)

    @property
    def keys(self) -> list[KeyValue]:
        """Records of idempotency keys."""
        return [item for key, item in self.items.items() if key.startswith("idempotency/")]

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        await self._call("get")
        return self.items.get(key)

    async def swap(self, put: Put, mod_revision: int, *, timeout_s: float = 5.0) -> SwapResult:
        if put.lease and put.lease not in self.leases:
            raise LeaseNotFound
        item = self.items.get(put.key)
        done = SwapResult(0, item)
        if not self.is_down and (item.mod_revision if item else 0) == mod_revision:
            done = SwapResult(self._put(put))
        await self._call("swap")
        return done

    async def txn(
        self,
        compares: Sequence[Compare],
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        *,
        timeout_s: float = 5.0,
    ) -> TxnResult:
        await self._call("txn")
        assert not puts
        for compare in compares:
            item = self.items.get(compare.key)
            if (item.mod_revision if item else 0) != compare.mod_revision:
                return TxnResult(False, self.revision)
        for key in deletes:
            self.items.pop(key, None)
        return TxnResult(True, self.revision)

    async def lease_grant(self, ttl_s: int, *, timeout_s: float = 5.0) -> tuple[int, float]:
        await self._call("lease_grant")
        self.leases[len(self.leases) + 1] = ttl_s
        return len(self.leases), float(ttl_s)

    def _put(self, put: Put) -> int:
        self.revision += 1
        old = self.items.get(put.key)
        created = old.create_revision if old else self.revision
        self.items[put.key] = KeyValue(put.key, put.value, created, self.revision, 1, put.lease)
        self.changed.set()
        return self.revision

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.is_down:
            raise StoreUnavailable("it is down")
        await self.answers.wait()
        await asyncio.sleep(0)


class MemoryWatch:
    """See headrace.runtime.ports.Watch; of a store with one watch."""

    def __init__(
        self,
        store: MemoryStore,
        prefix: str,
        on_reset: Callable[[Listing], None],
        on_changes: Callable[[tuple[Change, ...]], None],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._on_reset = on_reset
        self._on_changes = on_changes
        self._seen: dict[str, KeyValue] = {}

    @property
    def state(self) -> WatchState:
        return WatchState(heard_at=None if self._store.is_down else time.monotonic())

    async def run(self) -> None:
        self._seen = self._below()
        self._on_reset(Listing(tuple(self._seen.values()), self._store.revision, "1"))
        while True:
            await self._store.changed.wait()
            self._store.changed.clear()
            await asyncio.sleep(0)
            now, before = self._below(), self._seen
            self._seen = now
            changed = [item for key, item in now.items() if before.get(key) != item]
            gone = [item for key, item in before.items() if key not in now]
            changes = [Change(item.key, item.mod_revision, item.value) for item in changed]
            changes += [Change(item.key, self._store.revision, None) for item in gone]
            if changes:
                self._on_changes(tuple(changes))

    def _below(self) -> dict[str, KeyValue]:
        return {key: item for key, item in self._store.items.items() if key.startswith(self._prefix)}
