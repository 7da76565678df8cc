"""A cancel at every moment of a sequence's life: one end, and nothing that it held is left."""

from __future__ import annotations

import pytest

from conformance.providers import CONTEXT
from conformance.session import Session
from conformance.watch import Heard

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]


async def occupy(session: Session) -> list[Heard]:
    """Sequences that hold nearly all cells and run on."""
    session.engine.provider.needs("kv_budget")
    long = [session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64) for _ in range(2)]
    for one in long:
        await session.admitted(one)
    return long


async def end(session: Session, *heard: Heard, reason: str = "cancelled") -> None:
    session.cancel(*heard, reason=reason)
    await session.over(*heard, timeout_s=10)


async def test_while_it_waits(session: Session) -> None:
    long = await occupy(session)
    waiting = session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64)
    await session.until_stats(waiting=1)
    await end(session, waiting)
    assert (waiting.reason, waiting.ids) == ("cancelled", [])
    assert waiting.finished["usage"]["generated"] == 0
    await end(session, *long)


async def test_before_it_can_have_begun(session: Session) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64)
    await end(session, heard)
    assert heard.reason == "cancelled"


async def test_while_its_prompt_is_processed(session: Session) -> None:
    """A prompt that takes several steps. The engine may have been quicker: then it is a cancel while decoding."""
    prompt = "one more line of a prompt that is long, " * 20
    heard = session.submit({"prompt": prompt, "max_tokens": 700, "ignore_eos": True})
    await session.admitted(heard)
    await end(session, heard)
    assert heard.reason == "cancelled"
    assert len(heard.ids) < 700


async def test_while_it_is_answered(session: Session) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64)
    await session.tokens(heard, 5)
    await end(session, heard)
    assert heard.reason == "cancelled"
    assert 5 <= len(heard.ids) < CONTEXT - 64


async def test_while_it_is_held_back_by_credit(session: Session) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=100, credit=3)
    await session.tokens(heard, 3)
    await end(session, heard)
    assert (heard.reason, len(heard.ids)) == ("cancelled", 3)


async def test_while_it_is_preempted(session: Session) -> None:
    session.engine.provider.needs("preempts")
    held = session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64, credit=3)
    await session.tokens(held, 3)
    long = [session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64) for _ in range(2)]
    await session.watch.until(lambda: held.preempted > held.resumed)
    await end(session, held)
    assert (held.reason, len(held.ids)) == ("cancelled", 3)
    await end(session, *long)


async def test_at_its_end(session: Session) -> None:
    """Whoever was first: there is one end, and it agrees with what was told."""
    reasons = set()
    for tokens in range(2, 6):
        heard = session.submit(session.engine.provider.counting, max_tokens=tokens)
        await session.tokens(heard, tokens - 1)
        await end(session, heard)
        reasons.add(heard.reason)
        assert heard.reason in ("cancelled", "length")
        assert len(heard.ids) == tokens or heard.reason == "cancelled"
    assert reasons


async def test_twice_and_after_its_end(session: Session) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=100, credit=3)
    await session.tokens(heard, 3)
    session.cancel(heard)
    session.cancel(heard)
    await end(session, heard)
    session.cancel(heard)  # the watch breaks on a second end
    assert (await session.client.ping())["ok"] is True


async def test_of_nobody_beside_one_that_lives(session: Session) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=100, credit=3)
    await session.tokens(heard, 3)
    session.client.cancel([888_888_888, heard.seq, 777_777_777], "cancelled")
    await session.over(heard)


async def test_the_reason_of_a_cancel_is_the_reason_of_the_end(session: Session) -> None:
    for reason, told in (("deadline", "deadline"), ("drained", "cancelled"), ("cancelled", "cancelled")):
        heard = session.submit(session.engine.provider.counting, max_tokens=100, credit=3)
        await session.tokens(heard, 3)
        await end(session, heard, reason=reason)
        assert heard.reason == told


async def test_what_was_held_back_is_told_unless_another_engine_goes_on(session: Session) -> None:
    provider = session.engine.provider
    provider.needs("repeats")
    whole = await session.answer(provider.counting, max_tokens=7 + provider.run_ahead + provider.slack)
    stop = [whole.text.decode() + "\x01never"]
    told = {}
    for reason in ("cancelled", "drained"):
        base = (await session.stats())["generated_tokens"]
        heard = session.submit(provider.counting, max_tokens=100, credit=6, stop=stop)
        await session.until_stats(generated_tokens=lambda n, base=base: n >= base + 6)
        await end(session, heard, reason=reason)
        told[reason] = heard
    assert told["drained"].ids == []
    assert told["drained"].text == b""
    assert told["cancelled"].ids == whole.ids[:6]


async def test_the_room_of_a_cancelled_one_is_free_when_its_end_is_told(session: Session) -> None:
    """Again and again: with a leak of cells or slots the last ones would wait for ever."""
    for _ in range(4):
        long = await occupy(session)
        await end(session, *long)
    heard = await session.answer(session.engine.provider.counting, max_tokens=5)
    assert heard.reason == "length"
