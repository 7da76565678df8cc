"""The network between a service and etcd, as TCP: held, lost, slow, cut, or opened to look at what passes.

held   nothing passes; what was sent meanwhile arrives after the heal, as TCP does it after a short partition
lost   nothing passes, and the connections that lost something are silent for ever, as behind a firewall that
       forgot them; new ones work after the heal
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable

from headrace.runtime.tasks import cancel_and_wait


class Way(enum.Enum):
    """One direction."""

    UP = "up"
    """From the client to etcd."""
    DOWN = "down"


BOTH = (Way.UP, Way.DOWN)


class _Link:
    """One connection: two pumps."""

    def __init__(self, writers: dict[Way, asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.is_dead = dict.fromkeys(Way, False)
        self.origin = ""
        """Who opened it, where its first bytes say so."""

    def abort(self) -> None:
        for writer in self.writers.values():
            writer.transport.abort()


class Proxy:
    """Forwards connections to 127.0.0.1:`target`. Use it as `async with`.

    `identify` names who opened a connection, from its first bytes; `blocked` then cuts off some of them only.
    """

    def __init__(self, target: int, *, port: int = 0, identify: Callable[[bytes], str] = lambda data: "") -> None:
        self._target = target
        self._identify = identify
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = {way: asyncio.Event() for way in Way}
        for gate in self._open.values():
            gate.set()
        self.port = port
        self.delay_s = 0.0
        self.loses: set[Way] = set()
        self.blocked: Callable[[str], bool] = lambda origin: False
        """Connections of these openers lose everything."""
        self.trap: Callable[[Way, bytes], None] = lambda way, data: None
        """Sees everything before it is forwarded, and may close a gate: then this waits too."""
        self.lost_bytes = 0
        self.held_chunks = 0
        self.delayed_chunks = 0
        self.cuts = 0

    @property
    def endpoint(self) -> str:
        """host:port to connect to."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        for link in self._links:
            link.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    def hold(self, *ways: Way) -> None:
        """Let nothing pass for now."""
        for way in ways or BOTH:
            self._open[way].clear()

    def lose(self, *ways: Way) -> None:
        """Swallow everything for now."""
        self.loses |= set(ways or BOTH)

    def heal(self) -> None:
        """Work again."""
        for gate in self._open.values():
            gate.set()
        self.loses, self.delay_s = set(), 0.0
        self.blocked = lambda origin: False
        self.trap = lambda way, data: None

    def cut(self) -> None:
        """Reset every connection that is open."""
        self.cuts += len(self._links)
        for link in self._links:
            link.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        link = _Link({Way.UP: up_writer, Way.DOWN: writer})
        self._links.add(link)
        pumps = [
            asyncio.create_task(self._pump(link, Way.UP, reader)),
            asyncio.create_task(self._pump(link, Way.DOWN, up_reader)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._links.discard(link)
        link.abort()
        await cancel_and_wait(*pumps)

    async def _pump(self, link: _Link, way: Way, source: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if way is Way.UP and not link.origin:
                    link.origin = self._identify(data)
                self.trap(way, data)
                if not self._open[way].is_set():
                    self.held_chunks += 1
                    await self._open[way].wait()
                if self.delay_s:
                    self.delayed_chunks += 1
                    await asyncio.sleep(self.delay_s)
                if way in self.loses or self.blocked(link.origin):
                    link.is_dead[way] = True
                if link.is_dead[way]:
                    self.lost_bytes += len(data)
                    continue
                link.writers[way].write(data)
                await link.writers[way].drain()
