"""What an answer is: counts, characters, the ways it stops, draws and log probabilities."""

from __future__ import annotations

import math

import pytest

from conformance.providers import CONTEXT
from conformance.session import Session
from conformance.watch import Heard

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]


async def undisturbed(session: Session, tokens: int) -> Heard:
    session.engine.provider.needs("repeats")
    heard = await session.answer(session.engine.provider.counting, max_tokens=tokens)
    assert len(heard.ids) == tokens
    return heard


def pieces(heard: Heard) -> list[tuple[list[int], str]]:
    """Ids that were told together, with their text."""
    return [(ids, text.decode()) for ids, text in heard.pieces if ids]


@pytest.mark.parametrize("tokens", [1, 2, 17])
async def test_there_are_as_many_tokens_as_were_asked_for(session: Session, tokens: int) -> None:
    heard = await session.answer(session.engine.provider.counting, max_tokens=tokens)
    assert heard.reason == "length"
    usage = heard.finished["usage"]
    assert len(heard.ids) == usage["emitted"] == usage["generated"] == tokens
    assert usage["prompt"] > 0
    assert all(0 <= token < session.hello["vocabulary"] for token in heard.ids)


async def test_each_priority_is_answered_and_changes_no_answer(session: Session) -> None:
    assert session.hello["priority"] is True
    heard = [session.submit(session.engine.provider.counting, max_tokens=4, priority=p) for p in (1, 2, 3, 4, None)]
    await session.over(*heard)
    assert [(one.reason, len(one.ids)) for one in heard] == [("length", 4)] * 5
    if "repeats" in session.engine.provider.features:
        assert len({tuple(one.ids) for one in heard}) == 1


async def test_without_max_tokens_the_cap_bounds_it_and_then_the_context(session: Session) -> None:
    counting = session.engine.provider.counting
    capped = await session.answer(counting, max_tokens=None, max_tokens_cap=9)
    assert (capped.reason, len(capped.ids)) == ("length", 9)
    assert capped.admitted is not None
    open_ended = session.submit(counting, max_tokens=None)
    await session.tokens(open_ended, 3)
    if "kv_budget" in session.engine.provider.features:
        stats = await session.stats()
        assert stats["kv_reserved"] >= CONTEXT - capped.admitted["prompt_tokens"]
    session.cancel(open_ended)
    await session.over(open_ended)


async def test_greedy_is_the_same_again_and_beside_others(session: Session) -> None:
    alone = await undisturbed(session, 16)
    together = [session.submit(session.engine.provider.counting, max_tokens=16) for _ in range(4)]
    await session.over(*together)
    assert [one.ids for one in together] == [alone.ids] * 4
    assert {one.text for one in together} == {alone.text}


async def test_a_character_that_is_cut_over_tokens_comes_whole(session: Session) -> None:
    """The watch decodes each part; that some character came with several ids shows that the test saw a cut."""
    session.engine.provider.needs("cuts")
    heard = await session.answer(session.engine.provider.cutting, max_tokens=24)
    text = heard.text.decode("utf-8")
    assert any(ord(character) > 0xFFFF for character in text), text
    assert any(len(ids) > 1 and len(text) <= 2 for ids, text in pieces(heard)), pieces(heard)


async def test_an_end_in_the_middle_of_a_character_gives_no_half_of_it(session: Session) -> None:
    session.engine.provider.needs("cuts")
    for tokens in range(1, 6):
        heard = await session.answer(session.engine.provider.cutting, max_tokens=tokens)
        heard.text.decode("utf-8")
        assert len(heard.ids) == heard.finished["usage"]["generated"]


async def test_a_stop_string_across_a_token_border_never_shows(session: Session) -> None:
    whole = (await undisturbed(session, 24)).text.decode()
    heard = await session.answer(session.engine.provider.counting, max_tokens=24)
    border = len("".join(text for _, text in pieces(heard)[:12]))
    for begin, end in ((border - 1, border + 1), (border - 2, border + 3), (border - 1, border + 6)):
        stop = whole[begin:end]
        at = whole.index(stop)
        stopped = await session.answer(session.engine.provider.counting, max_tokens=24, stop=[stop])
        assert (stopped.reason, stopped.finished["stop"]) == ("stop", {"kind": "string", "value": stop})
        assert stopped.text.decode() == whole[:at]
        assert stopped.ids == heard.ids[: len(stopped.ids)], "ids are those of the answer"
        assert len(stopped.ids) <= stopped.finished["usage"]["generated"]


