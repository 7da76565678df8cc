r"""A regular expression as a part of an automaton: what `re` parses, as far as it describes a regular language.

Classes are those of ASCII: \d is [0-9], \w is [A-Za-z0-9_]. Look-around, back-references, word borders and flags are
refused. How a character is written is the caller's: inside JSON some are escaped.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from headrace.engine.automaton import CHARACTER_MAX, Builder, Fragment, Ranges

Write = Callable[[Ranges], Fragment]
"""One character of some ranges."""

_CATEGORIES: dict[str, Ranges] = {
    "DIGIT": ((0x30, 0x39),),
    "SPACE": ((0x09, 0x0D), (0x20, 0x20)),
    "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
_ANYTHING: Ranges = ((0, CHARACTER_MAX),)
_LINE: Ranges = ((0, 0x09), (0x0B, CHARACTER_MAX))


class BadRegex(ValueError):
    """It is none, or one that is not supported; the message is a clause that says why."""


def regex_part(builder: Builder, pattern: str, write: Write, *, is_search: bool) -> Fragment:
    """What the pattern matches: the whole text, or with `is_search` any text in which it is found.

    Raises `BadRegex`, and `TooLarge` from the builder.
    """
    return _Translator(builder, write).top(parse_regex(pattern), is_search, is_search)


def parse_regex(pattern: str) -> Any:
    """The pattern as `re` reads it. Raises `BadRegex` where it does not."""
    parser = importlib.import_module("re._parser")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
    except re.error as error:
        raise BadRegex(f"is no regular expression: {error.msg} at position {error.pos}") from None
    except (OverflowError, RecursionError, ValueError):
        raise BadRegex("is no regular expression that can be read") from None
    if parsed.state.flags & ~re.UNICODE:
        raise BadRegex("has flags, which are not supported")
    return parsed


class _Translator:
    def __init__(self, builder: Builder, write: Write) -> None:
        self._builder = builder
        self._write = write

    def top(self, items: Iterable[Any], before: bool, after: bool) -> Fragment:
        """Anchors stand at the borders of the whole, or of its alternatives; elsewhere, anything may come `before`."""
        items = list(items)
        if items and _is_at(items[0], "AT_BEGINNING", "AT_BEGINNING_STRING"):
            before = False
            del items[0]
        if items and _is_at(items[-1], "AT_END", "AT_END_STRING"):
            after = False
            del items[-1]
        if len(items) == 1 and str(items[0][0]) == "BRANCH":
            return self._builder.either([self.top(each, before, after) for each in items[0][1][1]])
        return self._builder.sequence(*self._anything(before), self._items(items), *self._anything(after))

    def _anything(self, wanted: bool) -> list[Fragment]:
        return [self._builder.repeat(lambda: self._write(_ANYTHING), 0, None)] if wanted else []

    def _items(self, items: Iterable[Any]) -> Fragment:
        return self._builder.sequence(*[self._item(str(kind), value) for kind, value in items])

    def _item(self, kind: str, value: Any) -> Fragment:
        if kind == "LITERAL":
            return self._write(((value, value),))
        if kind == "NOT_LITERAL":
            return self._write(without(((value, value),)))
        if kind == "ANY":
            return self._write(_LINE)
        if kind == "IN":
            return self._write(_class(value))
        if kind == "BRANCH":
            return self._builder.either([self._items(each) for each in value[1]])
        if kind == "SUBPATTERN":
            _, added, removed, inner = value
            if added or removed:
                raise BadRegex("has flags, which are not supported")
            return self._items(inner)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = value
            limit = None if str(high) == "MAXREPEAT" else int(high)
            return self._builder.repeat(lambda: self._items(inner), int(low), limit)
        raise BadRegex(f"has {_NAMES.get(kind, kind.lower())}, which is not supported")


_NAMES = {
    "AT": "an anchor or a border inside",
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a condition",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


def _is_at(item: Any, *places: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in places


def _class(items: Iterable[Any]) -> Ranges:
    found: list[tuple[int, int]] = []
    is_negated = False
    for kind, value in items:
        name = str(kind)
        if name == "NEGATE":
            is_negated = True
        elif name == "LITERAL":
            found.append((value, value))
        elif name == "RANGE":
            found.append((int(value[0]), int(value[1])))
        else:
            category = str(value).removeprefix("CATEGORY_")
            ranges = _CATEGORIES.get(category.removeprefix("NOT_"))
            if ranges is None:
                raise BadRegex("has a class that is not supported")
            found += without(ranges) if category.startswith("NOT_") else ranges
    ranges = merged(found)
    return without(ranges) if is_negated else ranges


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same characters in order, none twice."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def without(ranges: Ranges, whole: Ranges = _ANYTHING) -> Ranges:
    """The characters of `whole` that are not in `ranges`; both in order."""
    found = []
    for first, last in whole:
        at = first
        for low, high in ranges:
            if high < at or low > last:
                continue
            if low > at:
                found.append((at, low - 1))
            at = high + 1
        if at <= last:
            found.append((at, last))
    return tuple(found)
