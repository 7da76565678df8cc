"""When what was read is acknowledged: the decision as a table and as properties, and counted at the service."""

import asyncio
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client import AsyncClient, Client, Delta
from headrace.client.acknowledging import ACK_DELAY_S, ACK_LATEST_S, Acknowledging
from support.scripted import Play, Scripted, until

WINDOW = 32


def fed(window: int, *events: tuple[int, float]) -> list[int | None]:
    """Acknowledgements for (tokens, time) of events 2, 3, ..."""
    machine = Acknowledging()
    machine.window(window)
    return [machine.consume(sequence, tokens, now) for sequence, (tokens, now) in enumerate(events, start=2)]


@pytest.mark.parametrize(
    ("window", "events", "expected"),
    [
        pytest.param(8, [(1, 0)] * 9, [None, None, None, 5, None, None, None, 9, None], id="at half of the window"),
        pytest.param(9, [(1, 0)] * 4, [None, None, None, 5], id="half of an odd window is rounded down"),
        pytest.param(8, [(3, 0), (3, 0)], [None, 3], id="tokens count, not events"),
        pytest.param(8, [(100, 0)], [2], id="one large event"),
        pytest.param(8, [(0, 0)] * 9, [None] * 9, id="events without tokens need none"),
        pytest.param(8, [(3, 0), (0, 0), (1, 0)], [None, None, 4], id="and are passed over"),
        pytest.param(0, [(1, 0)] * 4, [None, None, None, 5], id="a window that was not told is the smallest"),
        pytest.param(1, [(1, 0)] * 2, [2, 3], id="half of one is one"),
    ],
)
def test_how_many_tokens_make_an_acknowledgement(
    window: int, events: list[tuple[int, float]], expected: list[int | None]
) -> None:
    assert fed(window, *events) == expected


def test_a_quiet_moment_confirms_what_was_read() -> None:
    machine = Acknowledging()
    machine.window(WINDOW)
    assert machine.due_at is None
    assert machine.look(1e9) is None
    machine.consume(2, 1, 10.0)
    machine.consume(3, 1, 10.05)
    assert machine.due_at == 10.05 + ACK_DELAY_S
    assert machine.look(10.0 + ACK_DELAY_S) is None
    assert machine.look(10.05 + ACK_DELAY_S) == 3
    assert (machine.due_at, machine.look(99.0)) == (None, None)


def test_a_stream_without_a_quiet_moment_is_confirmed_in_time() -> None:
    machine = Acknowledging()
    machine.window(1_000_000)
    now = 10.0
    while now < 10.0 + ACK_LATEST_S:
        assert machine.consume(2, 1, now) is None
        assert machine.look(now) is None
        now += ACK_DELAY_S / 2
    assert machine.due_at == 10.0 + ACK_LATEST_S
    assert machine.look(now) == 2


def test_another_call_owes_nothing_for_the_one_before() -> None:
    machine = Acknowledging()
    machine.consume(2, 3, 0.0)
    machine.restart()
    assert (machine.due_at, machine.look(99.0)) == (None, None)
    assert machine.consume(3, 3, 0.0) is None


@given(
    st.integers(8, 64),
    st.lists(st.tuples(st.sampled_from(["consume", "look"]), st.integers(0, 9), st.floats(0, 0.1)), max_size=200),
)
def test_acknowledgements_rise_keep_the_service_going_and_are_few(
    window: int, steps: list[tuple[str, int, float]]
) -> None:
    machine = Acknowledging()
    machine.window(window)
    now, sequence, unconfirmed, acknowledged = 0.0, 1, 0, []
    for kind, tokens, pause in steps:
        now += pause
        if kind == "consume":
            sequence += 1
            unconfirmed += tokens
            said = machine.consume(sequence, tokens, now)
            assert said is None or unconfirmed >= window // 2, "no sooner than at half of the window"
        else:
            was_due = machine.due_at is not None and machine.due_at <= now
            said = machine.look(now)
            assert (said is not None) == was_due
        if said is not None:
            acknowledged.append(said)
            unconfirmed = 0
        assert unconfirmed < window // 2, "the service could come to a halt"
        assert (machine.due_at is not None) == (unconfirmed > 0), "what was read is confirmed some time"
    assert acknowledged == sorted(set(acknowledged))
    assert all(a <= sequence for a in acknowledged)


def tokens(count: int, window: int = WINDOW) -> Any:
    """So many tokens, each an event, and the end when all are acknowledged."""

    async def script(play: Play) -> None:
        await play.accept(window_tokens=window)
        for token in range(count):
            await play.delta("a", token)
        await until(lambda: play.acknowledged[-1:] == [count + 1], "all that was read is acknowledged")
        await play.finish()
        await until(lambda: play.is_half_closed, "the client closes its side when it has the terminal event")

    return script


