"""Which sequences warm an engine up, out of the shapes that it declares.

A decoding batch of each size, largest first, comes out of one group of sequences: they begin together and each ends
when the batch is to be smaller. Sans-io.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FULL_CONTEXT_S = 2.0
"""The full context is run where that takes no longer than this."""


@dataclass(frozen=True, slots=True)
class WarmSequence:
    """One sequence: how long its prompt is, and what it generates."""

    prompt_tokens: int
    max_tokens: int


def prefill(chunk: int, context_tokens: int) -> tuple[WarmSequence, ...]:
    """One full chunk of a prompt."""
    return (WarmSequence(max(1, min(chunk, context_tokens - 1)), 1),)


def decode(sizes: Sequence[int], chunk: int, context_tokens: int) -> tuple[WarmSequence, ...]:
    """Sequences whose decoding batch has each of these sizes for one step at least, in falling order.

    Prompts of one token are prefilled `chunk` a step, so with more of them the first ones wait for the last.
    """
    if not sizes:
        return ()
    slots = max(sizes)
    together = math.ceil(slots / max(1, chunk))
    longest = max(1, context_tokens - 1)
    return tuple(
        WarmSequence(1, min(longest, together - number // max(1, chunk) + sum(number < size for size in set(sizes))))
        for number in range(slots)
    )


def full_context(context_tokens: int, *, chunk: int, chunk_s: float) -> tuple[WarmSequence, ...]:
    """A prompt as long as the context allows; none where that would take too long.

    Args:
        context_tokens: length of the context.
        chunk: tokens of the chunk that was measured.
        chunk_s: seconds that it took.
    """
    if context_tokens <= chunk or chunk_s * context_tokens / max(1, chunk) > FULL_CONTEXT_S:
        return ()
    return (WarmSequence(context_tokens - 1, 1),)
