"""What a guide allows: every text that it lets through is one that `re` and a JSON schema validator take."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from headrace.engine.guide import compile_guide, make_tokenizer
from headrace.engine.request import Guided, RefusalError

TEXT_MAX = 3000
END = 256


def tokenizer_of(*more: bytes) -> LLTokenizer:
    """All bytes, an end, and these."""
    tokens = [*(bytes([value]) for value in range(256)), b"", *more]
    return make_tokenizer(len(tokens), tokens.__getitem__, frozenset({END}))


TOKENIZER = tokenizer_of()


def compiled(kind: str, text: str = "", choices: tuple[str, ...] = ()) -> LLMatcher:
    return compile_guide(Guided(kind, text, choices), TOKENIZER)


def schema_of(schema: Any) -> LLMatcher:
    return compiled("json_schema", json.dumps(schema))


def takes(guide: LLMatcher, text: str | bytes) -> bool:
    said = list(text.encode() if isinstance(text, str) else text)
    matcher = guide.deep_copy()
    return bool(matcher.try_consume_tokens(said) == len(said) and matcher.is_accepting())


def allowed_of(matcher: LLMatcher) -> list[int]:
    bits = matcher.compute_bitmask()
    return [token for token in range(END + 1) if bits[token >> 3] >> (token & 7) & 1]


def some_text(guide: LLMatcher, dice: random.Random) -> bytes | None:
    """A text that it allows, by chance; None where none was found."""
    matcher = guide.deep_copy()
    text = bytearray()
    while len(text) < TEXT_MAX:
        allowed = [token for token in allowed_of(matcher) if token != END]
        if matcher.is_accepting() and (not allowed or dice.random() < 0.5 or len(text) > 200):
            return bytes(text)
        if not allowed:
            return None
        closing = [byte for byte in allowed if byte in b'"}]'] if len(text) > 200 or dice.random() < 0.3 else []
        byte = dice.choice(closing or allowed)
        text.append(byte)
        assert matcher.consume_token(byte), matcher.get_error()
    return None


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
    guide = compiled("regex", pattern) if pattern else None
    if guide is None:
        return
    dice = random.Random(7)
    for _ in range(60):
        text = some_text(guide, dice)
        assert text is not None
        assert re.fullmatch(pattern, text.decode(), re.ASCII), text
    for _ in range(300):
        tried = "".join(dice.choice('abcdxyz 01.é_{"') for _ in range(dice.randrange(6)))
        assert takes(guide, tried) == bool(re.fullmatch(pattern, tried, re.ASCII)), tried


@given(
    st.from_regex(r"([ab.]|\[[ab]\]|\([ab]\|[ab]?\))([*+?]|\{1,3\})?", fullmatch=True).filter(bool),
    st.text("abc", max_size=5),
)
def test_any_regex_agrees_with_re(pattern: str, tried: str) -> None:
    assert takes(compiled("regex", pattern * 2), tried) == bool(re.fullmatch(pattern * 2, tried, re.ASCII))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "invalid regex"),
        ("(?=a)b", "invalid regex"),
        (r"(a)\1", "invalid regex"),
        (r"a\bb", "lookarounds not supported"),
        ("(?>a)", "invalid regex"),
        ("a{99999999999999999999}", "invalid regex"),
        ("(" * 10_000 + "a" + ")" * 10_000, "invalid regex"),
        ("[^\\x00-\\U0010ffff]", "allows nothing"),
    ],
)
def test_a_regex_that_is_none_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(RefusalError) as caught:
        compiled("regex", pattern)
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "guided.regex")
    assert why in caught.value.message
    assert caught.value.message.count("\n") == 0


def test_a_slash_and_a_line_end_in_a_regex_open_nothing() -> None:
    guide = compiled("regex", "a/\nstart: /b/ \\/")
    assert takes(guide, "a/\nstart: /b/ /")
    assert not takes(guide, "b")


# Choices


def test_a_choice_is_one_of_them_and_nothing_else() -> None:
    choices = ("yes", "yesterday", "no", "né", "a.c", '"q\\/', "a\x00\n", "\x7f\u2028 #&~-", "🌊")
    guide = compiled("choice", choices=choices)
    assert all(takes(guide, one) for one in choices)
    assert not any(takes(guide, one) for one in ("", "ye", "yesterdays", "n", "né ", "abc"))


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
    guide = schema_of(schema)
    validator = jsonschema.Draft202012Validator(schema)
    dice = random.Random(11)
    found = 0
    for _ in range(80):
        text = some_text(guide, dice)
        if text is not None:
            found += 1
            validator.validate(json.loads(text))
    assert found > 20


@pytest.mark.parametrize(
    ("schema", "text", "is_taken"),
    [
        ({}, '{"a": [1, -2.5e3, true, null, "x\\n\\té"]}', True),
        ({}, '{"a":  1}', False),
        ({}, '{"a":' + "\n" * 2 + "1}", False),
        ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}', False),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1, "a": "x"}', False),
        ({"properties": {"a/b": {"type": "integer"}}}, '{"a\\/b": "x"}', False),
        ({"properties": {"a": {"type": "integer"}}}, '{"b": 1, "a": "x"}', False),
        ({"properties": {"a": {}}}, '{"b": 1}', False),
        ({"properties": {"a": {}}, "additionalProperties": True}, '{"a": 1, "b": 1}', True),
        ({"properties": {"a": {}}, "required": ["b"]}, '{"a": 1, "b": 1}', True),
        ({"properties": {"const": {"properties": {"a": {}}}}}, '{"const": {"b": 1}}', False),
        ({"const": {"properties": {"a": {}}}}, '{"properties": {"a": {}}}', True),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]},
            '{"a": 1, "b": 2}',
            True,
        ),
        ({"items": {"properties": {"a": {}}}}, '[{"b": 1}]', False),
        ({"anyOf": [{"properties": {"a": {}}}]}, '{"b": 1}', False),
        ({"type": "array", "items": {"allOf": [{"type": "integer"}, {"minimum": 3}]}}, "[3]", True),
        ({"type": "array", "items": {"allOf": [{"type": "integer"}, {"minimum": 3}]}}, "[2]", False),
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
        ("false", "schema is false"),
        ('{"type": "colour"}', "Invalid type: colour"),
        *((f'{{"{key}": {{}}}}', f'Unimplemented keys: ["{key}"]') for key in (
            "not", "contains", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties",
            "unevaluatedItems", "$dynamicRef", "uniqueItems")),
        ('{"minProperties": 2}', "a minProperties above 1"),
        ('{"$ref": "#/x", "x": {"minProperties": 2, "patternProperties": {"a": {}}, "additionalProperties": false}}',
         "a minProperties above 1"),
        ('{"if": {}, "then": {"type": "null"}}', 'Unimplemented keys: ["if", "then"]'),
        ('{"properties": {"a": {"not": {}}}}', 'Unimplemented keys: ["not"]'),
        ('{"uniqueItems": true, "x-guidance": {"lenient": true}}', "the keyword x-guidance"),
        ('{"items": {"uniqueItems": true, "x-guidance": {"lenient": true}}}', 'Unimplemented keys: ["uniqueItems"]'),
        ('{"type": "string", "format": "colour"}', "Unknown format: colour"),
        ('{"type": "string", "pattern": "("}', "regex"),
        ('{"type": "string", "minLength": 3, "maxLength": 2}', "minLength (3) is greater than maxLength (2)"),
        ('{"type": "array", "minItems": -1}', "minItems"),
        ('{"type": "integer", "minimum": 3, "maximum": 2}', "minimum (3) is greater than maximum (2)"),
        ('{"type": "integer", "minimum": 1e999}', ""),
        ('{"enum": []}', "anyOf is empty"),
        ('{"enum": ["x"], "type": "integer"}', "incompatible types"),
        ('{"$ref": "#"}', "allows nothing"),
        ('{"$ref": "#/$defs/none"}', "does not exist"),
        ('{"$ref": "https://example.com/x"}', "is not present"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf constraints are not supported"),
        ('{"const": "\\ud800"}', ""),
        ('{"items": ' * 130 + "{}" + "}" * 130, "recursion limit exceeded"),
        ('{"items": ' * 5000 + "{}" + "}" * 5000, ""),
    ],
)  # fmt: skip
def test_a_schema_that_is_none_or_cannot_be_held_is_refused(schema: str, why: str) -> None:
    with pytest.raises(RefusalError) as caught:
        compiled("json_schema", schema)
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "guided.json_schema")
    assert why in caught.value.message
    assert caught.value.message.count("\n") == 0


_KINDS = ("string", "integer", "number", "boolean", "null")
_WIDER: list[Any] = [
    {"type": "string", "pattern": "b$", "maxLength": 5},
    {"type": "number", "multipleOf": 0.5, "minimum": -5, "maximum": 100},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
    {"type": "integer", "multipleOf": 4},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "minProperties": 1, "maxProperties": 2},
    {"minLength": 2, "maxLength": 4},
]
leaves = st.sampled_from([*({"type": kind} for kind in _KINDS), {"const": "x"}, {"enum": [1, "a"]}, True, *_WIDER])


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
    some = st.lists(inner, min_size=1, max_size=3)
    kinds = st.sampled_from(["anyOf", "anyOf", "allOf", "oneOf"])
    return st.one_of(objects, arrays, st.builds(lambda kind, parts: {kind: parts}, kinds, some))


@settings(deadline=None, max_examples=80)
@given(st.recursive(leaves, grown, max_leaves=6), st.integers(0, 2**32))
def test_texts_of_any_schema_are_valid(schema: Any, seed: int) -> None:
    try:
        guide = schema_of(schema)
    except RefusalError:
        assume("allOf" not in str(schema) and "oneOf" not in str(schema))
        raise
    text = some_text(guide, random.Random(seed))
    assume(text is not None)
    assert text is not None
    value = json.loads(text)
    assume("inf" not in str(value))  # the validator cannot divide it
    jsonschema.Draft202012Validator(schema).validate(value)
