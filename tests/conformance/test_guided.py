"""Guided decoding: the kinds that an engine says it can do hold, and the others are refused, each by its name."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest

from conformance.session import Session

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]

KINDS: dict[str, Any] = {
    "json_schema": '{"type": "object"}',
    "json_object": True,
    "regex": "[ab]{3}",
    "choice": ["sea", "see", "river"],
    "grammar": 'root ::= "ab"',
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "deep": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}, "maxItems": 3},
        "kind": {"enum": ["river", "sea"]},
    },
    "required": ["name", "deep", "kind"],
    "additionalProperties": False,
}
SAMPLED = {"temperature": 1.5, "seed": 7}
BASE = {"prompt": "the water", "max_tokens": 400}


def fields(*, takes: bool, hello: Any) -> list[tuple[dict[str, Any], str]]:
    """Each kind, of those that the engine takes or does not, and the field that is named where it is refused."""
    return [({name: text}, f"guided.{name}") for name, text in KINDS.items() if (name in hello["guided"]) is takes]


async def test_what_it_does_not_do_is_refused_by_its_name(session: Session) -> None:
    assert set(session.hello["guided"]) <= set(KINDS)
    for guided, field in fields(takes=False, hello=session.hello):
        heard = session.submit(BASE, guided=guided)
        await session.over(heard)
        assert heard.refused is not None, guided
        assert (heard.refused["reason"], heard.refused["field"]) == ("INVALID_REQUEST", field)


@pytest.mark.parametrize(
    ("guided", "field"),
    [
        ({}, "guided"),
        ([], "guided"),
        ({"colour": "blue"}, "guided"),
        ({"choice": ["a"], "regex": "a"}, "guided"),
        ({"choice": []}, "guided.choice"),
        ({"choice": [""]}, "guided.choice"),
        ({"choice": ["a", 7]}, "guided.choice[1]"),
        ({"choice": ["a"] * 257}, "guided.choice"),
        ({"regex": ""}, "guided.regex"),
        ({"regex": 7}, "guided.regex"),
        ({"regex": "a" * 32769}, "guided.regex"),
        ({"json_object": False}, "guided.json_object"),
    ],
)
async def test_a_faulty_guide_is_refused_by_its_field(session: Session, guided: Any, field: str) -> None:
    heard = session.submit(BASE, guided=guided)
    await session.over(heard)
    assert heard.refused is not None
    assert (heard.refused["reason"], heard.refused["field"]) == ("INVALID_REQUEST", field)


async def test_a_guide_is_for_a_whole_answer_that_ends_by_itself(session: Session) -> None:
    for changes in ({"ignore_eos": True}, {"continuation": {"tokens": 1, "text_bytes": 0}}):
        tokens = [5] if "continuation" in changes else []
        heard = session.submit(BASE, tokens, guided={"choice": ["a"]}, **changes)
        await session.over(heard)
        assert heard.refused is not None
        assert heard.refused["field"] == "guided"


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
async def test_a_choice_is_one_of_them(session: Session, sampling: dict[str, Any]) -> None:
    session.engine.provider.needs("guided_choice")
    heard = await session.answer(BASE, guided={"choice": KINDS["choice"]}, sampling=sampling)
    assert heard.text.decode() in KINDS["choice"]
    assert heard.reason == "stop"


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
async def test_an_answer_by_a_schema_is_valid_by_it(session: Session, sampling: dict[str, Any]) -> None:
    session.engine.provider.needs("guided_json")
    heard = await session.answer(BASE, guided={"json_schema": json.dumps(SCHEMA)}, sampling=sampling)
    assert heard.reason == "stop"
    jsonschema.validate(json.loads(heard.text.decode()), SCHEMA)


async def test_an_answer_by_a_regex_matches_it(session: Session) -> None:
    session.engine.provider.needs("guided_json")
    heard = await session.answer(BASE, guided={"regex": "(ab|é){2,4}[0-9]{3}"}, sampling=SAMPLED)
    assert re.fullmatch("(ab|é){2,4}[0-9]{3}", heard.text.decode())


async def test_an_answer_by_a_grammar_is_of_it(session: Session) -> None:
    session.engine.provider.needs("guided_json")
    grammar = 'root ::= item item? "!"\nitem ::= "ab" | [0-9] [0-9]'
    heard = await session.answer(BASE, guided={"grammar": grammar}, sampling=SAMPLED)
    assert re.fullmatch("(ab|[0-9][0-9]){1,2}!", heard.text.decode())


async def test_an_object_is_json(session: Session) -> None:
    session.engine.provider.needs("guided_json")
    heard = await session.answer(BASE, guided={"json_object": True}, sampling=SAMPLED)
    assert heard.text.startswith(b"{")
    if heard.reason == "stop":
        assert isinstance(json.loads(heard.text.decode()), dict)


async def test_a_guided_answer_waits_for_credit_and_goes_on_where_it_was(session: Session) -> None:
    session.engine.provider.needs("guided_json")
    request = {**BASE, "guided": {"json_schema": json.dumps(SCHEMA)}, "sampling": {"temperature": 0.0}}
    whole = await session.answer(request)
    heard = session.submit(request, credit=5)
    await session.tokens(heard, 5)
    for limit in (9, 20, -1):
        await asyncio.sleep(0.05)
        assert len(heard.ids) <= heard.credit
        session.credit(heard, limit)
    await session.over(heard)
    assert heard.text == whole.text


async def test_many_guided_answers_at_once_beside_others(session: Session) -> None:
    session.engine.provider.needs("guided_choice")
    guided = [session.submit(BASE, guided={"choice": ["sea", f"river {n}"]}) for n in range(24)]
    others = [session.submit(session.engine.provider.counting, max_tokens=4) for _ in range(8)]
    await session.over(*guided, *others)
    for number, heard in enumerate(guided):
        assert heard.text.decode() in ("sea", f"river {number}")
    assert {heard.reason for heard in others} == {"length"}
