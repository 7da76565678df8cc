"""A server of ours and a plain one of grpc.aio, each with one handler and a channel to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure
from headrace.rpc import status
from headrace.rpc.server import Server

INFERENCE = pb.DESCRIPTOR.services_by_name["InferenceService"]
EVENT = pb.GenerateEvent(sequence=1)
Handler = Callable[[Any, Any], Awaitable[None]]


class Serving:
    """Has the other methods of the service, which nobody calls here."""

    async def _unserved(self, request: Any, context: Any) -> None:
        raise NotImplementedError

    Generate: Any = _unserved
    GenerateInteractive: Any = _unserved
    ResumeGenerate = GetRequest = CancelRequest = _unserved


class Writing(Serving):
    """Serves Generate as a coroutine that writes."""

    def __init__(self, body: Handler) -> None:
        self.body = body

    async def Generate(self, request: Any, context: Any) -> None:
        await self.body(request, context)


class Yielding(Writing):
    """Serves Generate as a generator."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        await self.body(request, context)
        yield EVENT


NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096), ("grpc.enable_retries", 0)]
"""A client with these takes few kilobytes that it does not read."""
BIG = pb.GenerateEvent(delta=pb.Delta(text="x" * 500_000))
"""More than such a client takes: its write blocks."""


class Running:
    """A server of one handler, and a channel to it."""

    def __init__(self, handler: object, **options: Any) -> None:
        self.outcomes: list[tuple[str, str]] = []
        self.server = Server("127.0.0.1:0", observe=lambda *outcome: self.outcomes.append(outcome), **options)
        self.server.add(INFERENCE, handler, request_bytes_max=1000)

    async def __aenter__(self) -> Running:
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(self.server.endpoint, options=NARROW)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def call(self, data: bytes = b"", timeout_s: float = 10) -> Any:
        method = self.channel.unary_stream(f"/{INFERENCE.full_name}/Generate", lambda b: b, pb.GenerateEvent.FromString)
        return method(data, timeout=timeout_s)

    def interactive(self, timeout_s: float = 10) -> Any:
        name = f"/{INFERENCE.full_name}/GenerateInteractive"
        method = self.channel.stream_stream(name, lambda b: b, pb.GenerateEvent.FromString)
        return method(timeout=timeout_s)

    async def failure(self, data: bytes = b"", timeout_s: float = 10) -> tuple[grpc.StatusCode, Failure | None, Any]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in self.call(data, timeout_s):
                pass
        return caught.value.code(), status.from_rpc_error(caught.value), caught.value


class Plain:
    """A server of grpc.aio as it is, and a channel to it; the handler gets (request iterator, context)."""

    def __init__(self, handler: Handler) -> None:
        method = grpc.stream_stream_rpc_method_handler(handler)
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain", {"call": method}),))

    async def __aenter__(self) -> Plain:
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=NARROW)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def call(self, timeout_s: float = 10) -> Any:
        return self.channel.stream_stream("/plain/call")(timeout=timeout_s)


async def soon(awaited: Awaitable[Any], timeout_s: float = 10) -> Any:
    """What is awaited, within a bound."""
    return await asyncio.wait_for(awaited, timeout_s)


class Ends:
    """What a handler saw: where it is, and how it was ended."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.errors: list[BaseException] = []
        self.cancelling = 0
        self.cleaned = asyncio.Event()


async def in_write(context: Any) -> None:
    await context.write(b"x" * 500_000)


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What gRPC reports as errors of a handler; its grumbling about one event loop for each test is no concern here."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("grpc")]
