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
        self.paused: set[int] = set()

    def plan(self, budget: int) -> list[tuple[Sequence, Prefill]]:
        """The parts of prompts that the next step takes."""
        return plan_prefill(self.prefilling, budget) if self.prefilling else []

    @property
    def has_step(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.decoding) or bool(self.plan(1))

    def start(self, sequence: Sequence) -> None:
        """It was admitted: its prompt is next."""
        sequence.phase = Phase.PREFILLING
        self.prefilling.append(sequence)

    def decode(self, sequence: Sequence) -> None:
        """Its prompt is done, or it has credit again."""
        if sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
        self.paused.discard(sequence.id)
        sequence.phase = Phase.DECODING
        self.decoding.append(sequence)
        self.lanes.append(sequence.lane)

    def pause(self, sequence: Sequence) -> None:
        """Its credit is used up: it keeps its KV and leaves the batch."""
        self._leave_batch(sequence)
        sequence.phase = Phase.PAUSED
        self.paused.add(sequence.id)

    def remove(self, sequence: Sequence) -> None:
        """It ended."""
        if sequence.phase is Phase.PREFILLING:
            self.prefilling.remove(sequence)
        self.paused.discard(sequence.id)
        self._leave_batch(sequence)

    def _leave_batch(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.DECODING:
            self.decoding.remove(sequence)
            self.lanes.remove(sequence.lane)
