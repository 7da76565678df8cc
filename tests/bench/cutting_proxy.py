"""A TCP proxy that cuts connections on purpose: a client's broken connection, at a moment of our choosing."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class CuttingProxy:
    """Forwards connections to `target`; `cut` breaks all that are open, and new ones work."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.cuts = 0
        self.endpoint = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._serving:
            await asyncio.wait(self._serving, timeout=5)

    def cut(self) -> None:
        """Break every open connection, without a goodbye."""
        self.cuts += bool(self._open)
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        ends = {writer, up_writer}
        self._open |= ends
        pumps = {asyncio.create_task(_pump(reader, up_writer)), asyncio.create_task(_pump(up_reader, writer))}
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._open -= ends
        for end in ends:
            end.transport.abort()
        await asyncio.wait(pumps)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
