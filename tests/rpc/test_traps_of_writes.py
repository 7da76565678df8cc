"""The traps of grpc.aio around writes: one that a reader holds up, and one that comes when its call has ended."""

import asyncio
import contextlib
import gc
import weakref
from typing import Any, cast

import grpc
import pytest
from rpc.harness import BIG, EVENT, Ends, Plain, Running, Writing, alarms, in_write, soon

from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from headrace.rpc.calls import Context, is_call_over, streaming
from headrace.rpc.writing import keep_status
from support.scripted import until

# A write that a reader holds up, broken off from outside


class Breaking:
    """Writes until it is held up; `break_off` ends it as the Router does."""

    def __init__(self, *, first_is_big: bool) -> None:
        self.first_is_big = first_is_big
        self.entered = asyncio.Event()
        self.held: weakref.ref[Any] | None = None
        self.again = False
        self.second: BaseException | None = None

    def break_off(self) -> None:
        self.task.cancel()

    async def __call__(self, request: Any, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task, held = task, Ends()
        self.held = weakref.ref(held)
        try:
            if not self.first_is_big:
                await context.write(EVENT)
            self.entered.set()
            await context.write(BIG)
        except asyncio.CancelledError:
            task.uncancel()
            if self.again:
                try:
                    await context.write(EVENT)
                except grpc.aio.InternalError as error:
                    self.second = error
            raise Failure(Reason.SLOW_CONSUMER, "Too slow.", metadata={"outputTokens": "3"}) from None


async def test_plain_no_status_follows_a_first_write_that_was_cancelled() -> None:
    entered, task = asyncio.Event(), None
    errors: list[BaseException] = []

    async def handler(frames: Any, context: Any) -> None:
        nonlocal task
        task = asyncio.current_task()
        assert task is not None
        entered.set()
        try:
            await in_write(context)
        except asyncio.CancelledError:
            task.uncancel()
            try:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too slow.")
            except grpc.aio.InternalError as error:
                errors.append(error)
                raise

    async with Plain(handler) as plain:
        call = plain.call(timeout_s=1)
        await soon(entered.wait())
        assert task is not None
        task.cancel()
        assert len(await soon(call.read())) == 500_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(call.read())
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "TOO_MANY_OPERATIONS" in str(errors[0])
    assert not is_call_over(errors[0])


@pytest.mark.parametrize("first_is_big", [True, False], ids=["first write", "later write"])
async def test_a_reader_that_goes_on_gets_every_message_and_then_why(first_is_big: bool) -> None:
    breaking = Breaking(first_is_big=first_is_big)
    async with Running(Writing(breaking)) as running:
        call = running.call()
        await soon(breaking.entered.wait())
        breaking.break_off()
        await until(lambda: bool(running.outcomes), "the handler has ended, with nobody reading")
        assert running.outcomes == [("Generate", "SLOW_CONSUMER")]
        gc.collect()
        assert breaking.held is not None
        assert breaking.held() is None, "what the handler held does not wait for the reader"
        for event in [BIG] if first_is_big else [EVENT, BIG]:
            assert await soon(call.read()) == event
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(call.read())
        failure = status.from_rpc_error(caught.value)
        assert failure is not None
        assert (failure.reason, failure.metadata) == (Reason.SLOW_CONSUMER, {"outputTokens": "3"})
        assert len(running.outcomes) == 1


@pytest.mark.parametrize("how", ["cancel", "deadline", "stop", "disconnect"])
@pytest.mark.parametrize("first_is_big", [True, False], ids=["first write", "later write"])
async def test_nothing_is_left_of_a_call_whose_reader_never_reads_on(
    first_is_big: bool, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    breaking = Breaking(first_is_big=first_is_big)
    async with Running(Writing(breaking)) as running:
        before = len(asyncio.all_tasks())
        call = running.call(timeout_s=1 if how == "deadline" else 30)
        await soon(breaking.entered.wait())
        breaking.break_off()
        await until(lambda: bool(running.outcomes), "the handler has ended")
        assert len(asyncio.all_tasks()) > before, "the status waits"
        if how == "cancel":
            call.cancel()
        elif how == "disconnect":
            await running.channel.close()
        elif how == "stop":
            await soon(running.server.stop(0.05))
        await until(lambda: len(asyncio.all_tasks()) <= before, "no task is left")
        assert running.outcomes == [("Generate", "SLOW_CONSUMER")]
        call.cancel()
    assert not alarms(caplog)


async def test_no_status_is_tried_once_the_first_write_says_that_the_call_is_over() -> None:
    """The order of the two is chance on the wire; there gRPC would report a bug of the handler."""

    class Over:
        """A call whose client leaves during the first write."""

        def __init__(self) -> None:
            self.left = asyncio.Event()

        def time_remaining(self) -> None:
            return None

        async def write(self, message: Any) -> None:
            await self.left.wait()
            raise grpc.aio.InternalError('Failed "execute_batch": ()')

        async def abort(self, *_: Any) -> None:
            raise AssertionError

    breaking, context, outcomes = Breaking(first_is_big=True), Over(), []
    handler = streaming("Generate", breaking.__call__, lambda *outcome: outcomes.append(outcome))
    serving = asyncio.ensure_future(handler(None, cast("Context", context)))
    await soon(breaking.entered.wait())
    breaking.break_off()
    await until(lambda: bool(outcomes), "the handler has ended")
    assert not serving.done()
    context.left.set()
    await asyncio.wait({serving}, timeout=10)
    assert serving.cancelled()
    assert outcomes == [("Generate", "SLOW_CONSUMER")]


async def test_a_second_write_beside_a_broken_one_is_an_error_that_says_so() -> None:
    breaking = Breaking(first_is_big=False)
    breaking.again = True
    async with Running(Writing(breaking)) as running:
        call = running.call()
        await soon(breaking.entered.wait())
        breaking.break_off()
        await until(lambda: bool(running.outcomes), "the handler has ended")
        assert "TOO_MANY_OPERATIONS" in str(breaking.second)
        assert running.outcomes == [("Generate", "SLOW_CONSUMER")]
        call.cancel()


# A client's write to a call that has just ended


async def ends_unread(frames: Any, context: Any) -> None:
    await context.read()
    await context.write(EVENT.SerializeToString())
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "ours")


async def until_ended(call: Any) -> None:
    """Write beside `call.write` until gRPC knows that the call has ended; its status is not read yet."""
    with contextlib.suppress(grpc.aio.InternalError):
        while True:
            await call._cython_call.send_serialized_message(b"x")
    assert not call.done()


async def test_plain_a_late_write_replaces_the_status() -> None:
    async with Plain(ends_unread) as plain:
        call = plain.call()
        await call.write(b"start")
        await soon(until_ended(call))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(call.write(b"acknowledge"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError):
            await soon(call.read())


async def test_with_keep_status_the_reader_gets_every_message_and_the_true_status() -> None:
    async with Plain(ends_unread) as plain:
        call = keep_status(plain.call())
        await call.write(b"start")
        await soon(until_ended(call))
        await soon(call.write(b"acknowledge"))
        assert await soon(call.read()) == EVENT.SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(call.read())
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ours")


async def test_keep_status_holds_for_an_iterator_of_requests() -> None:
    async with Plain(ends_unread) as plain:
        late, written = asyncio.Event(), asyncio.Event()

        async def requests() -> Any:
            yield b"start"
            await late.wait()
            yield b"acknowledge"
            written.set()

        call: Any = keep_status(plain.channel.stream_stream("/plain/call")(requests(), timeout=10))
        await soon(call.initial_metadata())
        await soon(until_ended(call))
        late.set()
        await soon(written.wait())
        assert [m async for m in take(call, 1)] == [EVENT.SerializeToString()]
        assert await soon(call.details()) == "ours"


async def take(call: Any, count: int) -> Any:
    messages = aiter(call)
    for _ in range(count):
        yield await soon(anext(messages))
