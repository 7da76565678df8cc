"""One sequence in the engine: what was asked, how far it is, what is still held back.

    waiting --admitted--> prefilling --next token--> decoding --finished-->
       ^                         |   ^                |   ^
       |     no credit: paused   +---+----------------+---+  (keeps its KV, leaves the batch)
       |                  |
       +-- preempted <----+  (holds nothing; credit brings it back)

An engine that runs ahead has no paused ones: decoding --buffer full--> preempted, and decoding --finished--> draining
while tokens wait for credit.
Invariant: a lane is held exactly while the phase is PREFILLING, DECODING or PAUSED.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.engine.backend import Prefill
from headrace.engine.continuation import Delivered, Known
from headrace.engine.request import DRAINED, PRIORITY, PRIORITY_MAX, Sampling
from headrace.engine.run_ahead import RunAhead
from headrace.engine.text import Release, TextJoiner

if TYPE_CHECKING:
    from headrace.engine.owner import Owner


class Phase(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSED = "paused"
    PREEMPTED = "preempted"
    DRAINING = "draining"
    FINISHED = "finished"


LANE_PHASES = frozenset({Phase.PREFILLING, Phase.DECODING, Phase.PAUSED})


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check. Times are CLOCK_MONOTONIC ns; 0 is none.

    `queue_until_ns` bounds the wait for the first admission, `execution_ns` is a duration from there on. KV is reused
    between prompts of the same `cache_salt` only. `known` is what a lost engine had generated of the answer. `guide` is
    what the backend has compiled.
    """

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
    queue_until_ns: int = 0
    execution_ns: int = 0
    cache_salt: str = ""
    known: Known | None = None
    guide: Any = None
    priority: int = PRIORITY