@pytest.fixture(params=["aio", "blocking"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def read(kind: str, service: Scripted, pause_s: float = 0.0, **options: Any) -> None:
    """Read to the end, `pause_s` for each event."""
    if kind == "aio":
        async with AsyncClient(service.target) as client:
            async for _ in client.generate("hi", model="chat", **options):
                if pause_s:
                    await asyncio.sleep(pause_s)
        return

    def blocking() -> None:
        with Client(service.target) as client:
            for _ in client.generate("hi", model="chat", **options):
                if pause_s:
                    threading.Event().wait(pause_s)

    await asyncio.to_thread(blocking)


async def test_a_fast_reader_acknowledges_at_each_half_window(serve: Any, kind: str) -> None:
    service = await serve(tokens(200))
    started = time.monotonic()
    await read(kind, service)
    (play,) = service.plays
    assert play.form == "GenerateInteractive start"
    assert play.acknowledged == sorted(set(play.acknowledged))
    # 200 / 16 are 12, and one by time for the rest; each ACK_DELAY_S that this machine loses may add one.
    assert len(play.acknowledged) <= 13 + (time.monotonic() - started) / ACK_DELAY_S
    assert play.cancels == 0


async def test_a_slow_reader_acknowledges_by_time(serve: Any, kind: str) -> None:
    service = await serve(tokens(40, window=1000))
    started = time.monotonic()
    await read(kind, service, pause_s=0.02)
    acknowledged = service.plays[0].acknowledged
    assert 1 <= len(acknowledged) <= (time.monotonic() - started) / ACK_DELAY_S, "0.8 s of reading"
    assert acknowledged == sorted(set(acknowledged))


async def test_a_token_that_comes_alone_is_acknowledged_without_another(serve: Any, kind: str) -> None:
    """The reader waits for the next event, so that the one before is read; only time can tell."""

    async def script(play: Play) -> None:
        await play.accept(window_tokens=WINDOW)
        for number in (1, 2):
            await play.delta("a", 1)
            await until(lambda count=number: len(play.acknowledged) == count, "acknowledged by time")
        await play.finish()

    service = await serve(script)
    await read(kind, service)
    assert service.plays[0].acknowledged == [2, 3]


async def test_a_reader_that_stops_acknowledges_no_more(serve: Any, kind: str) -> None:
    go, there = threading.Event(), threading.Event()
    service = await serve(tokens(100))

    def blocking() -> None:
        with Client(service.target) as client:
            for event in client.generate("hi", model="chat"):
                if event.sequence == 20:
                    there.set()
                    go.wait(10)

    async def aio() -> None:
        async with AsyncClient(service.target) as client:
            async for event in client.generate("hi", model="chat"):
                if event.sequence == 20:
                    there.set()
                    await asyncio.to_thread(go.wait, 10)

    reading = asyncio.ensure_future(aio() if kind == "aio" else asyncio.to_thread(blocking))
    await until(there.is_set, "20 events are read")
    await until(lambda: service.plays[0].acknowledged[-1:] == [19], "what was read is acknowledged, and no more")
    await asyncio.sleep(3 * ACK_DELAY_S)
    assert service.plays[0].acknowledged[-1] == 19, "the event that the reader still looks at is not read"
    go.set()
    await reading


async def test_nothing_is_sent_after_the_terminal_event(serve: Any, kind: str) -> None:
    told = asyncio.Event()

    async def script(play: Play) -> None:
        await play.accept(window_tokens=1000)
        await play.delta("a", 1)
        await play.finish()
        await until(lambda: play.is_half_closed, "half-closed")
        told.set()
        await asyncio.sleep(2 * ACK_DELAY_S)

    service = await serve(script)
    await read(kind, service)
    assert told.is_set()
    assert service.plays[0].frames == []


async def test_the_plain_form_is_chosen_by_request_or_by_client(serve: Any) -> None:
    service = await serve(one_token)
    async with AsyncClient(service.target) as client:
        await client.generate("hi", model="chat", interactive=False).read()
        await client.generate("hi", model="chat").read()
    async with AsyncClient(service.target, interactive=False) as client:
        await client.generate("hi", model="chat").read()
        await client.generate("hi", model="chat", interactive=True).read()
    forms = ["Generate", "GenerateInteractive start", "Generate", "GenerateInteractive start"]
    assert [play.form for play in service.plays] == forms


async def one_token(play: Play) -> None:
    await play.accept()
    await play.delta("a", 1)
    await play.finish()


async def test_a_stream_has_one_task_for_its_frames_and_one_timer(serve: Any) -> None:
    """Whatever the number of tokens."""
    service = await serve(tokens(100))
    created = 0
    loop = asyncio.get_running_loop()

    def counting(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        nonlocal created
        created += "headrace/client" in str(getattr(coroutine, "cr_code", ""))
        return asyncio.Task(coroutine, loop=loop, **more)

    async with AsyncClient(service.target) as client:
        loop.set_task_factory(counting)
        try:
            stream = client.generate("hi", model="chat")
            async for event in stream:
                if isinstance(event, Delta):
                    timers = [handle for handle in loop._scheduled if "AsyncStream" in repr(handle._callback)]
                    assert len(timers) <= 1
        finally:
            loop.set_task_factory(None)
    assert created == 1
