"""A Registry in the test's own process, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import registry_service_pb2_grpc as pb_grpc
from headrace.api.registry.v1 import resources_pb2
from headrace.registry.main import run
from headrace.registry.settings import RegistrySettings
from headrace.rpc.channels import CLIENT_OPTIONS
from support.etcd import eventually, free_port


@dataclass
class Registry:
    """A Registry in this process, and a client of it."""

    stub: Any
    stop: asyncio.Event
    task: asyncio.Task[None]
    port: int
    metrics_port: int

    async def snapshot(self) -> Any:
        return (await self.stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=5)).snapshot

    async def add(self, model: str = "m", **execution: Any) -> str:
        """Create a revision of the synthetic engine and the alias of the same name."""
        created = await self.stub.CreateRevision(
            pb.CreateRevisionRequest(model=f"models/{model}", revision=revision(**execution)), timeout=5
        )
        await self.alias(model, created.revision.name)
        return str(created.revision.name)

    async def alias(self, name: str, *targets: str, etag: str = "") -> Any:
        message = resources_pb2.Alias(
            name=f"aliases/{name}",
            targets=[resources_pb2.AliasTarget(revision=target, weight=1) for target in targets],
            etag=etag,
        )
        return (await self.stub.SetAlias(pb.SetAliasRequest(alias=message), timeout=5)).alias

    async def shows(self, condition: Callable[[Any], object], timeout_s: float = 10) -> Any:
        """Wait until the published snapshot meets `condition`; returns it."""
        found: list[Any] = []

        async def holds() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                found[:] = [await self.snapshot()]
                return bool(condition(found[0]))
            return False

        await eventually(holds, timeout_s)
        return found[0]


def revision(**execution: Any) -> Any:
    fields = {"context_tokens": 128, "slots": 2, "kv_cells": 256, **execution}
    return resources_pb2.Revision(
        execution=resources_pb2.Execution(engine=resources_pb2.Execution.ENGINE_SYNTHETIC, **fields)
    )


@contextlib.asynccontextmanager
async def running(endpoint: str, **settings: Any) -> AsyncIterator[Registry]:
    """Run a Registry while the block runs; it is asked to stop at the end, unless it has ended."""
    port, metrics_port = settings.pop("port", 0) or free_port(), free_port()
    stop = asyncio.Event()
    made = RegistrySettings(
        etcd=endpoint,  # type: ignore[arg-type]
        listen=f"127.0.0.1:{port}",
        metrics_listen=f"127.0.0.1:{metrics_port}",
        **{"name": "g1", "lease_ttl_s": 3, **settings},
    )
    task = asyncio.create_task(run(made, stop))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS)
    try:
        registry = Registry(pb_grpc.RegistryServiceStub(channel), stop, task, port, metrics_port)
        ready = asyncio.ensure_future(registry.shows(lambda snapshot: True))
        await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            task.result()
        await ready
        yield registry
    finally:
        stop.set()
        await channel.close()
        if not task.done():
            async with asyncio.timeout(15):
                await task


Start = Callable[..., AbstractAsyncContextManager[Registry]]
