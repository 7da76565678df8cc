"""Over-committed KV cells: who gets the cell of the next token, and who gives way for it.

A sequence books a part of the cells that it may need, and more as it grows. When they run short the newest of the
lowest priority give way: the oldest of the highest always come to their end, and nobody's work is lost for somebody who
came later with no higher priority. Who gave way once books all
that it may need when it comes back, so it is not prefilled again and again.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.lanes import Lanes
from headrace.engine.running import Running
from headrace.engine.sequence import Sequence


def book_step(running: Running, lanes: Lanes, give_way: Callable[[Sequence], None]) -> None:
    """Before a step: each that decodes has a cell for the token that it stores; who gives way last is asked first."""
    if not lanes.is_over_committed:
        return
    for sequence in sorted(running.decoding, key=_rank):
        while sequence.has_lane and sequence.stored >= sequence.booked and not lanes.extend(sequence):
            give_way(max((*running.prefilling, *running.decoding, *running.paused.values()), key=_rank))


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
