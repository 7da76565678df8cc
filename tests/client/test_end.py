"""How a caller's end reaches the service in each form: a frame, the end of the call, or a call of its own."""

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client import aio_stream, blocking_stream
from headrace.control.errors import Failure, Reason
from support.scripted import KEPT, Play, Scripted, until

NAME = "requests/r1"


async def endless(play: Play) -> None:
    if not play.after:
        await play.accept(window_tokens=8, retention=KEPT)
    while True:
        await play.delta("a", 1)
        await asyncio.sleep(0.001)


async def deaf(play: Play) -> None:
    play.is_deaf = True
    await endless(play)


async def silent(play: Play) -> None:
    await asyncio.sleep(60)


async def broken_at_three(play: Play) -> None:
    await play.accept(window_tokens=8, retention=KEPT)
    await play.delta("a", 1)
    await play.delta("a", 1)
    await play.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def busy(play: Play) -> None:
    raise Failure(Reason.OVERLOADED, "Full.", retry_after_s=8)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (aio_stream, blocking_stream):
        monkeypatch.setattr(module, "END_S", 0.2)


def ends(service: Scripted) -> tuple[int, int]:
    """(cancel frames, CancelRequest calls) that came."""
    return sum(play.cancels for play in service.plays), len(service.cancelled)


@pytest.mark.parametrize("policy", ["cancel", "continue"])
async def test_after_cancel_come_the_events_and_the_usage(serve: Any, ask: Any, policy: str) -> None:
    service = await serve(endless)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect=policy))
        events = await reading.through(5)
        reading.stream.cancel()
        reading.stream.cancel()
        heard = await reading.rest()
    assert type(heard.error) is sdk.Cancelled
    assert heard.error.reason is Reason.CLIENT_CANCELLED
    if not ask.interactive and policy == "cancel":
        assert ends(service) == (0, 0), "the end of the call is the end of the request"
        return
    assert heard.kinds[-1] == "Terminal"
    assert heard.error.answer.usage == sdk.Usage(prompt_tokens=3, generated_tokens=2, sent_tokens=2)
    assert heard.error.answer.finish_reason is sdk.FinishReason.CANCELLED
    sequences = [event.sequence for event in [*events, *heard.events]]
    assert sequences == list(range(1, len(sequences) + 1)), "what was on its way is handed on"
    assert ends(service) == ((1, 0) if ask.interactive else (0, 1))


async def test_cancel_before_acceptance(serve: Any, ask: Any) -> None:
    service = await serve(silent)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat"))
        rest = asyncio.ensure_future(reading.rest())
        await until(lambda: service.active == 1, "the call has begun")
        reading.stream.cancel()
        assert type((await rest).error) is sdk.Cancelled
    await until(lambda: service.active == 0, "ended")
    assert ends(service) == ((1, 0) if ask.interactive else (0, 0))


async def test_a_plain_request_that_would_run_on_is_cancelled_once_its_name_is_known(serve: Any, ask: Any) -> None:
    go = asyncio.Event()

    async def late(play: Play) -> None:
        await go.wait()
        await endless(play)

    service = await serve(late)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue", interactive=False))
        rest = asyncio.ensure_future(reading.rest())
        await until(lambda: service.active == 1, "the call has begun")
        reading.stream.cancel()
        go.set()
        heard = await rest
    assert type(heard.error) is sdk.Cancelled
    assert heard.kinds[0] == "Accepted"
    assert heard.error.answer.usage is not None
    assert service.cancelled == [NAME]


@pytest.mark.usefixtures("impatient")
async def test_a_service_that_ignores_a_cancel_is_left(serve: Any, ask: Any) -> None:
    service = await serve(deaf)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat"))
        await reading.through(3)
        started = time.monotonic()
        reading.stream.cancel()
        heard = await reading.rest()
        assert time.monotonic() - started < 1.5
        assert type(heard.error) is sdk.Cancelled
        assert heard.error.answer.usage is None
        await until(lambda: service.active == 0, "the call is ended")


