"""Faulty requests: each is refused with its class and field, costs nothing, and spoils nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.session import Session

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]

CASES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens_cap": 0}, "max_tokens_cap"),
    ({"sampling": []}, "sampling"),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
    ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
    ({"sampling": {"top_p": 0}}, "sampling.top_p"),
    ({"sampling": {"top_p": 1.01}}, "sampling.top_p"),
    ({"sampling": {"top_k": -1}}, "sampling.top_k"),
    ({"sampling": {"min_p": 2}}, "sampling.min_p"),
    ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
    ({"sampling": {"presence_penalty": 101}}, "sampling.presence_penalty"),
    ({"sampling": {"frequency_penalty": -101}}, "sampling.frequency_penalty"),
    ({"sampling": {"seed": 2**64}}, "sampling.seed"),
    ({"sampling": {"beams": 4}}, "sampling.beams"),
    ({"stop": "x"}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["ok", "x" * 257]}, "stop[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"credit": -2}, "credit"),
    ({"deadline_ms": -1}, "deadline_ms"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"priority": 0}, "priority"),
    ({"priority": 5}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"colour": "blue"}, "colour"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
    ({"prompt": None, "messages": []}, "messages"),
    ({"prompt": None, "messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"prompt": None, "messages": [{"role": "user"}]}, "messages[0].content"),
]


async def test_each_fault_is_named_and_spoils_nobody(session: Session) -> None:
    """All in one operation, between requests that are good."""
    base = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
    before = await session.stats()
    first = session.submit(base)
    faulty = [(session.submit({**base, **fields}), fields, field) for fields, field in CASES]
    last = session.submit(base)
    await session.over(first, last, *(heard for heard, _, _ in faulty))
    for heard, fields, field in faulty:
        assert heard.refused is not None, f"{fields} was taken"
        assert (heard.refused["reason"], heard.refused["field"]) == ("INVALID_REQUEST", field), fields
    assert (first.reason, last.reason) == ("length", "length")
    after = await session.until_stats(active=0)
    assert after["generated_tokens"] == before["generated_tokens"] + 6, "something was computed for a refused one"


async def test_ids_outside_the_vocabulary_are_refused(session: Session) -> None:
    for token in (session.hello["vocabulary"], -1):
        heard = session.submit({"prompt_tokens": 2, "max_tokens": 3}, [1, token])
        await session.over(heard)
        assert heard.refused is not None
        assert (heard.refused["reason"], heard.refused["field"]) == ("INVALID_REQUEST", "tokens")


async def test_a_sequence_id_that_lives_is_ignored_when_it_comes_again(session: Session) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=8, credit=3)
    await session.tokens(heard, 3)
    again = {"seq": heard.seq, **session.engine.provider.counting, "max_tokens": 8, "credit": -1}
    session.client.generate(again)
    assert (await session.client.ping())["ok"] is True
    session.credit(heard, -1)
    await session.over(heard)
    assert len(heard.ids) == 8


async def test_a_queue_that_is_full_refuses_with_overloaded(session: Session) -> None:
    from conformance.providers import WAITING
    from conformance.test_cancel import end, occupy

    long = await occupy(session)
    many = [session.submit(session.engine.provider.counting, max_tokens=200) for _ in range(WAITING + 5)]
    await session.watch.until(lambda: any(one.refused for one in many))
    await session.until_stats(waiting=WAITING)
    refused = [one for one in many if one.refused]
    assert {one.refused["reason"] for one in refused if one.refused} == {"OVERLOADED"}
    assert refused == many[WAITING:], "the last ones are those that are refused"
    await end(session, *long, *(one for one in many if not one.refused))
