"""Grammars in GBNF: what they let through, and what is none."""

from __future__ import annotations

import json
import random

import pytest

from engine.test_guides import compiled, some_text, takes
from headrace.engine.request import RefusalError

JSON = r"""
root   ::= object   # as llama.cpp's own example has it, in short
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,2})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "ab"+', ["ab", "abab"], ["", "aba"]),
        ("root ::= [a-c]? .", ["x", "ax", "aé", "a"], ["", "xa"]),
        ("root ::= [^a-c]{2}", ["xy", "é𐎠"], ["ax", "x", "xyz"]),
        ('root ::= ("a" | "b" "c"){1,2}', ["a", "bc", "abc", "bcbc"], ["b", "aaa", ""]),
        ('root ::= "a"{2,}', ["aa", "aaaaa"], ["a"]),
        ('root ::= "(" root ")" | ""', ["", "()", "((()))"], ["(", "())"]),
        ('root ::= name "x"\nname ::= [a-z]+', ["abx", "xx"], ["x", "ab"]),
        ('root ::= ANSWER answer-x\nANSWER ::= "a"\nanswer-x ::= "b"', ["ab"], ["a"]),
        ('root ::= [^/]+ "/" # a/b\n# c', ["a/"], ["/"]),
        ('root ::= x-1 "!"\nx-1 ::= "\\u00e9\\x41\\U0001F30A"', ["éA🌊!"], ["éA🌊"]),
        ('root ::= (\n  "a" # one\n  | "b"\n)\n', ["a", "b"], ["ab"]),
        ('root ::= "a" |\n  "b"', ["a", "b"], [""]),
        ("root ::= [-a\\]]+", ["-]a"], ["b"]),
        ('root ::= "x" a\na ::=', ["x"], ["xx"]),
    ],
)
def test_a_grammar_lets_through_what_it_says(grammar: str, good: list[str], bad: list[str]) -> None:
    guide = compiled("grammar", grammar)
    assert [one for one in good if not takes(guide, one)] == []
    assert [one for one in bad if takes(guide, one)] == []


def test_a_grammar_of_json_says_json() -> None:
    guide = compiled("grammar", JSON)
    dice = random.Random(5)
    found = [text for text in (some_text(guide, dice) for _ in range(60)) if text is not None]
    assert len(found) > 30
    for text in found:
        assert isinstance(json.loads(text, strict=False), dict), text
    assert takes(guide, '{"a": [1, -2.5, {"b": "x\\n"}], "c": null}')
    assert not takes(guide, '{"a": 1,}')


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('x ::= "a"', "No 'root' rule found"),
        ("root ::= y", "Rule 'y' not found"),
        ('root ::= "a"\nroot ::= "b"', "has the rule root twice"),
        ('root = "a"', "Expected ::= at line 1"),
        ('root ::= "a', "Unexpected end of input at line 1"),
        ('root ::= "a\n"', "lexer error"),
        ("\nroot ::= [a", "Unexpected end of input at line 2"),
        ('root ::= ("a"', "Expected ')' at line 1"),
        ('root ::= "a")', "at line 1"),
        ('root ::= "\\q"', "Invalid escape sequence \\q at line 1"),
        ('root ::= "\\ud800"', "a character that there is not"),
        ("root ::= [b-a]", "invalid regex"),
        ('root ::= "a"{3,2}', "range end must be >= start"),
        ("root ::= " + "(" * 5000, "levels of brackets"),
        ("::=", "Expected name at line 1"),
        ('root ::= "a"\n%llguidance {"no_forcing": false}', "Expected name at line 2"),
        ("".join(f"r{number} ::= x\n" for number in range(2000)), "is too large"),
        ("root ::= \\", "is no grammar"),
    ],
)
def test_what_is_no_grammar_or_too_much_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(RefusalError) as caught:
        compiled("grammar", grammar)
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "guided.grammar")
    assert why in caught.value.message
