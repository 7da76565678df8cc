"""Who owns the stream owns the sequences: what a loss of it ends, and what a successor finds."""

from __future__ import annotations

import asyncio

import pytest

from conformance.providers import Running
from conformance.session import ask, connected
from headrace.triton import event_stream
from headrace.triton.event_stream import EngineLost

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]


async def test_losing_the_stream_ends_what_its_owner_ran(engine: Running) -> None:
    async with connected(engine) as session:
        running = [session.submit(engine.provider.counting, max_tokens=300) for _ in range(2)]
        held = session.submit(engine.provider.counting, max_tokens=20, credit=2)
        waiting = session.submit(engine.provider.counting, max_tokens=300)
        for one in (*running, held):
            await session.tokens(one, 2)
        assert not waiting.is_over
    async with asyncio.timeout(5):
        while True:
            stats = (await ask(engine.target, "stats"))["stats"]
            if not any(stats[name] for name in ("active", "waiting", "paused", "preempted", "kv_reserved")):
                break
            await asyncio.sleep(0.02)
    refused = await ask(engine.target, "generate", {"requests": [{"seq": 1, "prompt": "x"}]})
    assert refused["error"]["reason"] == "INVALID_REQUEST", "there is no stream to tell the outcome on"


async def test_a_successor_hears_nothing_of_what_was_before(engine: Running) -> None:
    async with connected(engine, "schedulers/old") as old:
        heard = old.submit(engine.provider.counting, max_tokens=300, credit=5)
        await old.tokens(heard, 5)
        async with connected(engine, "schedulers/new") as new:
            with pytest.raises(EngineLost, match="took it over"):
                await asyncio.wait_for(old.reading, 5)
            assert heard.reason == "cancelled", "the old owner hears the end of its sequences first"
            await new.assert_idle()
            assert (await new.answer(engine.provider.counting, max_tokens=3)).reason == "length"
            await new.assert_idle()


async def test_an_owner_s_stream_goes_on_as_another_request_and_nothing_of_it_is_lost(
    engine: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "REQUEST_RESPONSES_MAX", 3)
    async with connected(engine) as session:
        running = [session.submit(engine.provider.counting, max_tokens=60) for _ in range(4)]
        await session.over(*running)
        assert [(one.reason, len(one.ids)) for one in running] == [("length", 60)] * 4
        assert session.client.requests_read > 2
        await session.assert_idle()
