"""An answer that another engine of the same revision began is gone on with; both parts are the whole."""

from __future__ import annotations

import pytest

from conformance.session import Session

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]

TOKENS = 20


@pytest.mark.parametrize("cut", [1, 7, TOKENS - 1])
async def test_both_parts_together_are_the_answer(session: Session, cut: int) -> None:
    provider = session.engine.provider
    provider.needs("continuation")
    provider.needs("repeats")
    whole = await session.answer(provider.counting, max_tokens=TOKENS)
    part = session.submit(provider.counting, max_tokens=TOKENS, credit=cut)
    await session.tokens(part, cut)
    delivered = part.text
    session.cancel(part)
    await session.over(part)
    assert part.ids == whole.ids[:cut]
    for told in (len(delivered), 0):
        continuation = {"tokens": cut, "text_bytes": told}
        rest = await session.answer(provider.counting, part.ids, max_tokens=TOKENS, continuation=continuation)
        assert part.ids + rest.ids == whole.ids
        assert delivered[:told] + rest.text == whole.text
        assert rest.finished["usage"]["generated"] == TOKENS - cut
        assert rest.finished["usage"]["prompt"] == whole.finished["usage"]["prompt"]


async def test_a_stop_string_that_the_loss_cut_in_two_is_found(session: Session) -> None:
    provider = session.engine.provider
    provider.needs("continuation")
    provider.needs("repeats")
    whole = (await session.answer(provider.counting, max_tokens=TOKENS)).text.decode()
    ids = (await session.answer(provider.counting, max_tokens=TOKENS)).ids
    known = await session.answer(provider.counting, max_tokens=8)
    border = len(known.text.decode())
    stop = whole[border - 1 : border + 2]
    at = whole.index(stop)
    expected = await session.answer(provider.counting, max_tokens=TOKENS, stop=[stop])
    told = min(at, border - 1)
    continuation = {"tokens": 8, "text_bytes": len(whole[:told].encode())}
    rest = await session.answer(provider.counting, ids[:8], max_tokens=TOKENS, stop=[stop], continuation=continuation)
    assert whole[:told] + rest.text.decode() == expected.text.decode()
    assert (rest.reason, rest.finished["stop"]) == (expected.reason, expected.finished["stop"])


async def test_an_answer_that_is_whole_already_ends_at_once(session: Session) -> None:
    provider = session.engine.provider
    provider.needs("continuation")
    ids = (await session.answer(provider.counting, max_tokens=6)).ids
    before = (await session.stats())["generated_tokens"]
    continuation = {"tokens": 6, "text_bytes": 0}
    rest = await session.answer(provider.counting, ids, max_tokens=6, continuation=continuation)
    assert (rest.reason, rest.ids) == ("length", [])
    assert (await session.stats())["generated_tokens"] == before


async def test_a_continuation_that_cannot_be_is_refused(session: Session) -> None:
    session.engine.provider.needs("continuation")
    counting, vocabulary = session.engine.provider.counting, session.hello["vocabulary"]
    cases = [
        ([5] * 9, {"tokens": 9, "text_bytes": 0}, "continuation.tokens"),
        ([vocabulary], {"tokens": 1, "text_bytes": 0}, "continuation.tokens"),
        ([5], {"tokens": 1, "text_bytes": 10_000}, "continuation.text_bytes"),
    ]
    for ids, continuation, field in cases:
        heard = session.submit(counting, ids, max_tokens=8, continuation=continuation)
        await session.over(heard)
        assert heard.refused is not None
        assert (heard.refused["reason"], heard.refused["field"]) == ("INVALID_REQUEST", field)
