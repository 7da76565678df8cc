"""Decides which tokens may be shown: their bytes join to whole characters, and no stop string can begin in them.

Sans-io. A token's id travels with its text: while a character is incomplete, or while the end of the text could
begin a stop string, the tokens concerned are held back together with it.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Release:
    """What may be shown now. `stop` is the stop string that was met; `dropped` counts the ids it swallowed.

    `cuts` are the (ids, characters) at which it may be cut in two, its own end included; kept only for several ids.
    """

    ids: list[int] = field(default_factory=list)
    details: list[Any] = field(default_factory=list)
    text: bytes = b""
    stop: str | None = None
    dropped: int = 0
    cuts: list[tuple[int, int]] = field(default_factory=list)

    def split(self) -> list[Release]:
        """Parts as small as they can be shown; together they are what this is."""
        if len(self.cuts) < 2:
            return [self]
        text = self.text.decode()
        parts = []
        at = begin = 0
        for count, end in self.cuts:
            parts.append(Release(self.ids[at:count], self.details[at:count], text[begin:end].encode()))
            at, begin = count, end
        return parts


class _StopMatcher:
    """Knuth, Morris and Pratt's automaton for one stop string, fed character by character.

    `matched` is the length of the longest end of the text so far that begins the string: linear work in the text
    whatever a client puts into `stop`, and exactly what has to be held back.
    """

    __slots__ = ("_fallback", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._fallback = [0] * len(string)
        length = 0
        for index in range(1, len(string)):
            while length and string[index] != string[length]:
                length = self._fallback[length - 1]
            if string[index] == string[length]:
                length += 1
            self._fallback[index] = length

    def feed(self, text: str) -> int | None:
        """The index in `text` just after the first match, None without one."""
        string, matched = self.string, self.matched
        if not matched and string[0] not in text:
            return None
        for index, character in enumerate(text):
            while matched and string[matched] != character:
                matched = self._fallback[matched - 1]
            if string[matched] == character:
                matched += 1
                if matched == len(string):
                    return index + 1
        self.matched = matched
        return None


def ending_token(token: int, stop_token_ids: Collection[int], end_tokens: Collection[int]) -> dict[str, Any] | None:
    """The `stop` of the contract that a token is by itself; None: it is one of the answer."""
    if token in stop_token_ids:
        return {"kind": "token", "value": token}
    return {"kind": "eos", "value": token} if token in end_tokens else None


class TextJoiner:
    """One sequence's text in the making. After a release with `stop` it must not be used again."""

    __slots__ = ("_base", "_decoder", "_details", "_ends", "_ids", "_matchers", "_text", "_whole")

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._matchers = [_StopMatcher(string) for string in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The held tokens; positions are characters since the sequence began, `_base` is where `_text` begins.
        self._ids: list[int] = []
        self._details: list[Any] = []
        self._ends: list[int] = []
        self._whole: list[bool] = []
        self._text = ""
        self._base = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held back."""
        return not self._ids

    @property
    def held(self) -> int:
        """Tokens held back."""
        return len(self._ids)

    def push(self, token: int, piece: bytes, detail: Any = None) -> Release:
        """Adds one token and its bytes; returns what may be shown now."""
        text = self._decoder.decode(piece)
        before = self._base + len(self._text)
        self._text += text
        self._ids.append(token)
        self._details.append(detail)
        self._ends.append(before + len(text))
        self._whole.append(not self._decoder.getstate()[0])
        match = self._first_match(text, before)
        if match is not None:
            return self._stop_at(*match)
        hold = before + len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        return self._release(self._releasable(hold))

    def flush(self) -> Release:
        """Everything held back, an incomplete character as U+FFFD: the sequence ends for another reason."""
        rest = self._decoder.decode(b"", final=True)
        self._text += rest
        if self._ends:
            self._ends[-1] += len(rest)
        return self._release(len(self._ids))

    def _first_match(self, text: str, before: int) -> tuple[int, str] | None:
        """Where the earliest stop string begins (ties go to the one listed first), and which it is."""
        first: tuple[int, str] | None = None
        for matcher in self._matchers:
            after = matcher.feed(text)
            if after is not None:
                begin = before + after - len(matcher.string)
                if first is None or begin < first[0]:
                    first = begin, matcher.string
        return first

    def _stop_at(self, begin: int, string: str) -> Release:
        # Invariant: begin >= self._base, because from `begin` on the text has been held back.
        starts = [self._base, *self._ends[:-1]]
        count = sum(1 for start in starts if start < begin)
        release = Release(self._ids[:count], self._details[:count], self._text[: begin - self._base].encode())
        release.cuts = self._cuts(count, begin - self._base)
        release.stop = string
        release.dropped = len(self._ids) - count
        self._ids = []
        return release

    def _releasable(self, hold: int) -> int:
        count = len(self._ids)
        while count and not (self._whole[count - 1] and self._ends[count - 1] <= hold):
            count -= 1
        return count

    def _release(self, count: int) -> Release:
        if not count:
            return Release()
        end = self._ends[count - 1] - self._base
        release = Release(self._ids[:count], self._details[:count], self._text[:end].encode())
        if count > 1:
            release.cuts = self._cuts(count, end)
        self._text = self._text[end:]
        self._base += end
        for held in (self._ids, self._details, self._ends, self._whole):
            del held[:count]
        return release

    def _cuts(self, count: int, end: int) -> list[tuple[int, int]]:
        """Where the first `count` tokens, `end` characters, can be cut: behind whole characters."""
        inner = [(n, self._ends[n - 1] - self._base) for n in range(1, count) if self._whole[n - 1]]
        return [*inner, (count, end)]
