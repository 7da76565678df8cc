"""A guide as a grammar of llguidance, in its dialect of Lark.

Nothing of what a caller wrote is put there unquoted but what the converter makes of a grammar in GBNF: the options in
the first line are the engine's alone. Without `no_forcing` llguidance walks a text that can only go one way to its end,
which `((a{99}){99}){99}` makes a million steps without a bound.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GrammarParser, resolve

from headrace.engine.request import Guided
from headrace.engine.schema_reading import BadSchema, closed, counts_names, parse_schema

CONVERSION_MAX = 2_000_000
"""Rules times characters of a grammar: the converter looks at the whole for each rule."""
_HEADER = '%llguidance {"no_forcing": true}\n'
_SCHEMA_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    # Without a bound a weak model writes little else.
    "whitespace_pattern": r" ?|\n[ \t]{0,20}",
    # With \u a key could be written so that it is not taken for the property that it is.
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


class BadGuide(ValueError):
    """The message is a clause that says why."""


def grammar_of(guided: Guided) -> str:
    """The grammar. Raises `BadGuide`."""
    if guided.kind == "json_schema":
        return _HEADER + f"start: %json {_schema(guided.text)}\n"
    if guided.kind == "json_object":
        return _HEADER + f"start: %json {json.dumps({'type': 'object', 'x-guidance': _SCHEMA_OPTIONS})}\n"
    if guided.kind == "regex":
        return _HEADER + _one_token(guided.text)
    if guided.kind == "choice":
        return _HEADER + _one_token("|".join(map(_literal, guided.choices)))
    return _HEADER + _lark(guided.text)


def _one_token(pattern: str) -> str:
    return f"start: /{regex_to_lark(pattern, 'dws')}/\n"


def _literal(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)


def _schema(text: str) -> str:
    try:
        document: Any = parse_schema(text)
    except BadSchema as error:
        raise BadGuide(str(error)) from None
    if isinstance(document, dict):
        if "x-guidance" in document:
            raise BadGuide("has the keyword x-guidance, which is not supported")
        try:
            schema = {**closed(document), "x-guidance": _SCHEMA_OPTIONS}
            if counts_names(schema):
                raise BadGuide("has a minProperties above 1 for properties without names, which is not supported")
            return json.dumps(schema)
        except RecursionError:
            raise BadGuide("is too large: it has too many levels") from None
    return json.dumps(document)


def _lark(text: str) -> str:
    names = Counter(_RULE.findall(text))
    if len(names) * len(text) > CONVERSION_MAX:
        raise BadGuide("is too large")
    for name, times in names.items():
        if times > 1:
            raise BadGuide(f"has the rule {name[:64]} twice")
    try:
        rules = GrammarParser().parse(_ESCAPE.sub(_plain, text))
        resolve(rules)
        root = rules["start"]
        # A word takes as much as it can, whatever has to follow: without a circle, the answer can be one word.
        is_word = root.alternatives.is_terminal()
        root.name = _unused(rules) if is_word else root.name
        lark = "".join(f"{rule}\n" for rule in rules.values())
    except RecursionError:
        raise BadGuide("is too large: it has too many levels of brackets") from None
    except Exception as error:  # its parser raises what Python happens to
        raise BadGuide(f"is no grammar in GBNF: {error}") from None
    return f"start: {root.name}\n{lark}" if is_word else lark


def _unused(names: Iterable[str]) -> str:
    return "ANSWER" + "_X" * len([name for name in names if name.startswith("ANSWER")])


def _plain(found: re.Match[str]) -> str:
    r"""A character by its number as itself, where GBNF's escapes and Lark's differ."""
    digits = found[1] or found[2] or found[3]
    if digits is None:
        return {"\\-": "-", "\\^": "\\^"}.get(found[0], found[0])
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise BadGuide("has the number of a character that there is not")
    return chr(code)
