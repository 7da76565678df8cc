"""Every way to leave a stream ends its work at the service, within a deadline; and nothing hangs or leaks."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace import client as sdk
from headrace.client import AsyncClient, Client, Delta
from headrace.control.errors import Failure, Reason
from support.scripted import FAST, Play, Scripted, good, raising, until


async def endless(play: Play) -> None:
    await play.accept()
    while True:
        await play.delta("a", 1)
        await asyncio.sleep(0.001)


async def silent(play: Play) -> None:
    await play.accept()
    await asyncio.sleep(3600)


async def read_three(stream: Any) -> None:
    seen = 0
    async for event in stream:
        seen += isinstance(event, Delta)
        if seen == 3:
            break


async def by_break(client: AsyncClient) -> None:
    stream = client.generate("hi", model="chat")
    await read_three(stream)
    gc.collect()
    assert stream.answer.text.startswith("aaa"), "the stream is still held: breaking out is enough"


async def by_break_in_text(client: AsyncClient) -> None:
    async for _ in client.generate("hi", model="chat").text():
        break


async def by_context(client: AsyncClient) -> None:
    async with client.generate("hi", model="chat") as stream:
        events = aiter(stream)
        await anext(events)


async def by_error_in_body(client: AsyncClient) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async for _ in client.generate("hi", model="chat"):
            raise ZeroDivisionError


async def by_cancel(client: AsyncClient) -> None:
    stream = client.generate("hi", model="chat")
    events = aiter(stream)
    while not isinstance(await anext(events), Delta):
        pass
    stream.cancel()
    with pytest.raises(sdk.Cancelled) as caught:
        await stream_to_end(events)
    assert caught.value.answer is not None
    assert caught.value.answer.text.startswith("a")


async def stream_to_end(events: Any) -> None:
    async for _ in events:
        pass


async def by_task_cancel(client: AsyncClient) -> None:
    task = asyncio.ensure_future(client.generate("hi", model="chat").read())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_timeout_around(client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.generate("hi", model="chat").read()


async def by_close(client: AsyncClient) -> None:
    reading = asyncio.ensure_future(client.generate("hi", model="chat").read())
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(sdk.Cancelled):
        await reading


ASYNC_WAYS = [by_break, by_break_in_text, by_context, by_error_in_body, by_cancel]
ASYNC_WAYS += [by_task_cancel, by_timeout_around, by_close]


@pytest.mark.parametrize("leave", ASYNC_WAYS)
async def test_leaving_an_async_stream_ends_its_work(
    serve: Any, leave: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    service = await serve(endless)
    async with AsyncClient(service.target) as client:
        await leave(client)
        await until(lambda: service.calls == 1 and service.active == 0, "the service still works for nobody")


async def test_cancel_reaches_a_reader_that_waits(serve: Any) -> None:
    service = await serve(silent)
    async with AsyncClient(service.target) as client:
        stream = client.generate("hi", model="chat")
        reading = asyncio.ensure_future(stream.read())
        await until(lambda: service.active == 1, "the call has begun")
        stream.cancel()
        with pytest.raises(sdk.Cancelled):
            await reading
        await until(lambda: service.active == 0, "cancelled")


async def test_cancel_before_the_first_read_makes_no_call(serve: Any) -> None:
    service = await serve(good)
    async with AsyncClient(service.target) as client:
        stream = client.generate("hi", model="chat")
        stream.cancel()
        with pytest.raises(sdk.Cancelled):
            await stream.read()
    assert service.calls == 0


def blocking_break(client: Client) -> None:
    stream = client.generate("hi", model="chat")
    for event in stream:
        if isinstance(event, Delta):
            break


def blocking_break_in_text(client: Client) -> None:
    for _ in client.generate("hi", model="chat").text():
        break


def blocking_context(client: Client) -> None:
    with client.generate("hi", model="chat") as stream:
        next(iter(stream))


def blocking_cancel(client: Client) -> None:
    stream = client.generate("hi", model="chat")
    threading.Timer(0.05, stream.cancel).start()
    with pytest.raises(sdk.Cancelled):
        stream.read()


def blocking_close(client: Client) -> None:
    threading.Timer(0.05, client.close).start()
    with pytest.raises(sdk.Cancelled):
        client.generate("hi", model="chat").read()


@pytest.mark.parametrize(
    "leave", [blocking_break, blocking_break_in_text, blocking_context, blocking_cancel, blocking_close]
)
async def test_leaving_a_blocking_stream_ends_its_work(serve: Any, leave: Callable[[Client], None]) -> None:
    service = await serve(endless)
    with Client(service.target) as client:
        await asyncio.to_thread(leave, client)
        await until(lambda: service.calls == 1 and service.active == 0, "the service still works for nobody")


LONG_WAIT = raising(Failure(Reason.OVERLOADED, "Full.", retry_after_s=60))


async def test_cancel_ends_the_wait_before_a_retry(serve: Any) -> None:
    service = await serve(LONG_WAIT)
    async with AsyncClient(service.target) as client:
        stream = client.generate("hi", model="chat")
        reading = asyncio.ensure_future(stream.read())
        await until(lambda: service.calls == 1 and service.active == 0, "the first call has failed")
        stream.cancel()
        with pytest.raises(sdk.Cancelled):
            async with asyncio.timeout(5):
                await reading
    with Client(service.target) as client:
        blocking = client.generate("hi", model="chat")
        reading_too = asyncio.ensure_future(asyncio.to_thread(blocking.read))
        await until(lambda: service.calls == 2 and service.active == 0, "the first call has failed")
        blocking.cancel()
        with pytest.raises(sdk.Cancelled):
            async with asyncio.timeout(5):
                await reading_too


async def test_a_stream_is_read_once_and_a_closed_client_asks_nothing(serve: Any) -> None:
    service = await serve(good)
    async with AsyncClient(service.target) as client:
        stream = client.generate("hi", model="chat")
        assert (await stream.read()).text == "Hello"
        with pytest.raises(RuntimeError, match="read once"):
            await stream.read()
    with pytest.raises(RuntimeError, match="closed"):
        await client.generate("hi", model="chat").read()
    blocking = Client(service.target)
    blocking.close()
    with pytest.raises(RuntimeError, match="closed"):
        blocking.generate("hi", model="chat").read()


async def test_an_end_that_was_read_is_not_cancelled_at_the_service(serve: Any) -> None:
    """Breaking at the terminal event must not make a complete request look cancelled."""
    ended: list[bool] = []

    async def script(play: Play) -> None:
        play.context.add_done_callback(lambda context: ended.append(context.cancelled()))
        await good(play)

    service = await serve(script)
    async with AsyncClient(service.target) as client:
        async for event in client.generate("hi", model="chat"):
            if isinstance(event, sdk.Terminal):
                break
    await until(lambda: bool(ended), "the call is over")
    assert ended == [False]


async def test_a_service_that_stops_interrupts_what_had_output(serve: Any, ask: Any) -> None:
    service: Scripted = await serve(endless)
    asking = asyncio.ensure_future(ask(service.target))
    await until(lambda: service.active == 1, "the call has begun")
    await asyncio.sleep(0.1)
    await service.server.stop(0)
    heard = await asking
    assert isinstance(heard.error, sdk.Interrupted)
    assert heard.error.answer.text.startswith("a")
    assert service.calls == 1


@pytest.mark.parametrize("kind", ["aio", "blocking"])
async def test_100_streams_at_once_do_not_mix(serve: Any, kind: str) -> None:
    async def echo(play: Play) -> None:
        await play.accept()
        for index in range(20):
            await play.delta(play.request.prompt, index)
            await asyncio.sleep(0)
        await play.finish()

    service = await serve(echo)
    prompts = [f"[{number}]" for number in range(100)]
    if kind == "aio":
        async with AsyncClient(service.target, retry=FAST) as client:
            answers = await asyncio.gather(*(client.generate(p, model="chat").read() for p in prompts))
    else:
        with Client(service.target, retry=FAST) as blocking:
            answers = [None] * 100

            def one(number: int) -> None:
                answers[number] = blocking.generate(prompts[number], model="chat").read()

            threads = [threading.Thread(target=one, args=(number,)) for number in range(100)]
            for thread in threads:
                thread.start()
            await asyncio.to_thread(lambda: [thread.join(60) for thread in threads])
    assert [answer.text for answer in answers] == [prompt * 20 for prompt in prompts]
    assert all(answer.token_ids == tuple(range(20)) for answer in answers)
    assert service.calls == 100


async def test_a_reader_that_stops_holds_the_service_back(serve: Any) -> None:
    sent = 0

    async def flood(play: Play) -> None:
        nonlocal sent
        await play.accept()
        for _ in range(50_000):
            await play.delta("x" * 100, 1)
            sent += 1

    service = await serve(flood)
    async with AsyncClient(service.target) as client, client.generate("hi", model="chat") as stream:
        events = aiter(stream)
        await anext(events)
        last = -1
        while sent != last:  # until nothing more is taken for 0.3 s
            last = sent
            await asyncio.sleep(0.3)
        assert sent < 2000
        await events.aclose()
