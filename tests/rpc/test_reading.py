"""Reads of grpc.aio that are cut short, and the reader that has none."""

import asyncio
from typing import Any

import grpc
import pytest
from rpc.harness import EVENT, Handler, Plain, Running, Serving, soon

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.rpc.reading import FrameReader
from support.scripted import until

ACK = pb.ClientFrame(acknowledge=pb.Acknowledge(sequence=7))


async def test_plain_a_timeout_around_a_clients_read_ends_the_call() -> None:
    async def handler(frames: Any, context: Any) -> None:
        await asyncio.Event().wait()

    async with Plain(handler) as plain:
        call = plain.call()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 0.01)
        assert call.cancelled()
        assert await soon(call.code()) is grpc.StatusCode.CANCELLED


async def test_a_timed_read_of_a_client_leaves_the_call_as_it_is() -> None:
    go = asyncio.Event()

    async def handler(frames: Any, context: Any) -> None:
        await go.wait()
        await context.write(b"one")
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "ours")

    async with Plain(handler) as plain:
        reader = FrameReader(plain.call())
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await reader.next(0.01)
        go.set()
        assert await reader.next(10) == b"one"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reader.next(10)
        assert caught.value.details() == "ours"


async def test_plain_a_servers_read_after_one_that_was_cut_short_says_that_nothing_follows() -> None:
    cut, result = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def handler(frames: Any, context: Any) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(context.read(), 0.01)
        result.set_result(await context.read())
        cut.set()

    async with Plain(handler) as plain:
        call = plain.call()
        await soon(cut.wait())
        assert result.result() is grpc.aio.EOF, "and yet the client has not closed"
        call.cancel()


class Interactive(Serving):
    """Serves GenerateInteractive."""

    def __init__(self, body: Handler) -> None:
        self.body = body

    async def GenerateInteractive(self, request: Any, context: Any) -> None:
        await self.body(FrameReader(context), context)


class Told:
    """What a handler's reader gave, as it comes."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Any] = asyncio.Queue()

    async def take(self) -> Any:
        return await soon(self.frames.get())


async def test_a_timed_read_of_a_server_loses_no_frame() -> None:
    told = Told()

    async def body(reader: Any, context: Any) -> None:
        try:
            await reader.next(0.01)
        except TimeoutError:
            await told.frames.put("timeout")
        while (frame := await reader.next(10)) is not None:
            await told.frames.put(frame)
        await told.frames.put("closed")
        assert await reader.next(10) is None, "and so it stays"
        await context.write(EVENT)

    async with Running(Interactive(body)) as running:
        call = running.interactive()
        assert await told.take() == "timeout"
        for _ in range(3):
            await call.write(ACK.SerializeToString())
            assert await told.take() == ACK
        await call.done_writing()
        assert await told.take() == "closed"
        assert await soon(call.read()) == EVENT
        assert await soon(call.read()) is grpc.aio.EOF
        assert running.outcomes == [("GenerateInteractive", "OK")]


async def test_a_frame_that_cannot_be_read_is_refused_by_name() -> None:
    async def body(reader: Any, context: Any) -> None:
        await context.write(EVENT)
        await reader.next(10)

    async with Running(Interactive(body)) as running:
        call = running.interactive()
        await call.write(pb.ClientFrame(start=pb.GenerateRequest(prompt="x" * 2000)).SerializeToString())
        assert await soon(call.read()) == EVENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(call.read())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert running.outcomes == [("GenerateInteractive", Reason.REQUEST_TOO_LARGE.value)]


@pytest.mark.parametrize("who", ["client", "handler", "handler fails"])
async def test_a_read_that_waits_ends_with_its_call_and_leaves_nothing(who: str) -> None:
    """Whoever ends the call, in whatever order; and the reading task, which nobody cancels, gets None."""
    told, go = Told(), asyncio.Event()
    hearing: set[asyncio.Task[None]] = set()

    async def hear(reader: Any) -> None:
        await told.frames.put("hears")
        await told.frames.put(await reader.next())

    async def body(reader: Any, context: Any) -> None:
        hearing.add(asyncio.create_task(hear(reader)))
        await context.write(EVENT)
        await go.wait()
        if who == "handler fails":
            raise Failure(Reason.OVERLOADED, "Full.")

    async with Running(Interactive(body)) as running:
        before = len(asyncio.all_tasks())
        call = running.interactive()
        assert await soon(call.read()) == EVENT
        assert await told.take() == "hears"
        if who == "client":
            call.cancel()
        else:
            go.set()
        assert await told.take() is None
        await until(lambda: len(asyncio.all_tasks()) <= before, "no task is left")
        outcome = {"client": "CLIENT_CANCELLED", "handler": "OK", "handler fails": "OVERLOADED"}[who]
        assert running.outcomes == [("GenerateInteractive", outcome)]


async def test_a_reader_that_is_cancelled_leaves_its_frame_to_the_next() -> None:
    told = Told()

    async def body(reader: Any, context: Any) -> None:
        waiting = asyncio.create_task(reader.next())
        await context.write(EVENT)
        waiting.cancel()
        await asyncio.wait({waiting})
        await context.write(EVENT)
        await told.frames.put(await reader.next(10))

    async with Running(Interactive(body)) as running:
        call = running.interactive()
        assert await soon(call.read()) == EVENT
        assert await soon(call.read()) == EVENT
        await call.write(ACK.SerializeToString())
        assert await told.take() == ACK
        call.cancel()