async def test_a_connection_that_is_lost_after_a_cancel_is_a_cancel(serve: Any, ask: Any) -> None:
    async def script(play: Play) -> None:
        play.is_deaf = True
        await play.accept()
        await play.delta("a", 1)
        await until(lambda: play.cancels == 1, "cancelled")
        await play.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    service = await serve(script)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat"))
        await reading.through(2)
        reading.stream.cancel()
        assert type((await reading.rest()).error) is sdk.Cancelled


async def test_an_answer_that_was_complete_before_the_cancel_is_complete(serve: Any, ask: Any) -> None:
    async def script(play: Play) -> None:
        play.is_deaf = True
        await play.accept()
        await play.delta("a", 1)
        if play.form != "Generate":
            await until(lambda: play.cancels == 1, "cancelled too late")
        await play.finish()

    service = await serve(script)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat"))
        await reading.through(2)
        if ask.interactive:
            reading.stream.cancel()
        heard = await reading.rest()
        reading.stream.cancel()
    assert heard.error is None
    assert heard.answer.finish_reason is sdk.FinishReason.STOP


@pytest.mark.parametrize("way", ["leave", "leave_context"])
@pytest.mark.parametrize("policy", ["cancel", "continue"])
async def test_leaving_early_ends_the_request(serve: Any, ask: Any, policy: str, way: str) -> None:
    service = await serve(endless)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect=policy))
        await reading.through(5)
        started = time.monotonic()
        await getattr(reading, way)()
        assert time.monotonic() - started < 1.5
        await until(lambda: service.active == 0, "the service still works for nobody")
    if policy == "cancel":
        assert ends(service) == (0, 0), "the end of the call is the end of the request"
    else:
        assert ends(service) == ((1, 0) if ask.interactive else (0, 1)), "asked once, also when the client is closed"


async def test_leaving_with_a_terminal_event_in_hand_asks_for_nothing(serve: Any, ask: Any) -> None:
    async def script(play: Play) -> None:
        await play.accept(retention=KEPT)
        await play.finish()

    service = await serve(script)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        await reading.through(2)
        await reading.leave()
    assert ends(service) == (0, 0)


@pytest.mark.usefixtures("impatient")
async def test_leaving_a_service_that_does_not_answer_takes_a_bounded_time(serve: Any, ask: Any) -> None:
    service = await serve(deaf)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        await reading.through(3)
        started = time.monotonic()
        await reading.leave()
        assert time.monotonic() - started < 1.5
        await until(lambda: service.active == 0, "the call is ended")


async def test_leaving_while_the_connection_is_lost_ends_the_request_by_name(serve: Any, ask: Any) -> None:
    service = await serve(broken_at_three, busy)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        await reading.through(3)
        rest = asyncio.ensure_future(reading.rest())
        await until(lambda: service.calls == 2 and service.active == 0, "broken")
        await asyncio.sleep(0.1)
        reading.stream.cancel()
        assert type((await rest).error) is sdk.Cancelled
    assert service.cancelled == [NAME]


async def test_a_cancelled_task_ends_the_request_by_name(serve: Any) -> None:
    """Its call is lost with it: grpc.aio cancels the call whose read is cancelled."""
    service = await serve(endless)
    async with sdk.AsyncClient(service.target) as client:
        reading = asyncio.ensure_future(client.generate("hi", model="chat", on_disconnect="continue").read())
        await until(lambda: bool(service.plays and service.plays[0].acknowledged), "it reads")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: service.active == 0, "ended")
    assert service.cancelled == [NAME]


async def test_closing_the_client_ends_requests_that_would_run_on(serve: Any, ask: Any) -> None:
    service = await serve(endless)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        await reading.through(3)
        rest = asyncio.ensure_future(reading.rest())
        await asyncio.sleep(0.05)
    heard = await rest
    assert type(heard.error) is sdk.Cancelled
    assert service.cancelled == [NAME]
    await until(lambda: service.active == 0, "ended")


