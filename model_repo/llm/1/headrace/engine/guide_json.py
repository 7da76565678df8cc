"""A JSON schema as a part of an automaton. Every text that it allows is valid; not every valid text is allowed.

What is left out, so that nothing wrong can be said: properties come in the order of the schema, none that it does not
name (unless it names none); numbers have at most 15 digits before and behind the point, whole ones 18; between two
parts there is at most a blank, or one or two line ends and 20 blanks. A keyword that would forbid something and cannot
be held is refused, never overlooked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headrace.engine.automaton import Builder, Fragment
from headrace.engine.guide_regex import BadRegex, regex_part
from headrace.engine.json_numbers import integer_between
from headrace.engine.json_parts import JsonParts
from headrace.engine.schema_reading import (
    BadSchema,
    bound,
    count,
    disjoint,
    escaped,
    is_of,
    parse_schema,
    resolve,
    types,
)

DEPTH_MAX = 64
"""Levels of a schema."""
_ANNOTATIONS = frozenset(
    {
        "$schema",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$defs",
        "definitions",
        "discriminator",
    }
)
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
"""The form alone: the 31st of a month that has 30 days is let through."""


def any_object(builder: Builder) -> Fragment:
    """Any JSON object."""
    return JsonParts(builder).typed("object")


def schema_part(builder: Builder, text: str) -> Fragment:
    """What the schema in `text` allows. Raises `BadSchema`, and `TooLarge` from the builder."""
    document = parse_schema(text)
    schema = _Schema(builder, document)
    whole = schema.visit(document, "", 0)
    schema.check_circles()
    return whole


class _Schema:
    """`root` is the whole document, which references lead into."""

    def __init__(self, builder: Builder, root: Any) -> None:
        self._builder = builder
        self._parts = JsonParts(builder)
        self._root = root
        self._within = ""
        self._same: dict[str, set[str]] = {}
        """By reference, or place: what it may stand for, without a value around it."""

    def visit(self, schema: Any, at: str, depth: int) -> Fragment:
        """A value of `schema`, which stands at the pointer `at`."""
        if schema is True:
            return self._parts.any()
        if not isinstance(schema, dict):
            raise BadSchema(at, "allows nothing" if schema is False else "must be an object")
        if depth > DEPTH_MAX:
            raise BadSchema("", f"has more than {DEPTH_MAX} levels")
        given = schema.keys() - _ANNOTATIONS - ({"$id"} if not at else set())
        if not given:
            return self._parts.any()
        for name, make in (
            ("$ref", self._reference),
            ("const", self._constant),
            ("enum", self._constant),
            ("anyOf", self._any_of),
            ("oneOf", self._any_of),
            ("allOf", self._all_of),
        ):
            if name in given:
                beside = given - {name} - ({"type"} if make == self._constant else set())
                if beside:
                    raise BadSchema(at, f"has {sorted(beside)[0][:64]} beside {name}, which is not supported")
                return make(schema, name, at, depth)
        return self._of_types(schema, given, at, depth)

    def check_circles(self) -> None:
        """References that lead back to themselves without a value between them are no schema."""
        for start in self._same:
            seen: set[str] = set()
            todo = set(self._same[start])
            while todo:
                one = todo.pop()
                if one == start:
                    raise BadSchema(start.removeprefix("#"), "refers to itself")
                if one not in seen:
                    seen.add(one)
                    todo |= self._same.get(one, set())

    # What is composed

    def _reference(self, schema: Mapping[str, Any], name: str, at: str, depth: int) -> Fragment:
        pointer = schema[name]
        target = resolve(self._root, pointer, at)
        self._same.setdefault(self._within, set()).add(pointer)
        rule = ("reference", pointer)
        if not self._builder.knows(rule):
            self._builder.reserve(rule)
            outer, self._within = self._within, pointer
            self._builder.define(rule, self.visit(target, pointer.removeprefix("#"), depth + 1))
            self._within = outer
        return self._builder.call(rule)

    def _value(self, schema: Any, at: str, depth: int) -> object:
        """The rule of a value inside another one: what it refers to may refer back."""
        rule = ("value", at)
        if not self._builder.knows(rule):
            self._builder.reserve(rule)
            outer, self._within = self._within, f"inside {at}"
            self._builder.define(rule, self.visit(schema, at, depth + 1))
            self._within = outer
        return rule

    def _constant(self, schema: Mapping[str, Any], name: str, at: str, depth: int) -> Fragment:
        values = [schema[name]] if name == "const" else schema[name]
        if not isinstance(values, list) or not values:
            raise BadSchema(at, "has an enum that is no list with something in it")
        kinds = types(schema, at) if "type" in schema else None
        texts = [json.dumps(one, ensure_ascii=False) for one in values if kinds is None or is_of(one, kinds)]
        if not texts:
            raise BadSchema(at, f"has a {name} without a value of its type")
        try:
            return self._builder.literals([text.encode() for text in texts])
        except UnicodeEncodeError:
            raise BadSchema(at, f"has a {name} that is not valid Unicode text") from None

    def _any_of(self, schema: Mapping[str, Any], name: str, at: str, depth: int) -> Fragment:
        schemas = schema[name]
        if not isinstance(schemas, list) or not schemas:
            raise BadSchema(at, f"has a {name} that is no list with something in it")
        if name == "oneOf":
            meant = [self._meant(one, at) for one in schemas]
            if not all(disjoint(one, other) for index, one in enumerate(meant) for other in meant[:index]):
                raise BadSchema(at, "has a oneOf whose alternatives differ neither in type nor in a required const")
        return self._builder.either(
            [self.visit(one, f"{at}/{name}/{index}", depth + 1) for index, one in enumerate(schemas)]
        )

    def _meant(self, schema: Any, at: str) -> Any:
        """What a plain reference stands for, one step."""
        return resolve(self._root, schema["$ref"], at) if isinstance(schema, dict) and "$ref" in schema else schema

    def _all_of(self, schema: Mapping[str, Any], name: str, at: str, depth: int) -> Fragment:
        schemas = schema[name]
        if not isinstance(schemas, list) or len(schemas) != 1:
            raise BadSchema(at, "has an allOf of more than one schema, which is not supported")
        return self.visit(schemas[0], f"{at}/allOf/0", depth + 1)

    def _of_types(self, schema: Mapping[str, Any], given: set[str], at: str, depth: int) -> Fragment:
        if "type" in given:
            kinds = types(schema, at)
        else:  # what it speaks of, though others would be valid, too
            kinds = [kind for kind in ("object", "array", "string", "integer") if given & _KEYWORDS[kind]][:1]
        unknown = given - {"type"} - frozenset[str]().union(*(_KEYWORDS[kind] for kind in kinds))
        if unknown:
            raise BadSchema(at, f"has the keyword {sorted(unknown)[0][:64]}, which is not supported here")
        make: Mapping[str, Callable[[Mapping[str, Any], str, int], Fragment]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
        }
        return self._builder.either(
            [
                make[kind](schema, at, depth) if given & _KEYWORDS[kind] else self._parts.typed(kind)
                for kind in dict.fromkeys(kinds)
            ]
        )

    # Values

    def _object(self, schema: Mapping[str, Any], at: str, depth: int) -> Fragment:
        parts = self._parts
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise BadSchema(at, "has properties that are no object, or a required that is no list")
        if not all(isinstance(one, str) for one in required):
            raise BadSchema(at, "has a required that is not of strings")
        if not all(_is_text(one) for one in (*properties, *required)):
            raise BadSchema(at, "has a property whose name is not valid Unicode text")
        members = {key: (one, f"{at}/properties/{escaped(key)}") for key, one in properties.items()}
        for key in required:
            if key not in members:
                if others is False:
                    raise BadSchema(at, "requires a property that it does not allow")
                members[key] = (others, f"{at}/additionalProperties")
        # One that is not wanted and can have no value is never there.
        members = {key: one for key, one in members.items() if one[0] is not False or key in required}
        if members or properties or others is False:
            return parts.members(
                [(key, self._value(one, where, depth), key in required) for key, (one, where) in members.items()]
            )
        value = self._value(others, f"{at}/additionalProperties", depth)
        return parts.listed("{", "}", lambda: parts.pair(parts.typed("string"), self._builder.call(value)), 0, None)

    def _array(self, schema: Mapping[str, Any], at: str, depth: int) -> Fragment:
        builder, parts = self._builder, self._parts
        prefix = schema.get("prefixItems", [])
        low, high = count(schema, "minItems", at) or 0, count(schema, "maxItems", at)
        if not isinstance(prefix, list):
            raise BadSchema(at, "has prefixItems that are no list")
        # Behind items of their own there are others only where they are spoken of, or wanted.
        rest = schema["items"] if "items" in schema else not prefix or low > len(prefix)
        if rest is False:
            high = min(len(prefix), len(prefix) if high is None else high)
        if high is not None and low > high:
            raise BadSchema(at, "wants more items than it allows")
        fixed = [
            self._value(one, f"{at}/prefixItems/{index}", depth)
            for index, one in enumerate(prefix if high is None else prefix[:high])
        ]
        others = self._value(rest, f"{at}/items", depth) if rest is not False and high != len(fixed) else None
        if not fixed:
            return parts.listed("[", "]", lambda: builder.call(others), low, high)
        return parts.tuple(fixed, others, low, high)

    def _string(self, schema: Mapping[str, Any], at: str, depth: int) -> Fragment:
        builder, parts = self._builder, self._parts
        given = [name for name in ("pattern", "format") if name in schema]
        low, high = count(schema, "minLength", at) or 0, count(schema, "maxLength", at)
        if len(given) + ("minLength" in schema or "maxLength" in schema) > 1:
            raise BadSchema(at, "has more than one of pattern, format and a length, which is not supported")
        if not given:
            if high is not None and low > high:
                raise BadSchema(at, "wants more characters than it allows")
            return parts.quoted(lambda: builder.repeat(parts.character, low, high))
        pattern = schema["pattern"] if "pattern" in schema else _FORMATS.get(str(schema["format"]))
        if not isinstance(pattern, str):
            raise BadSchema(at, "has a pattern that is no string, or a format that is not supported")
        try:
            return parts.quoted(lambda: regex_part(builder, pattern, parts.written, is_search="pattern" in schema))
        except BadRegex as error:
            raise BadSchema(f"{at}/pattern", str(error)) from None

    def _integer(self, schema: Mapping[str, Any], at: str, depth: int) -> Fragment:
        low, high = bound(schema, "minimum", at), bound(schema, "maximum", at)
        above, below = bound(schema, "exclusiveMinimum", at), bound(schema, "exclusiveMaximum", at)
        lows = [] if low is None else [-(-low.numerator // low.denominator)]
        lows += [] if above is None else [above.numerator // above.denominator + 1]
        highs = [] if high is None else [high.numerator // high.denominator]
        highs += [] if below is None else [-(-below.numerator // below.denominator) - 1]
        part = integer_between(self._builder, max(lows, default=None), min(highs, default=None))
        if part is None:
            raise BadSchema(at, "allows no integer of at most 18 digits")
        return part

    def _number(self, schema: Mapping[str, Any], at: str, depth: int) -> Fragment:
        if bound(schema, "minimum", at) != 0:
            raise BadSchema(at, "has a minimum for a number, which is supported for 0 only; an integer may have any")
        return self._parts.unsigned()


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
