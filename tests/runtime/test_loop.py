"""The services' loop: grpc.aio's wake-ups are taken in one go, and nothing else changes."""

from __future__ import annotations

import asyncio
import functools
import socket
from typing import Any

import grpc
import pytest

from headrace.runtime import loop as service_loop
from headrace.runtime.loop import ServiceLoop


class PollerCompletionQueue:
    """Reads one byte each time, as grpc.aio's does."""

    def __init__(self, source: socket.socket) -> None:
        self.source = source
        self.calls = 0

    def handle(self, done: asyncio.Event) -> None:
        assert len(self.source.recv(1)) == 1
        self.calls += 1
        done.set()


class OneByteReader(PollerCompletionQueue):
    """The same under a name that the loop does not know."""


@pytest.mark.parametrize(("reader", "calls"), [(PollerCompletionQueue, 1), (OneByteReader, 10)])
def test_only_grpcs_wake_ups_are_taken_in_one_go(reader: type[PollerCompletionQueue], calls: int) -> None:
    async def main() -> int:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        queue, done = reader(ours), asyncio.Event()
        loop = asyncio.get_running_loop()
        with ours, theirs:
            theirs.send(b"x" * 10)
            loop.add_reader(ours, functools.partial(queue.handle, done))
            async with asyncio.timeout(5):
                await done.wait()
                while queue.calls < calls:
                    await asyncio.sleep(0)
            loop.remove_reader(ours)
            with pytest.raises(BlockingIOError):
                ours.recv(1)
        return queue.calls

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        assert runner.run(main()) == calls


def test_grpc_aio_is_recognised_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a new grpcio names its parts differently: the gain would be lost in silence."""
    drained = 0
    original = service_loop._all_but_one_byte

    def counting(*arguments: Any) -> None:
        nonlocal drained
        drained += 1
        original(*arguments)

    monkeypatch.setattr(service_loop, "_all_but_one_byte", counting)

    async def main() -> bytes:
        async def echo(request: bytes, _context: Any) -> bytes:
            return request

        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer: bytes = await channel.unary_unary("/test.Echo/Echo")(b"hello", timeout=5)
        await server.stop(0)
        return answer

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        assert runner.run(main()) == b"hello"
    assert drained > 0
