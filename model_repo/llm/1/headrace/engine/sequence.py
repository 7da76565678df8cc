"""One sequence in the engine: what was asked, how far it is, what is still held back.

    waiting --admitted--> prefilling --first token--> decoding --finished-->
                                          |   ^
                        no credit: paused +---+ (keeps its KV, leaves the batch)

Invariant: a lane is held exactly while the phase is PREFILLING, DECODING or PAUSED.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.backend import Prefill
from headrace.engine.request import Sampling
from headrace.engine.text import TextJoiner

if TYPE_CHECKING:
    from headrace.engine.owner import Owner


class Phase(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check. Times are CLOCK_MONOTONIC ns; `deadline_ns` 0 is none."""

    seq: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    top_logprobs: int | None
    credit: int
    received_ns: int
    deadline_ns: int


@dataclass(slots=True, eq=False)
class Sequence:
    """The loop's record. `limit` is the smaller of max_tokens and credit; `position` counts prompt tokens in the KV."""

    request: Prepared
    owner: Owner
    id: int
    max_tokens: int
    limit: int
    joiner: TextJoiner
    is_plain: bool
    phase: Phase = Phase.WAITING
    lane: int = -1
    position: int = 0
    cached: int = 0
    generated: int = 0
    withheld: int = 0
    is_fast: bool = False
    ids: list[int] = field(default_factory=list)
    admitted_ns: int = 0
    first_token_ns: int = 0

    @classmethod
    def of(cls, request: Prepared, owner: Owner) -> Sequence:
        """A waiting sequence for `request`."""
        plain = not request.stop and not request.stop_token_ids and request.top_logprobs is None
        sequence = cls(
            request, owner, request.seq, request.max_tokens, 0, TextJoiner(request.stop), plain, is_fast=plain
        )
        sequence.grant(request.credit)
        return sequence

    def grant(self, credit: int) -> None:
        """Raises the limit to `credit` tokens since the start; -1 lifts it; lower than granted is ignored."""
        wanted = self.max_tokens if credit < 0 else min(credit, self.max_tokens)
        self.limit = max(self.limit, wanted)

    @property
    def cells(self) -> int:
        """KV cells that it reserves."""
        return len(self.request.prompt) + self.max_tokens

    @property
    def stored(self) -> int:
        """Tokens of it that are in the KV. The newest token is not: it is decoded by the step that follows it."""
        return self.position + max(0, self.generated - 1)

    def tokens(self) -> list[int]:
        """The tokens that are in the KV."""
        return (self.request.prompt[: self.position] + self.ids)[: self.stored]


def plan_prefill(sequences: Many[Sequence], budget: int) -> list[tuple[Sequence, Prefill]]:
    """Which parts of which prompts the next step takes: `budget` tokens in all, the earliest admitted first.

    First come, first served gives the best mean time to the first token. A sequence without credit is prefilled up
    to its last prompt token, whose step would draw the first token.
    """
    plan = []
    for sequence in sequences:
        if budget <= 0:
            break
        prompt, position = sequence.request.prompt, sequence.position
        end = len(prompt) if sequence.limit > 0 else len(prompt) - 1
        count = min(budget, end - position)
        if count <= 0:
            continue
        after = position + count
        chunk = Prefill(sequence.lane, position, prompt[position:after], after == len(prompt))
        plan.append((sequence, chunk))
        budget -= count
    return plan
