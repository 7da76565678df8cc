"""Text in the making: whole characters only, no beginning of a stop string, ids and text in step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.text import TextJoiner


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[tuple[list[int], str]], str | None]:
    """Push the pieces as tokens 0, 1, 2...; returns the parts that were shown, and the stop string met."""
    joiner = TextJoiner(stop)
    parts = []
    for token, piece in enumerate(pieces):
        release = joiner.push(token, piece)
        if release.ids or release.text:
            parts.append((release.ids, release.text.decode("utf-8")))
        if release.stop is not None:
            return parts, release.stop
    release = joiner.flush()
    if release.ids or release.text:
        parts.append((release.ids, release.text.decode("utf-8")))
    return parts, None


@pytest.mark.parametrize(
    ("pieces", "stop", "parts", "met"),
    [
        ([b"a", b"b"], (), [([0], "a"), ([1], "b")], None),
        ([b"\xf0\x9f", b"\x8c\x8a"], (), [([0, 1], "🌊")], None),
        ([b"x", b"EN", b"D", b"y"], ("END",), [([0], "x")], "END"),
        ([b"EN", b"T"], ("END",), [([0, 1], "ENT")], None),
        ([b"xE", b"ND"], ("END",), [([0], "x")], "END"),
        ([b"aaab"], ("ab",), [([0], "aa")], "ab"),
        ([b"one two"], ("two", "one t"), [], "one t"),
        ([b"\xff", b"a"], (), [([0], "\ufffd"), ([1], "a")], None),
        ([b"a", b"\xf0\x9f"], (), [([0], "a"), ([1], "\ufffd")], None),
        ([b"a\n", b"\n"], ("\n\n",), [([0], "a")], "\n\n"),
    ],
    ids=[
        "plain", "a character cut in two", "a stop string over two tokens", "a false alarm is shown whole",
        "a stop string that begins inside a token", "inside one token", "the earliest match wins", "not UTF-8",
        "an incomplete character at the end", "newlines",
    ],
)  # fmt: skip
def test_what_is_shown(
    pieces: list[bytes], stop: tuple[str, ...], parts: list[tuple[list[int], str]], met: str | None
) -> None:
    assert run(pieces, stop) == (parts, met)


def naive(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The obvious way: the stop string whose match ends first, then begins first, then is listed first."""
    for end in range(1, len(text) + 1):
        found = [(end - len(s), s) for s in stop if text[:end].endswith(s)]
        if found:
            begin = min(begin for begin, _ in found)
            return text[:begin], next(s for b, s in found if b == begin)
    return text, None


CHARACTERS = st.sampled_from(list("abE🌊é\n"))


@given(
    st.lists(CHARACTERS, max_size=30).map("".join),
    st.lists(st.lists(CHARACTERS, min_size=1, max_size=4).map("".join), max_size=3).map(tuple),
    st.lists(st.integers(1, 3), min_size=1, max_size=120),
)
def test_any_cut_of_any_text_shows_what_the_obvious_way_shows(
    text: str, stop: tuple[str, ...], cuts: list[int]
) -> None:
    data, pieces = text.encode(), []
    for size in cuts:
        if data:
            pieces.append(data[:size])
            data = data[size:]
    if data:
        pieces.append(data)
    parts, met = run(pieces, stop)
    shown = "".join(part for _, part in parts)
    expected, expected_stop = naive(text, stop)
    if met is None:
        assert expected_stop is None
        assert shown == text
        assert [i for ids, _ in parts for i in ids] == list(range(len(pieces)))
    else:
        # Within one token several strings may match; any earliest beginning among them is right.
        assert expected_stop is not None
        assert text.startswith(shown + met)
        assert len(shown) <= len(expected)
    starts = [len(b"".join(pieces[:n])) for n in range(len(pieces))]
    shown_bytes = len(shown.encode())
    assert [i for ids, _ in parts for i in ids] == [n for n, at in enumerate(starts) if at < shown_bytes or met is None]


@given(st.lists(CHARACTERS, max_size=30).map("".join))
def test_no_part_ever_ends_in_the_beginning_of_a_stop_string(text: str) -> None:
    stop = ("abE", "🌊é")
    joiner, shown = TextJoiner(stop), ""
    for token, byte in enumerate(text.encode()):
        release = joiner.push(token, bytes([byte]))
        shown += release.text.decode("utf-8")
        if release.stop is not None:
            return
        rest = text[len(shown) :]
        for string in stop:
            for length in range(1, len(string)):
                if shown.endswith(string[:length]) and (string[length:]).startswith(rest[: len(string) - length]):
                    assert not rest.startswith(string[length:]), "the beginning of a stop string was shown"