async def test_closing_the_client_ends_the_wait_before_a_resumption(serve: Any, ask: Any) -> None:
    service = await serve(broken_at_three, busy)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        rest = asyncio.ensure_future(reading.rest())
        await until(lambda: service.calls == 2 and service.active == 0, "broken")
        await asyncio.sleep(0.1)
    started = time.monotonic()
    assert type((await rest).error) is sdk.Cancelled
    assert time.monotonic() - started < 2


async def test_a_detached_stream_is_left_running(serve: Any, ask: Any) -> None:
    ended: list[bool] = []

    async def script(play: Play) -> None:
        play.context.add_done_callback(lambda context: ended.append(context.cancelled()))
        await endless(play)

    service = await serve(script)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", on_disconnect="continue"))
        await reading.through(3)
        rest = asyncio.ensure_future(reading.rest())
        await asyncio.sleep(0.05)
        point = reading.stream.detach()
        heard = await rest
        await until(lambda: service.active == 0, "the call is over")
    assert type(heard.error) is sdk.Detached
    assert point.request == NAME
    assert point.sequence >= 3
    assert NAME in str(heard.error)
    assert ends(service) == (0, 0)


async def test_accepted_tells_the_window_and_the_retention(serve: Any, ask: Any) -> None:
    async def script(play: Play) -> None:
        await play.accept(window_tokens=24, retention=KEPT)
        await play.finish()

    service = await serve(script)
    heard = await ask(service.target, on_disconnect="continue", window_tokens=24)
    accepted = heard.events[0]
    assert (accepted.window_tokens, accepted.retention) == (24, sdk.Retention(1000, 1_000_000, 10.0))
    assert (service.requests[0].window_tokens, service.requests[0].on_disconnect) == (24, pb.ON_DISCONNECT_CONTINUE)


async def test_no_task_and_no_thread_is_left_behind(serve: Any, ask: Any) -> None:
    service = await serve(endless)
    async with ask.client(service.target) as client:
        before: tuple[int, int] = (0, 0)
        for number in range(11):
            for policy, way in [
                ("cancel", "leave"),
                ("continue", "leave"),
                ("cancel", "cancel"),
                ("continue", "detach"),
            ]:
                reading = ask.reading(client.generate("hi", model="chat", on_disconnect=policy))
                await reading.through(3)
                if way != "leave":
                    getattr(reading.stream, way)()
                    await reading.rest()
                await reading.leave()
            if number == 0:  # gRPC has started what it keeps
                await until(lambda: service.active == 0, "ended")
                await asyncio.sleep(0.2)
                before = (len(asyncio.all_tasks()), of_grpc())
        await until(lambda: service.active == 0, "ended")
        await until(lambda: len(asyncio.all_tasks()) <= before[0], "tasks have become more")
        await until(lambda: of_grpc() <= before[1], "gRPC's threads have become more")


def of_grpc() -> int:
    """Threads, but for those that asyncio runs the blocking client in."""
    return sum(not thread.name.startswith("asyncio") for thread in threading.enumerate())


async def test_a_status_is_not_lost_to_an_acknowledgement_under_way(serve: Any) -> None:
    """grpc.aio's own write() would turn it into INTERNAL, for every tenth stream or so."""

    async def taken_over(play: Play) -> None:
        await play.accept(window_tokens=8)
        for number in range(40):
            await play.delta("a", number)
        raise Failure(Reason.STREAM_TAKEN_OVER, "Another call reads it.")

    service = await serve(taken_over)
    async with sdk.AsyncClient(service.target) as client:
        for _ in range(5):
            results = await asyncio.gather(
                *(client.generate("hi", model="chat").read() for _ in range(100)), return_exceptions=True
            )
            assert {type(result) for result in results} == {sdk.TakenOver}
