"""A JSON schema as a document, for every engine that is guided by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SINGLE = frozenset({"items", "additionalProperties"})
_BESIDE = ("$ref", "anyOf", "oneOf")


class BadSchema(ValueError):
    """It is no schema; the message is a clause that says why."""


def parse_schema(text: str) -> Any:
    """A schema as a document. Raises `BadSchema` where it is none."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise BadSchema("is not JSON") from None
    if not isinstance(document, (dict, bool)):
        raise BadSchema("must be an object")
    return document


def closed(document: Any) -> Any:
    """The schema with no properties but those that it names, where it names some and does not say: an answer then ends.

    One that puts together what several parts say of an object is left as it is: a part does not know the others' names.
    Raises `RecursionError`.
    """
    return document if any(map(_is_put_together, _parts(document))) else _closed(document)


def counts_names(document: Any) -> bool:
    """Whether it wants several properties that it does not name: one that comes twice would count twice."""
    if isinstance(document, list):
        return any(map(counts_names, document))
    if not isinstance(document, dict):
        return False
    least = document.get("minProperties")
    is_open = document.get("additionalProperties") is not False or "patternProperties" in document
    return (isinstance(least, int | float) and least > 1 and is_open) or any(map(counts_names, document.values()))


def _is_put_together(schema: dict[str, Any]) -> bool:
    return "allOf" in schema or ("properties" in schema and any(key in schema for key in _BESIDE))


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            for part in _inside(key, value):
                yield from _parts(part)


def _inside(key: str, value: Any) -> Iterable[Any]:
    if key in _MAPS and isinstance(value, dict):
        return value.values()
    if key in _LISTS and isinstance(value, list):
        return value
    return [value] if key in _SINGLE else []


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    new: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            new[key] = {name: _closed(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            new[key] = [_closed(part) for part in value]
        else:
            new[key] = _closed(value) if key in _SINGLE else value
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not named or "patternProperties" in schema:
        return new
    if isinstance(required, list) and all(isinstance(name, str) and name in named for name in required):
        new.setdefault("additionalProperties", False)
    return new


def _no_constant(name: str) -> Any:
    raise ValueError(name)
