"""A real etcd for tests, and what breaks the way to it.

    from support.etcd import Etcd, eventually, make_store

Fixtures `etcd` and `store` are in tests/store/conftest.py and tests/registry/conftest.py; other folders define
their own from `etcd_process` the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aetcd.rpc import rpc_pb2

from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_process import EtcdProcess
from headrace.adapters.etcd_settings import EtcdConfig

Etcd = EtcdProcess


@contextlib.asynccontextmanager
async def etcd_process(data_dir: Path, **options: object) -> AsyncIterator[EtcdProcess]:
    """Run an etcd while the block runs."""
    etcd = EtcdProcess(data_dir, **options)  # type: ignore[arg-type]
    await etcd.start()
    try:
        yield etcd
    finally:
        if etcd.pid is not None:
            etcd.resume()
        await etcd.kill()


@contextlib.asynccontextmanager
async def make_store(*endpoints: str, prefix: str | None = None) -> AsyncIterator[EtcdStore]:
    """A store with a prefix of its own, so that tests can share one etcd."""
    store = EtcdStore(EtcdConfig(endpoints, prefix=prefix or f"/test-{uuid.uuid4().hex[:8]}"))
    try:
        await store.wait_ready(10)
        yield store
    finally:
        await store.aclose()


async def eventually(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], timeout_s: float = 10, what: str = ""
) -> None:
    """Wait until `condition()` holds; fails after `timeout_s` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        held = condition()
        if asyncio.iscoroutine(held):
            held = await held
        if held:
            return
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.02)


class TcpProxy:
    """Forwards TCP to `target`, until told to swallow what it gets (`hole`) or to reset its connections."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._holes: list[asyncio.Event] = []
        self.port = 0

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        self.reset()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def hole(self) -> None:
        """Connections that exist go silent for ever; new ones work."""
        for hole in self._holes:
            hole.set()

    def reset(self) -> None:
        """Cut the connections that exist."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self._holes.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        hole = asyncio.Event()
        self._holes.append(hole)
        self._writers += [writer, up_writer]
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(_pump(source, sink, hole))
            self._links.add(task)
            task.add_done_callback(self._links.discard)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, hole: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            if hole.is_set():
                continue
            sink.write(data)
            await sink.drain()
    if not hole.is_set():
        sink.close()


async def compact(store: EtcdStore) -> None:
    """Compact everything up to the store's head."""
    revision = (await store.head()).revision
    request = rpc_pb2.CompactionRequest(revision=revision, physical=True)
    await store._unary("KV/Compact", request, rpc_pb2.CompactionResponse, 5)


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
