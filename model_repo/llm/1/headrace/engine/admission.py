"""The queue in front of the slots, in the order of acceptance, and when its head is worth trying again.

Sans-io. A head that did not fit blocks the queue until something is given back, the head changes, or somebody will
have been paused for long enough to be preempted: so a long queue costs nothing between those moments.
"""

from __future__ import annotations

from collections import deque

from headrace.engine.sequence import Sequence


class AdmissionQueue:
    """First come, first served: whoever was preempted comes back to the place that acceptance gave it."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()
        self._is_blocked = False
        self._relief_ns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def head(self) -> Sequence | None:
        """Who is next; None when nobody is, or when it is known not to fit."""
        return self._waiting[0] if self._waiting and not self._is_blocked else None

    @property
    def relief_ns(self) -> int:
        """When a blocked head is worth another look; 0: only once something is given back."""
        return self._relief_ns if self._waiting and self._is_blocked else 0

    def put(self, sequence: Sequence) -> None:
        """In its place by `order`, which is the end unless it was preempted."""
        if not self._waiting or self._waiting[-1].order < sequence.order:
            self._waiting.append(sequence)
            return
        before = 0
        while self._waiting[before].order < sequence.order:
            before += 1
        self._waiting.insert(before, sequence)
        self._is_blocked = False

    def remove(self, sequence: Sequence) -> None:
        """It does not wait any more."""
        self._waiting.remove(sequence)
        self._is_blocked = False

    def block(self, relief_ns: int) -> None:
        """The head does not fit; `relief_ns` as above."""
        self._is_blocked = True
        self._relief_ns = relief_ns

    def hear_of_relief(self, at_ns: int) -> None:
        """From `at_ns` on somebody can be preempted."""
        self._relief_ns = min(self._relief_ns or at_ns, at_ns)

    def reopen(self) -> None:
        """Something was given back."""
        self._is_blocked = False

    def reopen_at(self, now_ns: int) -> None:
        """Time has passed."""
        if 0 < self.relief_ns <= now_ns:
            self._is_blocked = False
