"""Credit: nothing is told beyond it, and what is computed beyond it is what the engine declares."""

from __future__ import annotations

import asyncio

import pytest

from conformance.providers import CONTEXT
from conformance.session import Session
from conformance.watch import Heard

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]


async def rests(session: Session, heard: Heard) -> None:
    """Wait until the engine has stopped working for it, without more credit."""
    if session.engine.provider.run_ahead:
        await session.watch.until(lambda: heard.preempted > heard.resumed)
    else:
        await session.until_stats(paused=1)


async def test_a_sequence_stops_at_its_credit_and_goes_on_with_more(session: Session) -> None:
    provider = session.engine.provider
    provider.needs("repeats")
    whole = await session.answer(provider.counting, max_tokens=40)
    heard = session.submit(provider.counting, max_tokens=40, credit=5)
    for limit in (5, 6, 13, 20):
        session.credit(heard, limit)
        await session.tokens(heard, limit)
        await rests(session, heard)
        assert len(heard.ids) == limit
    session.credit(heard, -1)
    await session.over(heard)
    assert (heard.ids, heard.text) == (whole.ids, whole.text)
    assert heard.finished["usage"]["generated"] == 40


async def test_no_more_is_computed_than_the_credit_and_the_declared_run_ahead(session: Session) -> None:
    provider = session.engine.provider
    heard = session.submit(provider.counting, max_tokens=200, credit=4)
    await session.tokens(heard, 4)
    await rests(session, heard)
    steps = (await session.stats())["generated_tokens"]
    await asyncio.sleep(0.3)
    stats = await session.stats()
    assert stats["generated_tokens"] == steps, "it works without credit"
    assert stats["buffered_tokens"] <= provider.run_ahead + provider.slack - 1
    session.cancel(heard)
    await session.over(heard)
    usage = heard.finished["usage"]
    assert usage["emitted"] == 4
    assert usage["generated"] <= 4 + provider.run_ahead + provider.slack - 1


async def test_without_any_credit_nothing_is_told(session: Session) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=10, credit=0)
    await session.admitted(heard)
    await asyncio.sleep(0.3)
    assert not heard.ids
    session.credit(heard, -1)
    await session.over(heard)
    assert len(heard.ids) == 10


async def test_a_lower_limit_takes_nothing_back(session: Session) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=60, credit=20)
    session.client.credit(heard.seq, 3)
    await session.tokens(heard, 20)
    assert len(heard.ids) == 20
    session.cancel(heard)
    await session.over(heard)


async def test_credit_for_nobody_is_ignored(session: Session) -> None:
    session.client.credit(999_999_999, 50)
    assert (await session.client.ping())["ok"] is True


async def test_an_end_behind_the_credit_is_told_behind_its_last_token(session: Session) -> None:
    """An engine that runs ahead may be done long before; its reader hears of the end after what it has paid for."""
    heard = session.submit(session.engine.provider.counting, max_tokens=12, credit=8)
    await session.tokens(heard, 8)
    await asyncio.sleep(0.3)
    assert not heard.is_over
    session.credit(heard, 12)
    await session.over(heard)
    assert (heard.reason, len(heard.ids)) == ("length", 12)


async def test_one_without_credit_makes_room_for_another_and_loses_nothing(session: Session) -> None:
    provider = session.engine.provider
    provider.needs("preempts")
    provider.needs("repeats")
    whole = await session.answer(provider.counting, max_tokens=20)
    held = [session.submit(provider.counting, max_tokens=CONTEXT - 64, credit=7) for _ in range(2)]
    for one in held:
        await session.tokens(one, 7)
    other = session.submit(provider.counting, max_tokens=CONTEXT - 64)
    await session.tokens(other, 5)
    session.cancel(other)
    await session.over(other)
    assert any(one.preempted for one in held)
    for one in held:
        session.credit(one, 20)
        await session.tokens(one, 20)
        assert one.ids == whole.ids
        session.cancel(one)
    await session.over(*held)
