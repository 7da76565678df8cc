"""Guided decoding of an engine that is stepped: which tokens may come next, for one answer.

What a guide allows is compiled once (`compile_guide`), by its size in bounded time; an answer then has a `Guide` that
follows its tokens and picks the next one. Tokens are tried from the likeliest on, and not each of a vocabulary: a model
that does what it is asked to needs one look. Where nothing can go on, `STUCK` is picked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.engine.automaton import DEAD, Automaton, Builder, Fragment, Matcher, TooLarge
from headrace.engine.guide_gbnf import BadGrammar, grammar_part
from headrace.engine.guide_json import any_object, schema_part
from headrace.engine.guide_regex import BadRegex, regex_part
from headrace.engine.request import Guided, invalid
from headrace.engine.schema_reading import BadSchema

STUCK = -1
"""No token: the vocabulary has none that may follow, or it would take too long to find it."""
WORK_MAX = 50_000
"""Tokens, and ways to read the text, that are looked at for one token: some tens of milliseconds."""
CANDIDATES = 4096
"""How many of the likeliest tokens a second draw has to choose from."""
_TRIES = 16
_REPLAY_WORK = 10**9

Row = npt.NDArray[np.float32]
Redraw = Callable[[npt.NDArray[np.int64]], int]
"""Draws again, among these tokens only."""


def compile_guide(guided: Guided) -> Automaton:
    """What it allows. Raises `RefusalError` that names the field."""
    builder = Builder()
    at = f"guided.{guided.kind}"
    try:
        automaton = builder.build(_part(builder, guided))
        Matcher(automaton, WORK_MAX)
    except BadSchema as error:
        raise invalid(at, f"{f'at {error.where} ' if error.where else ''}{error}") from None
    except (BadRegex, BadGrammar) as error:
        raise invalid(at, str(error)) from None
    except (TooLarge, RecursionError):
        raise invalid(at, "is too large, or can be read in too many ways") from None
    return automaton


def _part(builder: Builder, guided: Guided) -> Fragment:
    if guided.kind == "json_schema":
        return schema_part(builder, guided.text)
    if guided.kind == "json_object":
        return any_object(builder)
    if guided.kind == "regex":
        return regex_part(builder, guided.text, builder.character, is_search=False)
    if guided.kind == "choice":
        return builder.literals([one.encode() for one in guided.choices])
    return grammar_part(builder, guided.text)


class Vocabulary:
    """What the tokens are, in bytes; made when it is first needed, which takes a large one half a second."""

    def __init__(self, size: int, piece: Callable[[int], bytes], end_tokens: frozenset[int]) -> None:
        self._size = size
        self._piece = piece
        self.end_tokens = end_tokens

    @cached_property
    def pieces(self) -> list[bytes]:
        """By token; none for those that end an answer."""
        return [b"" if token in self.end_tokens else self._piece(token) for token in range(self._size)]

    @cached_property
    def first(self) -> npt.NDArray[np.int16]:
        """The first byte of each token; 256 where it has none."""
        return np.array([piece[0] if piece else 256 for piece in self.pieces], np.int16)

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """The tokens that end an answer."""
        return np.array(sorted(self.end_tokens), np.int64)


class Guide:
    """Of one answer, which has said `generated`. For one thread at a time."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary, generated: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._matcher = Matcher(automaton, WORK_MAX)
        self._state = self._matcher.start
        self._is_lost = False
        try:
            for token in generated:
                # What was said has been looked at before, with all that was not: it needs no bound of its own.
                self._matcher.work = -_REPLAY_WORK
                self._follow(self._after(token))
        except TooLarge:
            self._is_lost = True

    def likeliest(self, row: Row) -> int:
        """The likeliest token that may follow, which then counts as said."""
        return self._pick(lambda: self._search(row))

    def drawn(self, token: int, row: Row, redraw: Redraw) -> int:
        """`token` if it may follow, or what is drawn again among those that may; it then counts as said."""
        return self._pick(lambda: self._check_drawn(token, row, redraw))

    def _pick(self, find: Callable[[], tuple[int, int]]) -> int:
        self._matcher.work = 0
        if self._is_lost:
            return STUCK
        try:
            token, state = find()
            if token != STUCK:
                self._follow(state)
        except TooLarge:
            return STUCK
        return token

    def _follow(self, state: int) -> None:
        """An end token has no state behind it: nothing follows."""
        if state != DEAD:
            self._state = self._matcher.tidy(state)

    def _after(self, token: int) -> int:
        self._matcher.count(1)
        piece = self._vocabulary.pieces[token]
        return self._matcher.advance(self._state, piece) if piece else DEAD

    def _may_end(self, token: int) -> bool:
        return token in self._vocabulary.end_tokens and self._matcher.accepts(self._state)

    def _search(self, row: Row) -> tuple[int, int]:
        token = int(row.argmax())
        state = self._after(token)
        if state != DEAD or self._may_end(token):
            return token, state
        open_ = self._open()
        left = np.where(open_, row, -np.inf)
        for _ in range(_TRIES):
            token = int(left.argmax())
            if left[token] == -np.inf:
                return STUCK, DEAD
            state = self._after(token)
            if state != DEAD or self._may_end(token):
                return token, state
            left[token] = -np.inf
        for token in np.flatnonzero(open_)[np.argsort(-row[open_], kind="stable")]:
            state = self._after(int(token))
            if state != DEAD or self._may_end(int(token)):
                return int(token), state
        return STUCK, DEAD

    def _open(self) -> npt.NDArray[np.bool_]:
        """By token: whether its first byte may follow, or whether it may end the answer."""
        bits = self._matcher.first_bytes(self._state)
        table = np.array([*(bits >> byte & 1 for byte in range(256)), 0], bool)
        open_ = table[self._vocabulary.first]
        if self._matcher.accepts(self._state):
            open_[self._vocabulary.ends] = True
        return open_

    def _check_drawn(self, token: int, row: Row, redraw: Redraw) -> tuple[int, int]:
        state = self._after(token)
        if state != DEAD or self._may_end(token):
            return token, state
        allowed = self._likeliest_open(row)
        if not len(allowed):
            return self._search(row)
        token = redraw(allowed)
        state = self._after(token)
        return (token, state) if state != DEAD or self._may_end(token) else self._search(row)

    def _likeliest_open(self, row: Row) -> npt.NDArray[np.int64]:
        """Those of the likeliest tokens that may follow."""
        tokens = np.flatnonzero(self._open())
        if len(tokens) > CANDIDATES:
            tokens = tokens[np.argpartition(-row[tokens], CANDIDATES)[:CANDIDATES]]
        return np.array([t for t in tokens if self._after(int(t)) != DEAD or self._may_end(int(t))], np.int64)
