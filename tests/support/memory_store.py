"""A store in memory with the operations that idempotency keys need, and the ways in which a real one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.adapters.etcd_transport import StoreUnavailable
from headrace.api.registry.v1 import resources_pb2
from headrace.runtime.ports import Compare, KeyValue, LeaseNotFound, Put, SwapResult, TxnResult


class MemoryStore:
    """See headrace.runtime.ports.Store."""

    def __init__(self) -> None:
        self.items: dict[str, KeyValue] = {}
        self.leases: dict[int, int] = {}
        """Seconds that each was granted for."""
        self.calls: list[str] = []
        self.revision = 0
        self.is_down = False
        self.answers = asyncio.Event()
        """While cleared, what is asked is done and not answered."""
        self.answers.set()

    def register(self, router: str, incarnation: str) -> None:
        """The service record of a Router."""
        record = resources_pb2.ServiceRecord(name=router, incarnation=incarnation)
        self._put(Put(f"services/{router}", record.SerializeToString()))

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
        return self.revision

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.is_down:
            raise StoreUnavailable("it is down")
        await self.answers.wait()
        await asyncio.sleep(0)
