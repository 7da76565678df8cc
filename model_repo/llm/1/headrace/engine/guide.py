"""Guided decoding of an engine that is stepped, by llguidance: which tokens may come next, for one answer.

What a guide allows is compiled once (`compile_guide`), on a stack of its own: llguidance reads what is nested by
recursion, and a schema of 25 KB overruns 8 MB, which ends the process. An answer then has a `Guide` that follows its
tokens. Each step has bounds; one that exceeds them, or leaves no token, picks `STUCK`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headrace.engine.guide_text import BadGuide, grammar_of
from headrace.engine.request import Guided, invalid

STUCK = -1
"""No token: the vocabulary has none that may follow, or it would take too long to find it."""
LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_STACK_BYTES = 256 << 20
_WHERE = re.compile(r"^(?:(?:at )?\d+\(\d+\): |failed to compile JSON schema: |failed to parse \"%json\": )+")
_MESSAGE_MAX = 200
_NOTHING = "NoExtension"
_stack_lock = threading.Lock()

Row = npt.NDArray[np.float32]


class _Vocabulary:
    """What a `TokenizerWrapper` asks for. Texts are never cut into tokens here: nothing is forced."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end_tokens: frozenset[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(end_tokens)
        self.eos_token_id = self.special_token_ids[0]

    def __call__(self, _: str | bytes) -> list[int]:
        return []


def make_tokenizer(size: int, piece: Callable[[int], bytes], end_tokens: frozenset[int]) -> LLTokenizer:
    """Of a vocabulary; for a large one that takes two seconds. A token without bytes can follow nowhere."""
    tokens = [b"" if token in end_tokens else piece(token) for token in range(size)]
    vocabulary = _Vocabulary(tokens, end_tokens)
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.special_token_ids)


def compile_guide(guided: Guided, tokenizer: LLTokenizer) -> LLMatcher:
    """What it allows, at its beginning. Raises `RefusalError` that names the field."""
    at = f"guided.{guided.kind}"
    try:
        grammar = grammar_of(guided)
    except BadGuide as error:
        raise invalid(at, _clause(str(error))) from None
    found: list[LLMatcher] = []
    _on_a_deep_stack(lambda: found.append(LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)))
    matcher = found[0]
    allows_some = matcher.is_error() or any(matcher.compute_bitmask())
    message = matcher.get_error()
    if not allows_some or message.startswith(_NOTHING):
        raise invalid(at, "allows nothing")
    if message:
        raise invalid(at, f"cannot be held to: {_clause(message)}")
    return matcher


def _clause(message: str) -> str:
    line = _WHERE.sub("", message.strip().partition("\n")[0])
    return line[:_MESSAGE_MAX].rstrip(" .:")


def _on_a_deep_stack(call: Callable[[], None]) -> None:
    """Only what is touched of it is ever memory."""
    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=call, name="guide")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


class Guide:
    """Of one answer, which has said `generated`. For one thread at a time."""

    def __init__(self, compiled: LLMatcher, end_tokens: frozenset[int], generated: Sequence[int] = ()) -> None:
        self._matcher = compiled.deep_copy()
        self._end_tokens = end_tokens
        for token in generated:
            self._matcher.consume_token(token)

    def likeliest(self, row: Row) -> int:
        """The likeliest token that may follow, which then counts as said."""
        token = int(row.argmax())
        if self._takes(token):
            return token
        allowed = self._allowed(len(row))
        return self._said(int(allowed[row[allowed].argmax()])) if len(allowed) else STUCK

    def drawn(self, row: Row, draw: Callable[[npt.NDArray[np.int64]], int]) -> int:
        """What is drawn among the tokens that may follow; it then counts as said."""
        allowed = self._allowed(len(row))
        return self._said(draw(allowed)) if len(allowed) else STUCK

    def _takes(self, token: int) -> bool:
        """One look, which is enough where a model does what it is asked to."""
        return token not in self._end_tokens and self._matcher.try_consume_tokens([token]) == 1

    def _allowed(self, size: int) -> npt.NDArray[np.int64]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return np.empty(0, np.int64)
        return np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little"))

    def _said(self, token: int) -> int:
        if token not in self._end_tokens and not self._matcher.consume_token(token):
            return STUCK
        return token