async def test_the_stop_string_that_begins_first_counts(session: Session) -> None:
    whole = (await undisturbed(session, 24)).text.decode()
    later, sooner = whole[12:15], whole[7:10]
    first = min((whole.index(later), later), (whole.index(sooner), sooner))
    heard = await session.answer(session.engine.provider.counting, max_tokens=24, stop=[later, sooner])
    assert heard.text.decode() == whole[: first[0]]
    assert heard.finished["stop"]["value"] == first[1]


async def test_what_only_begins_a_stop_string_is_told_in_the_end(session: Session) -> None:
    whole = await undisturbed(session, 16)
    ending = whole.text.decode()[-3:]
    heard = await session.answer(session.engine.provider.counting, max_tokens=16, stop=[ending + "\x01never"])
    assert (heard.reason, heard.ids, heard.text) == ("length", whole.ids, whole.text)


async def test_a_stop_token_ends_it_and_is_not_told(session: Session) -> None:
    whole = await undisturbed(session, 16)
    token = whole.ids[8]
    at = whole.ids.index(token)
    heard = await session.answer(session.engine.provider.counting, max_tokens=16, stop_token_ids=[token])
    assert (heard.reason, heard.finished["stop"]) == ("stop", {"kind": "token", "value": token})
    assert heard.ids == whole.ids[:at]
    assert heard.finished["usage"]["generated"] == at + 1


async def test_the_models_own_end_ends_it_unless_it_is_ignored(session: Session) -> None:
    session.engine.provider.needs("ends")
    ending = session.engine.provider.ending
    heard = await session.answer(ending, max_tokens=30)
    assert heard.reason == "stop"
    assert heard.finished["stop"]["kind"] == "eos"
    assert heard.finished["usage"]["generated"] == len(heard.ids) + 1
    assert heard.finished["stop"]["value"] not in heard.ids
    on = await session.answer(ending, max_tokens=30, ignore_eos=True)
    assert (on.reason, on.finished["usage"]["generated"]) == ("length", 30)


async def test_a_seed_fixes_the_draw_and_another_changes_it(session: Session) -> None:
    session.engine.provider.needs("seed")
    drawn = []
    for seed in (11, 11, 12):
        sampling = {"temperature": 1.5, "seed": seed}
        drawn.append(await session.answer(session.engine.provider.counting, max_tokens=24, sampling=sampling))
    assert drawn[0].ids == drawn[1].ids
    assert drawn[0].ids != drawn[2].ids


async def test_the_sampling_settings_are_taken(session: Session) -> None:
    """Each at a value that is not its default; what they do to a draw is the engine's own tests' matter."""
    sampling = {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "seed": 2**64 - 1,
    }
    heard = await session.answer(session.engine.provider.counting, max_tokens=8, sampling=sampling)
    assert (heard.reason, len(heard.ids)) == ("length", 8)


async def test_logprobs_come_with_each_token_and_only_where_asked_for(session: Session) -> None:
    session.engine.provider.needs("logprobs")
    counting = session.engine.provider.counting
    rich = session.submit(counting, max_tokens=8, top_logprobs=3)
    bare = session.submit(counting, max_tokens=8, top_logprobs=0)
    plain = session.submit(counting, max_tokens=8)
    await session.over(rich, bare, plain)
    for heard in (rich, bare):
        assert len(heard.logprobs) == len(heard.ids) == 8
        assert all(math.isfinite(value) and value <= 0 for value in heard.logprobs)
    assert bare.top == [[]] * 8
    assert not plain.logprobs
    for token, logprob, top in zip(rich.ids, rich.logprobs, rich.top, strict=True):
        values = [value for _, value in top]
        assert len(top) == 3
        assert values == sorted(values, reverse=True)
        assert top[0][0] == token, "greedy takes the likeliest"
        assert math.isclose(values[0], logprob, abs_tol=1e-3)
        assert sum(math.exp(value) for value in values) <= 1.001


async def test_a_conversation_is_written_out_with_the_models_template(session: Session) -> None:
    session.engine.provider.needs("messages")
    messages = [{"role": "user", "content": "Hello."}]
    heard = await session.answer({"messages": messages}, max_tokens=4, ignore_eos=True)
    bare = await session.answer({"prompt": "Hello."}, max_tokens=4, ignore_eos=True)
    assert heard.finished["usage"]["prompt"] > bare.finished["usage"]["prompt"]


async def test_a_prompt_of_ids_is_taken_as_it_is(session: Session) -> None:
    ids = [token % session.hello["vocabulary"] for token in range(5, 25)]
    heard = await session.answer({"prompt_tokens": len(ids)}, ids, max_tokens=4, ignore_eos=True)
    assert heard.finished["usage"]["prompt"] == len(ids)
