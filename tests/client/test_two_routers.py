"""Both clients with two real Routers that share a store: a connection that is lost before output costs nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from router.harness import Harness, running

from headrace import client as sdk
from support.memory_store import MemoryStore
from support.scripted import Asker, Cut, until


async def first_of(harnesses: tuple[Harness, Harness]) -> tuple[int, Any]:
    """Which of them was asked to start the request, and what it dispatched."""
    waiting = [asyncio.ensure_future(harness.admitted()) for harness in harnesses]
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    (begun,) = done
    return waiting.index(begun), begun.result()


async def test_a_lost_connection_before_output_is_found_again_at_the_other_router(ask: Asker) -> None:
    store = MemoryStore()
    store.register("routers/a", "a1")
    store.register("routers/b", "b1")
    async with (
        running(store=store, name="a", incarnation="a1") as a,
        running(store=store, name="b", incarnation="b1") as b,
        Cut(a.target) as way_a, Cut(b.target) as way_b,
        ask.client([way_a.target, way_b.target]) as client,
    ):  # fmt: skip
        reading = ask.reading(client.generate("hi", model="chat", max_tokens=8, timeout_s=20.0))
        rest = asyncio.ensure_future(reading.rest())
        index, dispatch = await first_of((a, b))
        harness, other, way = ((a, b, way_a), (b, a, way_b))[index]
        await until(lambda: reading.stream._session.request_name != "", "accepted")
        way.cut()
        await until(lambda: reading.stream._session.calls == 2, "another call")
        await harness.scheduler.deltas(dispatch.attempt, "Hel")
        await harness.scheduler.deltas(dispatch.attempt, "lo")
        await harness.scheduler.end(dispatch.attempt)
        heard = await rest
        assert heard.error is None
        assert heard.answer is not None
        assert heard.answer.text == "Hello"
        assert [kind for kind in heard.kinds if kind != "Delta"] == ["Accepted", "Accepted", "Terminal"]
        assert reading.stream.is_replay, "the other Router tells what the first one has"
        assert other.scheduler.dispatches.empty(), "one execution"
        assert harness.scheduler.dispatches.empty()


async def test_the_same_key_twice_is_one_request(ask: Asker) -> None:
    store = MemoryStore()
    async with running(store=store) as harness, ask.client(harness.target) as client:
        options: Any = {"model": "chat", "idempotency_key": "k", "timeout_s": 20.0}
        reading = ask.reading(client.generate("hi", **options))
        rest = asyncio.ensure_future(reading.rest())
        dispatch = await harness.admitted()
        await harness.scheduler.deltas(dispatch.attempt, "Hello")
        await harness.scheduler.end(dispatch.attempt)
        heard = await rest
        again = ask.reading(client.generate("hi", **options))
        repeated = await again.rest()
        assert (heard.error, repeated.error) == (None, None)
        assert repeated.events == heard.events
        assert (reading.stream.is_replay, again.stream.is_replay) == (False, True)
        reused = await ask.reading(client.generate("other", **options)).rest()
        assert type(reused.error) is sdk.KeyReused
        assert harness.scheduler.dispatches.empty()
