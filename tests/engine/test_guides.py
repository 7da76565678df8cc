"""What a guide allows: every text that its automaton lets through is one that `re` and a JSON schema validator take."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.engine.automaton import DEAD, Automaton, Builder, Matcher, TooLarge, utf8_ranges
from headrace.engine.guide import WORK_MAX, compile_guide
from headrace.engine.guide_regex import merged, without
from headrace.engine.json_numbers import patterns
from headrace.engine.request import Guided, RefusalError

TEXT_MAX = 3000


def automaton_of(kind: str, text: str = "", choices: tuple[str, ...] = ()) -> Automaton:
    return compile_guide(Guided(kind, text, choices))


def schema_of(schema: Any) -> Automaton:
    return automaton_of("json_schema", json.dumps(schema))


def takes(automaton: Automaton, text: str | bytes) -> bool:
    matcher = Matcher(automaton, 10**9)
    state = matcher.advance(matcher.start, text.encode() if isinstance(text, str) else text)
    return state != DEAD and matcher.accepts(state)


def some_text(automaton: Automaton, dice: random.Random) -> bytes | None:
    """A text that it allows, by chance; None where none was found."""
    matcher = Matcher(automaton, 10**9)
    state, text = matcher.start, bytearray()
    while len(text) < TEXT_MAX:
        allowed = [byte for byte in range(256) if matcher.first_bytes(state) >> byte & 1]
        if matcher.accepts(state) and (not allowed or dice.random() < 0.5 or len(text) > 200):
            return bytes(text)
        closing = [byte for byte in allowed if byte in b'"}]'] if len(text) > 200 or dice.random() < 0.3 else []
        byte = dice.choice(closing or allowed)
        text.append(byte)
        state = matcher.advance(state, bytes([byte]))
        assert state != DEAD
    return None


# Characters and numbers


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF), st.data())
def test_ranges_of_characters_are_their_utf8(one: int, other: int, data: st.DataObject) -> None:
    low, high = sorted((one, other))
    sequences = utf8_ranges(low, high)
    for code in {low, high, max(0, low - 1), min(0x10FFFF, high + 1), data.draw(st.integers(0, 0x10FFFF))}:
        if 0xD800 <= code <= 0xDFFF:
            continue
        written = chr(code).encode()
        found = [
            s
            for s in sequences
            if len(s) == len(written) and all(a <= b <= z for b, (a, z) in zip(written, s, strict=True))
        ]
        assert len(found) == (low <= code <= high)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_patterns_of_digits_are_the_numbers_between(one: int, other: int, tried: int) -> None:
    low, high = sorted((one, other))
    found = patterns(low, high)
    for number in {low, high, max(0, low - 1), high + 1, tried}:
        digits = [int(digit) for digit in str(number)]
        count = sum(
            len(p) == len(digits) and all(a <= d <= z for d, (a, z) in zip(digits, p, strict=True)) for p in found
        )
        assert count == (low <= number <= high)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda p: (min(p), max(p)))))
def test_what_is_without_some_ranges_is_the_rest(ranges: list[tuple[int, int]]) -> None:
    kept, rest = merged(ranges), without(merged(ranges), ((5, 40),))
    inside = {code for low, high in kept for code in range(low, high + 1)}
    assert {c for low, high in rest for c in range(low, high + 1)} == set(range(5, 41)) - inside


# Regular expressions

REGEXES = [
    "",
    "abc",
    "a|bc|",
    "(ab)*c+d?",
    "[a-c]{2,4}x{3}y{0,2}z{2,}",
    r"\d+\.\d*|\w\W\s?",
    "[^a-y]é?",
    ".{1,3}",
    "^(a|b)$",
    "^a|b$",
    "(a*)*b",
    "((a?){3}){2}",
    "(?:x|y)*?z",
    r"[\]\-^]+",
    "𐎠[é-ü]",
    r"\{\"a\": [0-9]\}",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_lets_through_what_re_matches(pattern: str) -> None:
    automaton = automaton_of("regex", pattern) if pattern else None
    if automaton is None:
        return
    dice = random.Random(7)
    for _ in range(60):
        text = some_text(automaton, dice)
        assert text is not None
        assert re.fullmatch(pattern, text.decode(), re.ASCII), text
    for _ in range(300):
        tried = "".join(dice.choice('abcdxyz 01.é_{"') for _ in range(dice.randrange(6)))
        assert takes(automaton, tried) == bool(re.fullmatch(pattern, tried, re.ASCII)), tried


@given(
    st.from_regex(r"([ab.]|\[[ab]\]|\([ab]\|[ab]?\))([*+?]|\{1,3\})?", fullmatch=True).filter(bool),
    st.text("abc", max_size=5),
)
def test_any_regex_agrees_with_re(pattern: str, tried: str) -> None:
    assert takes(automaton_of("regex", pattern * 2), tried) == bool(re.fullmatch(pattern * 2, tried, re.ASCII))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is no regular expression"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "back-reference"),
        (r"a\bb", "an anchor or a border inside"),
        ("(?i)a", "flags"),
        ("(?i:a)b", "flags"),
        ("(?>a)", "atomic"),
        ("a++", "possessive"),
        ("a{99999999999999999999}", "is no regular expression"),
        ("(((a{99}){99}){99}){99}", "is too large"),
        ("(a?){5000}", "is too large, or can be read in too many ways"),
        ("(" * 3000 + "a" + ")" * 3000, ""),
        ("(){1000000}", "is too large"),
    ],
)
def test_a_regex_that_is_none_or_too_much_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(RefusalError) as caught:
        automaton_of("regex", pattern)
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "guided.regex")
    assert why in caught.value.message


# Choices


def test_a_choice_is_one_of_them_and_nothing_else() -> None:
    choices = ("yes", "yesterday", "no", "né")
    automaton = automaton_of("choice", choices=choices)
    assert all(takes(automaton, one) for one in choices)
    assert not any(takes(automaton, one) for one in ("", "ye", "yesterdays", "n", "né "))


# JSON

SCHEMAS: list[Any] = [
    True,
    {},
    {"type": "object"},
    {"type": ["integer", "null"], "minimum": 3, "title": "x"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": '^[A-Z"\\\\\n]{2,3}é$'},
    {"type": "string", "pattern": "^b"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"enum": ["a", 1, 1.5, None, {"x": [1]}, 'é"'], "type": ["string", "object", "integer"]},
    {"const": {"a": "b"}},
    {"type": "integer", "exclusiveMinimum": -13, "maximum": 107.5},
    {"type": "integer", "minimum": -5, "exclusiveMaximum": -1},
    {"type": "number", "minimum": 0},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "maxItems": 0},
    {"prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 1},
    {"prefixItems": [{"type": "null"}], "items": {"type": "string"}, "minItems": 3},
    {"prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "maxItems": 2},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b/~": {"type": "boolean"}, "c": {"type": "null"}, "n": False},
        "required": ["b/~"],
        "additionalProperties": False,
    },
    {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}},
    {"type": "object", "required": ["x"], "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "boolean"}}},
    {"type": "object", "additionalProperties": False},
    {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "n": {"type": "null"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]},
            {"type": "array", "items": {"type": "integer"}},
        ]
    },
    {"allOf": [{"type": "boolean"}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda one: json.dumps(one)[:40])
def test_every_text_that_a_schema_lets_through_is_valid(schema: Any) -> None:
    automaton = schema_of(schema)
    validator = jsonschema.Draft202012Validator(schema)
    dice = random.Random(11)
    found = 0
    for _ in range(80):
        text = some_text(automaton, dice)
        if text is not None:
            found += 1
            validator.validate(json.loads(text))
    assert found > 20


@pytest.mark.parametrize(
    ("schema", "text", "is_taken"),
    [
        ({}, '{"a": [1, -2.5e3, true, null, "x\\u00e9"]}', True),
        ({}, '{\n  "a": [\n    1\n  ]\n}', True),
        ({}, '{"a":1,"b":[]}', True),
        ({"type": "string", "pattern": "b"}, '"xbé"', True),
        ({"type": "string", "pattern": "b"}, '"xé"', False),
        ({"type": "string", "pattern": "^b|c$"}, '"bx"', True),
        ({"type": "string", "pattern": "^b|c$"}, '"xc"', True),
        ({"type": "string", "pattern": "^b|c$"}, '"xb"', False),
        ({}, "01", False),
        ({}, '"\t"', False),
        ({}, '"\\ud800"', False),
        ({"type": "integer", "minimum": 18}, "17", False),
        ({"type": "integer", "minimum": 18}, "118", True),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, '{"b": 1}', True),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, '{"a": 1}', False),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, '{"a": 1, "b": 2}', True),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, '{, "b": 2}', False),
        ({"properties": {"a": {}, "b": {}}}, "{ }", True),
        ({"properties": {"a": {}, "b": {}}}, '{"b": 1, "a": 2}', False),
        ({"type": "array"}, "[ ]", True),
        ({"type": "array"}, "[1,]", False),
    ],
)
def test_texts_of_schemas(schema: Any, text: str, is_taken: bool) -> None:
    assert takes(schema_of(schema), text) is is_taken


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object"),
        ("NaN", "is not JSON"),
        ("false", "allows nothing"),
        ('{"type": "colour"}', "has a type that there is not"),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems, which is not supported"),
        ('{"type": "number", "maximum": 3}', "maximum, which is not supported"),
        ('{"properties": {"a": {"not": {}}}}', "at /properties/a has the keyword not"),
        ('{"type": "string", "format": "ipv4"}', "a format that is not supported"),
        ('{"type": "string", "pattern": "("}', "at /pattern is no regular expression"),
        ('{"type": "string", "minLength": 3, "maxLength": 2}', "more characters than it allows"),
        ('{"type": "array", "minItems": 3, "maxItems": 2}', "more items than it allows"),
        ('{"type": "array", "minItems": -1}', "minItems that is no whole number"),
        ('{"type": "integer", "minimum": 3, "maximum": 2}', "allows no integer"),
        ('{"type": "integer", "minimum": 1e999}', "minimum that is no number"),
        ('{"enum": []}', "an enum that is no list"),
        ('{"enum": ["x"], "type": "integer"}', "without a value of its type"),
        ('{"$ref": "#"}', "refers to itself"),
        ('{"$ref": "#/a", "a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}', "beside $ref"),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},'
         ' "b": {"$ref": "#/$defs/a"}}}', "refers to itself"),
        ('{"$ref": "#/$defs/none"}', "to what is not there"),
        ('{"$ref": "https://example.com/x"}', "does not begin with #/"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "a oneOf whose alternatives"),
        ('{"allOf": [{}, {}]}', "an allOf of more than one"),
        ('{"required": ["a"], "additionalProperties": false}', "requires a property that it does not allow"),
        ('{"properties": {"\\ud800": {}}}', "not valid Unicode"),
        ('{"const": "\\ud800"}', "not valid Unicode"),
        ('{"type": "string", "maxLength": 1000000}', "is too large"),
        ('{"items": ' * 80 + "{}" + "}" * 80, "has more than 64 levels"),
        ('{"items": ' * 5000 + "{}" + "}" * 5000, ""),
    ],
)  # fmt: skip
def test_a_schema_that_is_none_or_cannot_be_held_is_refused(schema: str, why: str) -> None:
    with pytest.raises(RefusalError) as caught:
        automaton_of("json_schema", schema)
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "guided.json_schema")
    assert why in caught.value.message


_KINDS = ("string", "integer", "number", "boolean", "null")
leaves = st.sampled_from([*({"type": kind} for kind in _KINDS), {"const": "x"}, {"enum": [1, "a"]}, True])


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", "é", 'q"'])
    objects = st.dictionaries(keys, inner, max_size=3).flatmap(
        lambda members: st.builds(
            lambda required: {"type": "object", "properties": members, "required": required},
            st.lists(st.sampled_from(sorted(members) or ["a"]), unique=True) if members else st.just([]),
        )
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    return st.one_of(objects, arrays, st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)))


@settings(deadline=None, max_examples=80)
@given(st.recursive(leaves, grown, max_leaves=6), st.integers(0, 2**32))
def test_texts_of_any_schema_are_valid(schema: Any, seed: int) -> None:
    text = some_text(schema_of(schema), random.Random(seed))
    assume(text is not None)
    assert text is not None
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


# Bounds


def test_a_schema_that_reads_a_text_in_ever_more_ways_is_given_up_in_time() -> None:
    twice = [{"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": n} for n in (1, 2, 3)]
    automaton = schema_of({"$defs": {"n": {"anyOf": twice}}, "$ref": "#/$defs/n"})
    matcher = Matcher(automaton, WORK_MAX)
    with pytest.raises(TooLarge):
        matcher.advance(matcher.start, b"[" * 100)
    assert matcher.work <= WORK_MAX + 2048


def test_a_grammar_that_doubles_its_readings_with_each_letter_is_given_up_in_time() -> None:
    matcher = Matcher(automaton_of("grammar", 'root ::= "a" root "x" | "a" root "y" | "b"'), WORK_MAX)
    with pytest.raises(TooLarge):
        matcher.advance(matcher.start, b"a" * 100)
    assert matcher.work <= WORK_MAX + 2048


def test_a_matcher_forgets_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.automaton.MEMORY_MAX", 50)
    matcher = Matcher(schema_of({"type": "array"}), 10**9)
    state = matcher.advance(matcher.start, b"[" * 60)
    tidied = matcher.tidy(state)
    assert tidied == 0
    assert matcher.accepts(matcher.advance(tidied, b"]" * 60))
    assert not matcher.accepts(matcher.advance(tidied, b"]" * 59))


def test_a_builder_has_an_end() -> None:
    builder = Builder()
    with pytest.raises(TooLarge):
        builder.literal(b"x" * 30_000)
