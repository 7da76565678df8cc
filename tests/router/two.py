"""Two Routers that share a store: A, which B reaches through a proxy that a test can close, and B."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from router.harness import Harness, running
from support.etcd import TcpProxy
from support.memory_store import MemoryStore

KEY = {"idempotency_key": "k1"}


@dataclass
class Two:
    a: Harness
    b: Harness
    store: MemoryStore
    way: TcpProxy
    """From B to A."""

    async def begun(self, **fields: Any) -> tuple[Any, sp.Dispatch]:
        """A request that runs at A, accepted, and its call."""
        call = self.a.generate(**{**KEY, **fields})
        dispatch = await self.a.admitted()
        await call.read()
        return call, dispatch

    def block(self) -> None:
        """A cannot be reached from B any more."""
        assert self.way._server
        self.way._server.close()
        self.way.reset()


@contextlib.asynccontextmanager
async def two(**settings: Any) -> AsyncIterator[Two]:
    store = MemoryStore()
    async with running(store=store, name="a", incarnation="a1", **settings) as a, TcpProxy(a.admin.port) as way:
        a.service.sharing.keys.use(store, f"127.0.0.1:{way.port}")  # type: ignore[arg-type]
        store.register("routers/a", "a1", f"127.0.0.1:{way.port}")
        async with running(store=store, name="b", incarnation="b1", **settings) as b:
            yield Two(a, b, store, way)