@dataclass(slots=True, eq=False)
class Sequence:
    """The loop's record. `limit` is the smaller of max_tokens and credit.

    `prefix` is what has to be prefilled, the prompt and after a preemption the answer so far, too; `position` counts
    its tokens in the KV, `base` is how much of the answer it holds. `order` is the place in the order of acceptance.
    `booked` is how many cells are reserved for it at present.
    `ids` and `generated` count from the first token of the answer, those of a lost engine included.
    """

    request: Prepared
    owner: Owner
    id: int
    max_tokens: int
    limit: int
    joiner: TextJoiner
    is_plain: bool
    order: int = 0
    ahead: RunAhead | None = None
    phase: Phase = Phase.WAITING
    lane: int = -1
    booked: int = 0
    prefix: list[int] = field(default_factory=list)
    position: int = 0
    base: int = 0
    is_begun: bool = False
    preemptions: int = 0
    paused_ns: int = 0
    cached: int = 0
    generated: int = 0
    withheld: int = 0
    proposed: int = 0
    delivered: Delivered = field(default_factory=Delivered)
    is_fast: bool = False
    ids: list[int] = field(default_factory=list)
    admitted_ns: int = 0
    first_token_ns: int = 0
    stopped_ns: int = 0
    freed_ns: int = 0
    ending: dict[str, Any] | None = None

    @classmethod
    def of(cls, request: Prepared, owner: Owner, order: int = 0, run_ahead: int = 0) -> Sequence:
        """A waiting sequence for `request`; `run_ahead` is how far it runs beyond its credit, 0: it pauses."""
        plain = not request.stop and not request.stop_token_ids and request.top_logprobs is None
        known = request.known
        joiner = TextJoiner(request.stop) if known is None else known.joiner
        sequence = cls(request, owner, request.seq, request.max_tokens, 0, joiner, plain, order)
        if known is not None:
            sequence.ids, sequence.generated = list(known.tokens), len(known.tokens)
            sequence.delivered = known.delivered
        if run_ahead:
            sequence.ahead = RunAhead(run_ahead)
        sequence.grant(request.credit)
        sequence.settle()
        return sequence

    def grant(self, credit: int) -> None:
        """Raises the limit to `credit` tokens since the start; -1 lifts it; lower than granted is ignored."""
        wanted = self.max_tokens if credit < 0 else min(credit, self.max_tokens)
        self.limit = max(self.limit, wanted)

    def settle(self) -> None:
        """Decides whether the next token can go straight out."""
        # With credit left, everything before it has been handed out: nothing is kept.
        has_credit = self.ahead is None or self.generated < self.limit
        self.is_fast = self.is_plain and self.joiner.is_empty and has_credit

    def fresh(self, release: Release) -> Release:
        """What of a release was not told by the engine that was lost."""
        return self.delivered.strip(release) if self.delivered else release

    def rest(self, reason: str) -> Release:
        """What was held back and goes out at the end, for `reason`.

        Of one that is drained nothing does: where another engine goes on with it, half a character would be spoilt, and
        a stop string that begins there would have been told in part.
        """
        rest = self.fresh(self.joiner.flush())
        if reason != DRAINED:
            return rest
        self.withheld += len(rest.ids)
        return Release()

    def enter(self, lane: int, prefix: list[int], cached: int) -> None:
        """It has a lane, whose KV holds the first `cached` tokens of `prefix`."""
        self.lane, self.prefix, self.position, self.base = lane, prefix, cached, self.generated

    @property
    def buffered(self) -> int:
        """Tokens kept until there is credit for them."""
        return self.ahead.held if self.ahead is not None else 0

    @property
    def emitted(self) -> int:
        """Ids handed out; of a lost engine's, those that are not held back here."""
        return self.generated - self.withheld - self.joiner.held - self.buffered

    @property
    def known(self) -> int:
        """Tokens of the answer that a lost engine generated."""
        return len(self.request.known.tokens) if self.request.known is not None else 0

    @property
    def is_known_whole(self) -> bool:
        """Whether a lost engine generated the whole answer."""
        known = self.request.known
        return known is not None and (known.stop is not None or len(known.tokens) >= self.max_tokens)

    @property
    def has_lane(self) -> bool:
        """Whether it holds a slot and cells."""
        return self.phase in LANE_PHASES

    @property
    def must_abort(self) -> bool:
        """Whether it ran so far beyond its credit that the engine has to stop it."""
        return self.ahead is not None and self.ahead.must_abort(self.generated, self.limit)

    @property
    def may_resubmit(self) -> bool:
        """Whether an aborted one has enough credit to go on."""
        return self.ahead is not None and self.ahead.may_resubmit(self.generated, self.limit)

    @property
    def can_go_on(self) -> bool:
        """Whether it has credit for its next token, or enough of it to be submitted again."""
        return self.may_resubmit if self.ahead is not None else self.generated < self.limit

    @property
    def prefill_end(self) -> int:
        """How much of `prefix` is to be prefilled: without credit all but the last token, whose step draws the next."""
        may_draw = self.generated < self.limit or self.ahead is not None
        return len(self.prefix) if may_draw else len(self.prefix) - 1

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest gives way last where cells run short: the highest priority, then the oldest.

        Who gave way once ranks with the highest: work of low priority is not computed again and again.
        """
        return (-(PRIORITY_MAX if self.preemptions else self.request.priority), self.order)

    @property
    def cells(self) -> int:
        """KV cells that it may need."""
        return len(self.request.prompt) + self.max_tokens

    @property
    def stored(self) -> int:
        """Tokens of it that are in the KV. The newest token is not: it is decoded by the step that follows it."""
        return self.position + max(0, self.generated - self.base - 1)

    def tokens(self) -> list[int]:
        """The tokens that are in the KV."""
        return (self.request.prompt + self.ids)[: self.stored]


def plan_prefill(sequences: Many[Sequence], budget: int) -> list[tuple[Sequence, Prefill]]:
    """Which parts of which prompts the next step takes: `budget` tokens in all, the earliest admitted first.

    First come, first served gives the best mean time to the first token.
    """
    plan = []
    for sequence in sequences:
        if budget <= 0:
            break
        prefix, position = sequence.prefix, sequence.position
        count = min(budget, sequence.prefill_end - position)
        if count <= 0:
            continue
        after = position + count
        chunk = Prefill(sequence.lane, position, prefix[position:after], after == len(prefix))
        plan.append((sequence, chunk))
        budget -= count
    return plan
