"""Goes on behind what a lost engine had generated: its tokens pass through detokenizer and stop strings once more.

Sans-io. What was delivered is not told again; what the lost engine held back, where a stop string or half a character
stood at the end, is held back here, too. So a continued answer is cut, joined and stopped as an uninterrupted one.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.engine.request import Continuation, invalid
from headrace.engine.text import Release, TextJoiner, ending_token


class Delivered:
    """What of the joiner's next releases has been told before: the first `ids`, and the first `text_bytes` of text."""

    __slots__ = ("ids", "text_bytes")

    def __init__(self, ids: int = 0, text_bytes: int = 0) -> None:
        self.ids = ids
        self.text_bytes = text_bytes

    def __bool__(self) -> bool:
        return self.ids > 0 or self.text_bytes > 0

    def strip(self, release: Release) -> Release:
        """What of `release` is new; of what it dropped, only what was not told before.

        Other draws than the lost ones may complete a stop string that began in delivered text: that is not taken back.
        """
        ids = min(self.ids, len(release.ids))
        size = min(self.text_bytes, len(release.text))
        self.ids -= ids
        self.text_bytes -= size
        dropped = release.dropped - self.ids if release.stop is not None else 0
        characters = len(release.text[:size].decode())
        cuts = [(count - ids, max(0, end - characters)) for count, end in release.cuts if count > ids]
        return Release(release.ids[ids:], release.details[ids:], release.text[size:], release.stop, dropped, cuts)


@dataclass(frozen=True, slots=True)
class Known:
    """A continuation that was replayed: the tokens that count, and where text and stop strings stand behind them.

    For one sequence: `joiner` and `delivered` are its own from then on. `text` is to be told at once: it was released,
    but not delivered. `stop` is what ended the answer in these tokens.
    """

    tokens: list[int]
    joiner: TextJoiner
    delivered: Delivered
    text: bytes
    stop: dict[str, Any] | None


def replay(
    continuation: Continuation,
    piece: Callable[[int], bytes],
    *,
    stop_strings: Sequence[str],
    stop_token_ids: Collection[int],
    end_tokens: Collection[int],
) -> Known:
    """Takes the tokens as if they were being drawn, up to where the answer stops.

    Raises `RefusalError` where more text was delivered than they have, or half a character.
    """
    _check_text(continuation, piece)
    joiner = TextJoiner(stop_strings)
    delivered = Delivered(len(continuation.tokens), continuation.text_bytes)
    tokens: list[int] = []
    texts: list[bytes] = []
    stop: dict[str, Any] | None = None
    for token in continuation.tokens:
        tokens.append(token)
        stop = ending_token(token, stop_token_ids, end_tokens)
        if stop is not None:
            break
        release = joiner.push(token, piece(token))
        if release.ids or release.text:
            texts.append(delivered.strip(release).text)
        if release.stop is not None:
            stop = {"kind": "string", "value": release.stop}
            break
    return Known(tokens, joiner, delivered, b"".join(texts), stop)


def _check_text(continuation: Continuation, piece: Callable[[int], bytes]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = "".join([decoder.decode(piece(token)) for token in continuation.tokens]).encode()
    at = continuation.text_bytes
    if at > len(text):
        raise invalid("continuation.text_bytes", f"is {at}, the tokens have {len(text)} bytes of text")
    if at < len(text) and text[at] & 0xC0 == 0x80:
        raise invalid("continuation.text_bytes", "is inside a character")
