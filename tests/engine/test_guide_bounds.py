"""Guides that are made to be slow, or to end the process: refused, or given up in time."""

from __future__ import annotations

import json
import time

import pytest
from llguidance import LLMatcher

from engine.test_guides import compiled
from headrace.engine.request import GUIDE_BYTES_MAX, RefusalError


def walk(guide: LLMatcher, said: bytes) -> float:
    """Seconds of the longest step, a mask and a byte, until it has been said or given up."""
    matcher = guide.deep_copy()
    longest = 0.0
    for byte in said:
        begun = time.thread_time()
        matcher.compute_bitmask()
        is_taken = matcher.consume_token(byte)
        longest = max(longest, time.thread_time() - begun)
        if not is_taken:
            break
    return longest


def compiled_or_why(kind: str, text: str) -> tuple[LLMatcher | None, str]:
    try:
        return compiled(kind, text), "taken"
    except RefusalError as error:
        return None, error.message


_TWICE = [{"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": n} for n in (1, 2, 3)]
_NESTED = {str(n): json.loads('{"items":' * 60 + f'{{"$ref":"#/$defs/{n + 1}"}}' + "}" * 60) for n in range(36)}
ADVERSARIES: dict[str, tuple[str, str, bytes]] = {
    "only one way, for 96 million bytes": ("regex", "(((a{99}){99}){99}){99}", b"a" * 300),
    "the same behind a letter": ("regex", "b(((a{99}){99}){99}){99}", b"b" + b"a" * 300),
    "the same as a pattern": ("json_schema", '{"type": "string", "pattern": "^(((a{99}){99}){99}){99}$"}',
        b'"' + b"a" * 99),
    "many optional": ("regex", "(a?){5000}", b"a" * 300),
    "many that overlap": ("regex", "(a|aa|aaa){1,5000}b", b"a" * 300),
    "states that double": ("regex", ".*a.{300}", b"a" * 300),
    "wide classes": ("regex", r"(\p{L}\p{N}?){1,3000}", "é1".encode() * 100),
    "nested arrays read in many ways": (
        "json_schema", json.dumps({"$defs": {"n": {"anyOf": _TWICE}}, "$ref": "#/$defs/n"}), b"[" * 100),
    "a stack of 8 MB and more": (
        "json_schema", json.dumps({"$defs": {**_NESTED, "36": {}}, "$ref": "#/$defs/0"}, separators=(",", ":")),
        b"[" * 99),
    "patterns of which all hold": ("json_schema", json.dumps(
        {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(3, 14)]}), b'"abab'),
    "many properties": ("json_schema", json.dumps(
        {"properties": {f"p{n}": {"type": "integer"} for n in range(1000)}}), b'{"p1":1'),
    "a divisor that is prime": ("json_schema", '{"type": "integer", "multipleOf": 1234567891}', b"123456"),
    "left recursion in two ways": ("grammar", 'root ::= root "a" | "a" | root root', b"a" * 300),
    "readings that double": ("grammar", 'root ::= "a" root "x" | "a" root "y" | "b"', b"a" * 300),
    "any number of empty ones": ("grammar", 'root ::= x\nx ::= x x | x x x | "a" |', b"a" * 300),
    "any number of some": ("grammar", 'root ::= root root | root root root | [a-z]', b"a" * 300),
    "rules that double": (
        "grammar", "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1} r{n + 1} | r0\n" for n in range(40)) + 'r40 ::= "b"',
        b"b" * 99),
    "words that double": (
        "grammar", "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40 ::= "b"',
        b"b" * 99),
    "a long chain of rules": (
        "grammar", "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(250)) + 'r250 ::= "b"', b"b"),
    "the same, and a rule of many parts": (
        "grammar", "root ::= r0 r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(200))
        + "r200 ::= " + '"b" ' * 1500 + "root", b"b"),
    "brackets": ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, b"a"),
    "repeated often": ("grammar", 'root ::= ("a" root?){999}', b"a" * 300),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVERSARIES)
def test_a_guide_that_is_made_to_be_slow_is_refused_or_given_up_in_time(name: str) -> None:
    """CPU seconds, with room for a slow machine; most are far below. `-s` prints them."""
    kind, text, said = ADVERSARIES[name]
    assert len(text.encode()) <= GUIDE_BYTES_MAX
    begun = time.perf_counter()
    guide, end = compiled_or_why(kind, text)
    taken = time.perf_counter() - begun
    longest = 0.0 if guide is None else walk(guide, said)
    print(f"{name}: {1000 * taken:.0f} ms to compile, {1000 * longest:.1f} ms for the longest step; {end[:90]}")
    assert taken < 3.0
    assert longest < 0.2
