"""Grammars in GBNF: what they let through, and what is none."""

from __future__ import annotations

import json
import random

import pytest

from engine.test_guides import automaton_of, some_text, takes
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
        ('root ::= x-1 "!"\nx-1 ::= "\\u00e9\\x41\\U0001F30A"', ["éA🌊!"], ["éA🌊"]),
        ('root ::= (\n  "a" # one\n  | "b"\n)\n', ["a", "b"], ["ab"]),
        ('root ::= "a" |\n  "b"', ["a", "b"], [""]),
        ("root ::= [-a\\]]+", ["-]a"], ["b"]),
        ('root ::= "x" a\na ::=', ["x"], ["xx"]),
    ],
)
def test_a_grammar_lets_through_what_it_says(grammar: str, good: list[str], bad: list[str]) -> None:
    automaton = automaton_of("grammar", grammar)
    assert [one for one in good if not takes(automaton, one)] == []
    assert [one for one in bad if takes(automaton, one)] == []


def test_a_grammar_of_json_says_json() -> None:
    automaton = automaton_of("grammar", JSON)
    dice = random.Random(5)
    found = [text for text in (some_text(automaton, dice) for _ in range(60)) if text is not None]
    assert len(found) > 30
    for text in found:
        assert isinstance(json.loads(text, strict=False), dict), text
    assert takes(automaton, '{"a": [1, -2.5, {"b": "x\\n"}], "c": null}')
    assert not takes(automaton, '{"a": 1,}')


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('x ::= "a"', "has no rule root"),
        ("root ::= y", "has no rule y"),
        ('root ::= "a"\nroot ::= "b"', "has the rule root twice"),
        ('root = "a"', "wants ::= in line 1"),
        ('root ::= "a', 'wants a closing " in line 1'),
        ('root ::= "a\n"', 'wants a closing " in line 1'),
        ("\nroot ::= [a", "wants a closing ] in line 2"),
        ('root ::= ("a"', "wants a closing bracket in line 1"),
        ('root ::= "a")', "wants the end of a rule in line 1"),
        ('root ::= "\\q"', "wants an escape that there is in line 1"),
        ('root ::= "\\ud800"', "wants a character that there is in line 1"),
        ("root ::= [b-a]", "wants a range whose end"),
        ('root ::= "a"{3,2}', "wants a repetition whose end"),
        ('root ::= "a"{99999}', "is too large"),
        ('root ::= root "a" | "a"', "too many ways"),
        ("root ::= " + "(" * 5000, "levels of brackets"),
        ("::=", "wants the name of a rule"),
    ],
)
def test_what_is_no_grammar_or_too_much_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(RefusalError) as caught:
        automaton_of("grammar", grammar)
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "guided.grammar")
    assert why in caught.value.message
