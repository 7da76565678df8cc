r"""A grammar in GBNF, the dialect of llama.cpp, as a part of an automaton; its first rule is `root`.

root ::= "a" [b-d]+ (rest | .)?  # a comment
rest ::= "\u00e9"{1,3} root
"""

from __future__ import annotations

import re

from headrace.engine.automaton import CHARACTER_MAX, Builder, Fragment, Ranges
from headrace.engine.guide_regex import merged, without

DEPTH_MAX = 64
"""Levels of brackets."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_TIMES = re.compile(r"\{ *(\d{1,6}) *(?:(,) *(\d{1,6})? *)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_SHORT = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_ANYTHING: Ranges = ((0, CHARACTER_MAX),)


class BadGrammar(ValueError):
    """It is no grammar; the message is a clause that says why."""


def grammar_part(builder: Builder, text: str) -> Fragment:
    """What the grammar allows. Raises `BadGrammar`, and `TooLarge` from the builder."""
    return _Reader(builder, text).read()


class _Reader:
    def __init__(self, builder: Builder, text: str) -> None:
        self._builder = builder
        self._text = text
        self._at = 0
        self._items = 0
        self._defined: set[str] = set()
        self._named: dict[str, None] = {"root": None}

    def read(self) -> Fragment:
        """All rules."""
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            self._rule()
            self._skip(_BLANK_LINES)
        for name in self._named:
            if name not in self._defined:
                raise BadGrammar(f"has no rule {name[:64]}")
        return self._builder.call(("rule", "root"))

    def _rule(self) -> None:
        name = self._name()
        if not name:
            raise self._wrong("the name of a rule")
        if name in self._defined:
            raise BadGrammar(f"has the rule {name[:64]} twice")
        self._skip(_BLANK)
        if not self._take("::="):
            raise self._wrong("::=")
        self._skip(_BLANK_LINES)
        self._reserve(name)
        self._defined.add(name)
        self._builder.define(("rule", name), self._alternatives(0))
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            raise self._wrong("the end of a rule")

    def _alternatives(self, depth: int) -> Fragment:
        if depth > DEPTH_MAX:
            raise BadGrammar(f"has more than {DEPTH_MAX} levels of brackets")
        found = [self._sequence(depth)]
        while self._take("|"):
            self._skip(_BLANK_LINES)
            found.append(self._sequence(depth))
        return self._builder.either(found)

    def _sequence(self, depth: int) -> Fragment:
        """Inside brackets it goes on over the end of a line."""
        blank = _BLANK_LINES if depth else _BLANK
        parts = []
        while (item := self._item(depth)) is not None:
            parts.append(self._times(item))
            self._skip(blank)
        return self._builder.sequence(*parts)

    def _item(self, depth: int) -> Fragment | None:
        if self._take('"'):
            return self._builder.literal(self._literal())
        if self._take("["):
            return self._builder.character(self._class())
        if self._take("."):
            return self._builder.character(_ANYTHING)
        if self._take("("):
            self._skip(_BLANK_LINES)
            inner = self._alternatives(depth + 1)
            if not self._take(")"):
                raise self._wrong("a closing bracket")
            return inner
        name = self._name()
        if not name:
            return None
        self._reserve(name)
        return self._builder.call(("rule", name))

    def _times(self, item: Fragment) -> Fragment:
        """With what stands behind it: how often it comes."""
        self._skip(_BLANK)
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return self._repeated(item, *bounds)
        found = _TIMES.match(self._text, self._at)
        if found is None:
            return item
        self._at = found.end()
        low = int(found[1])
        high = low if found[2] is None else int(found[3]) if found[3] is not None else None
        if high is not None and high < low:
            raise self._wrong("a repetition whose end is not before its beginning")
        return self._repeated(item, low, high)

    def _repeated(self, item: Fragment, low: int, high: int | None) -> Fragment:
        self._items += 1
        name = ("item", self._items)
        self._builder.reserve(name)
        self._builder.define(name, item)
        return self._builder.repeat(lambda: self._builder.call(name), low, high)

    # Characters

    def _literal(self) -> str:
        text = []
        while not self._take('"'):
            text.append(self._character('a closing "'))
        return "".join(text)

    def _class(self) -> Ranges:
        is_negated = self._take("^")
        ranges = []
        while not self._take("]"):
            low = ord(self._character("a closing ]"))
            high = low
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = ord(self._character("a closing ]"))
            if high < low:
                raise self._wrong("a range whose end is not before its beginning")
            ranges.append((low, high))
        found = merged(ranges)
        return without(found) if is_negated else found

    def _character(self, wanted: str) -> str:
        one = self._text[self._at : self._at + 1]
        if not one or one == "\n":
            raise self._wrong(wanted)
        self._at += 1
        if one != "\\":
            return one
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _SHORT:
            return _SHORT[kind]
        digits = self._text[self._at : self._at + _HEX.get(kind, 0)]
        if kind not in _HEX or not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX[kind]}}}", digits):
            raise self._wrong("an escape that there is")
        self._at += len(digits)
        code = int(digits, 16)
        if code > CHARACTER_MAX or 0xD800 <= code <= 0xDFFF:
            raise self._wrong("a character that there is")
        return chr(code)

    # Reading

    def _reserve(self, name: str) -> None:
        self._named[name] = None
        if not self._builder.knows(("rule", name)):
            self._builder.reserve(("rule", name))

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _take(self, sign: str) -> bool:
        if not self._text.startswith(sign, self._at):
            return False
        self._at += len(sign)
        return True

    def _skip(self, blank: re.Pattern[str]) -> None:
        found = blank.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _wrong(self, wanted: str) -> BadGrammar:
        line = self._text.count("\n", 0, self._at) + 1
        return BadGrammar(f"wants {wanted} in line {line}")
