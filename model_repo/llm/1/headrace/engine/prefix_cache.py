"""Decides which lane's KV a new prompt can begin with: the longest common beginning, token by token.

KV is reused within one salt only: a tenant must not learn from the time to its first token what another one asked.
Sans-io. Lanes are few (at most 256), so comparing with each of them, vectorised, is cheaper than keeping a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A shorter beginning (often only the begin-of-text token and a greeting) is not worth pinning a source for.
MATCH_MIN = 16


@dataclass(slots=True)
class _Entry:
    tokens: npt.NDArray[np.int32]
    computed: int
    salt: str


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens of the prompt are in the KV of `lane`."""

    lane: int
    length: int


class PrefixIndex:
    """What is known to be in each lane's KV."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def put(self, lane: int, tokens: Sequence[int], computed: int, salt: str = "") -> None:
        """`lane` will hold `tokens`, of which the first `computed` are in the KV now, for prompts with `salt`."""
        self._entries[lane] = _Entry(np.asarray(tokens, dtype=np.int32), computed, salt)

    def grow(self, lane: int, computed: int) -> None:
        """The KV of `lane` now holds the first `computed` tokens."""
        self._entries[lane].computed = computed

    def remove(self, lane: int) -> None:
        """`lane` holds nothing any more."""
        self._entries.pop(lane, None)

    def match(self, tokens: Sequence[int], salt: str = "") -> Match | None:
        """The lane with the longest beginning of `tokens`; never all of it: one token is always decoded anew."""
        prompt = np.asarray(tokens, dtype=np.int32)
        best: Match | None = None
        for lane, entry in self._entries.items():
            if entry.salt != salt:
                continue
            length = min(len(prompt) - 1, entry.computed, len(entry.tokens))
            if length < MATCH_MIN or (best is not None and length <= best.length):
                continue
            differs = prompt[:length] != entry.tokens[:length]
            common = int(differs.argmax()) if differs.any() else length
            if common >= MATCH_MIN and (best is None or common > best.length):
                best = Match(lane, common)
        return best
