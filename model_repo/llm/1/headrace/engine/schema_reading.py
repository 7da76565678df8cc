"""What a JSON schema says, read with distrust."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from headrace.engine.json_parts import TYPES

WHERE_MAX = 200


class BadSchema(ValueError):
    """It is no schema, or one that cannot be held; `where` is a JSON pointer, the message a clause."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where if len(where) <= WHERE_MAX else f"{where[:WHERE_MAX]}..."


def parse_schema(text: str) -> Any:
    """A schema as a document. Raises `BadSchema` where it is none."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BadSchema("", "is not JSON") from None
    if not isinstance(document, (dict, bool)):
        raise BadSchema("", "must be an object")
    return document


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def resolve(root: Any, pointer: object, at: str) -> Any:
    """What a reference in the document leads to. Raises `BadSchema`."""
    if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
        raise BadSchema(at, "has a $ref that does not begin with #/")
    target = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and len(key) < 6 and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            raise BadSchema(at, "has a $ref to what is not there")
    return target


def types(schema: Mapping[str, Any], at: str) -> list[str]:
    """The types that it names."""
    given = schema["type"]
    kinds = given if isinstance(given, list) else [given]
    if not kinds or any(not isinstance(kind, str) or kind not in TYPES for kind in kinds):
        raise BadSchema(at, "has a type that there is not")
    return kinds


def is_of(value: object, kinds: Sequence[str]) -> bool:
    """Whether a value is of one of these types."""
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    if value is None:
        return "null" in kinds
    name = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string"
    return name in kinds


def disjoint(one: Any, other: Any) -> bool:
    """Whether certainly no value is valid for both."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    kinds, others = _possible(one), _possible(other)
    if not kinds & others:
        return True
    if kinds == others == {"object"}:
        required = set(one.get("required", ())) & set(other.get("required", ()))
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        return any((a := _values(mine.get(key))) and (b := _values(theirs.get(key))) and not a & b for key in required)
    a, b = _values(one), _values(other)
    return bool(a and b and not a & b)


def _possible(schema: Mapping[str, Any]) -> set[str]:
    """Types that a value of it may have; those of numbers are one."""
    if "type" not in schema:
        return set(TYPES)
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _values(schema: Any) -> frozenset[str]:
    """The values that it names, as text; none where it names none."""
    if not isinstance(schema, dict):
        return frozenset()
    named = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return frozenset(map(json.dumps, named)) if isinstance(named, list) else frozenset()


def count(schema: Mapping[str, Any], name: str, at: str) -> int | None:
    """A keyword that is a whole number, 0 or more; None where it is not there."""
    value = schema.get(name)
    if value is None and name not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadSchema(at, f"has a {name} that is no whole number, 0 or more")
    return value


def bound(schema: Mapping[str, Any], name: str, at: str) -> Fraction | None:
    """A keyword that is a number; None where it is not there."""
    value = schema.get(name)
    if value is None and name not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadSchema(at, f"has a {name} that is no number")
    return Fraction(value)


def escaped(key: str) -> str:
    """A part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
