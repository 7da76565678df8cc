"""What JSON is written with, as parts of an automaton: values by type, lists, members, the characters of strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from headrace.engine.automaton import Builder, Fragment, Ranges
from headrace.engine.guide_regex import without
from headrace.engine.json_numbers import DIGITS_MAX, digits

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_WHITE = (1 << 0x20) | (1 << 0x09)
_NEEDS_ESCAPE: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_PLAIN = without(_NEEDS_ESCAPE)
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_HEX = sum(1 << ord(digit) for digit in "0123456789abcdefABCDEF")
_DIGIT = ((1 << 10) - 1) << ord("0")


class JsonParts:
    """Each call is a part of its own."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def typed(self, name: str) -> Fragment:
        """Any value of a type."""
        return self._builder.rule(("json", name), lambda: self._typed(name))

    def any(self) -> Fragment:
        """Any value."""
        return self._builder.rule(
            ("json", "any"),
            lambda: self._builder.either([self.typed(kind) for kind in TYPES if kind != "integer"]),
        )

    def _typed(self, name: str) -> Fragment:
        builder = self._builder
        if name == "object":
            return self.listed("{", "}", lambda: self.pair(self.typed("string"), self.any()), 0, None)
        if name == "array":
            return self.listed("[", "]", self.any, 0, None)
        if name == "string":
            return self.quoted(lambda: builder.repeat(self.character, 0, None))
        if name == "integer":
            return builder.sequence(builder.optional(builder.literal("-")), digits(builder, DIGITS_MAX))
        if name == "number":
            return builder.sequence(builder.optional(builder.literal("-")), self.unsigned())
        return builder.literals([b"true", b"false"] if name == "boolean" else [b"null"])

    def space(self) -> Fragment:
        """What may stand between two parts."""
        builder = self._builder
        return builder.rule(
            ("json", "space"),
            lambda: builder.optional(
                builder.either(
                    [
                        builder.literal(" "),
                        builder.sequence(
                            builder.repeat(lambda: builder.literal("\n"), 1, 2),
                            builder.repeat(lambda: builder.bytes_in(_WHITE), 0, 20),
                        ),
                    ]
                )
            ),
        )

    def comma(self) -> Fragment:
        """Between two values."""
        return self._builder.sequence(self._builder.literal(","), self.space())

    def pair(self, key: Fragment, value: Fragment) -> Fragment:
        """A member of an object."""
        return self._builder.sequence(key, self._builder.literal(":"), self.space(), value)

    def listed(self, opens: str, closes: str, make: Callable[[], Fragment], low: int, high: int | None) -> Fragment:
        """`low` to `high` of one kind, with commas between them."""
        builder = self._builder
        if high == 0:
            return builder.sequence(builder.literal(opens), self.space(), builder.literal(closes))
        rest = builder.repeat(
            lambda: builder.sequence(self.comma(), make()), max(0, low - 1), None if high is None else high - 1
        )
        inner = builder.sequence(make(), rest, self.space())
        return builder.sequence(
            builder.literal(opens),
            self.space(),
            inner if low else builder.optional(inner),
            builder.literal(closes),
        )

    def members(self, members: Sequence[tuple[str, object, bool]]) -> Fragment:
        """An object of these: key, the rule of its value, whether it must be there. Each comes in its turn.

        Before the first that is there stands no comma, before the others one does.
        """
        builder = self._builder
        begin, bare = builder.sequence(builder.literal("{"), self.space())
        close = builder.sequence(self.space(), builder.literal("}"))
        nothing_yet, something = True, -1
        for key, value, is_required in members:
            name = ("member", key, value)
            if not builder.knows(name):
                builder.reserve(name)
                text = json.dumps(key, ensure_ascii=False)
                builder.define(name, self.pair(builder.literal(text), builder.call(value)))
            behind = builder.place()
            if nothing_yet:
                builder.join(bare, builder.call(name), behind)
            if something >= 0:
                builder.join(something, builder.sequence(self.comma(), builder.call(name)), behind)
                if not is_required:
                    builder.link(something, behind)
            nothing_yet = nothing_yet and not is_required
            something = behind
        if something >= 0:
            builder.link(something, close[0])
        if nothing_yet:
            builder.join(bare, builder.literal("}"), close[1])
        return begin, close[1]

    def tuple(self, items: Sequence[object], others: object, low: int, high: int | None) -> Fragment:
        """A list that begins with values of these rules, then has `others`; it may end behind each from `low` on."""
        builder = self._builder
        begin, end = builder.sequence(builder.literal("["), self.space())
        close = builder.sequence(self.space(), builder.literal("]"))
        for index in range(max(len(items), low) if high is None else high):
            if index >= low:
                builder.link(end, close[0])
            item = builder.call(items[index] if index < len(items) else others)
            behind = builder.place()
            builder.join(end, builder.sequence(self.comma(), item) if index else item, behind)
            end = behind
        if high is None:
            behind = builder.place()
            builder.join(
                end, builder.repeat(lambda: builder.sequence(self.comma(), builder.call(others)), 0, None), behind
            )
            end = behind
        builder.link(end, close[0])
        return begin, close[1]

    def quoted(self, make: Callable[[], Fragment]) -> Fragment:
        """A string of what `make` makes."""
        return self._builder.sequence(self._builder.literal('"'), make(), self._builder.literal('"'))

    def character(self) -> Fragment:
        """One character of a string: as it is, or by an escape that stands for one character."""
        return self._builder.rule(("json", "character"), self._character)

    def _character(self) -> Fragment:
        builder = self._builder
        surrogate, below = _set("dD"), _set("01234567")
        return builder.either(
            [
                builder.character(_PLAIN),
                builder.sequence(builder.literal("\\"), builder.bytes_in(_set('"\\/bfnrt'))),
                builder.sequence(builder.literal("\\u"), *map(builder.bytes_in, (_HEX & ~surrogate, _HEX, _HEX, _HEX))),
                builder.sequence(builder.literal("\\u"), *map(builder.bytes_in, (surrogate, below, _HEX, _HEX))),
            ]
        )

    def written(self, ranges: Ranges) -> Fragment:
        """One character of some ranges, as it is written inside a string."""
        return self._builder.rule(("written", ranges), lambda: self._written(ranges))

    def _written(self, ranges: Ranges) -> Fragment:
        builder = self._builder
        plain = without(_NEEDS_ESCAPE, ranges)
        parts = [builder.character(plain)] if plain else []
        for code in (*range(0x20), 0x22, 0x5C):
            if any(low <= code <= high for low, high in ranges):
                parts.append(builder.literal(f"\\{_SHORT[code]}" if code in _SHORT else f"\\u{code:04x}"))
        return builder.either(parts)

    def unsigned(self) -> Fragment:
        """A number without a sign."""
        builder = self._builder
        fraction = builder.sequence(builder.literal("."), builder.repeat(lambda: builder.bytes_in(_DIGIT), 1, 15))
        exponent = builder.sequence(
            builder.bytes_in(_set("eE")),
            builder.optional(builder.bytes_in(_set("+-"))),
            builder.repeat(lambda: builder.bytes_in(_DIGIT), 1, 2),
        )
        return builder.sequence(digits(builder, 15), builder.optional(fraction), builder.optional(exponent))


def _set(characters: str) -> int:
    """Bytes as bits."""
    return sum(1 << ord(one) for one in characters)
