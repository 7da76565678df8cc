"""Which admitted sequences the next step is for: those in prefill, those that decode, and those without credit.

Sans-io. `lanes` runs beside `decoding`, so that a step needs no list of its own.
"""

from __future__ import annotations

from headrace.engine.backend import Prefill
from headrace.engine.sequence import Phase, Sequence, plan_prefill


class Running:
    """The sequences that hold a lane. Invariant: each is in exactly one of prefilling, decoding and paused."""

    def __init__(self) -> None:
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.lanes: list[int] = []
        # In the order in which they paused.
        self.paused: dict[int, Sequence] = {}

    def plan(self, budget: int) -> list[tuple[Sequence, Prefill]]:
        """The parts of prompts that the next step takes."""
        return plan_prefill(self.prefilling, budget) if self.prefilling else []

    @property
    def has_step(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.decoding) or bool(self.prefilling)

    def start(self, sequence: Sequence) -> None:
        """It has a lane and something to prefill."""
        sequence.phase = Phase.PREFILLING
        self.prefilling.append(sequence)

    def decode(self, sequence: Sequence) -> None:
        """Everything is prefilled."""
        self.remove(sequence)
        sequence.phase = Phase.DECODING
        self.decoding.append(sequence)
        self.lanes.append(sequence.lane)

    def pause(self, sequence: Sequence, now_ns: int) -> None:
        """Its credit is used up: it keeps its KV and leaves the batch."""
        self.remove(sequence)
        sequence.phase = Phase.PAUSED
        sequence.paused_ns = now_ns
        self.paused[sequence.id] = sequence

    def go_on(self, sequence: Sequence) -> None:
        """A paused one has credit again."""
        if sequence.position < len(sequence.prefix):
            self.remove(sequence)
            self.start(sequence)
        else:
            self.decode(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It leaves; its phase is set by who knows where to."""
        if sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
        elif sequence.phase is Phase.DECODING:
            self.decoding.remove(sequence)
            self.lanes.remove(sequence.lane)
        else:
            self.paused.pop(sequence.id, None)
