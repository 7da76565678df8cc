"""Keeps what an engine generated ahead of the credit, where the engine cannot pause one sequence (TensorRT-LLM).

    running --generated = limit + capacity--> aborted --credit: generated <= limit + capacity / 2--> running

Sans-io. The sequence stays in the engine's batch when its credit is used up; what it says from then on is pushed here
and taken out as credit comes, in order. Who drives the engine asks after every push whether to abort, and after every
grant whether to submit again (with prompt + generated tokens, and max_tokens reduced by them).
"""

from __future__ import annotations

from collections import deque

from headrace.engine.text import Release


class RunAhead:
    """One sequence's buffer. Invariant: parts come out once, in order, and whole: ids never without their text.

    `capacity` is how many tokens may be generated beyond the credit; `limit` is the credit, absolute.
    """

    __slots__ = ("_capacity", "_parts", "held")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, not {capacity}")
        self._capacity = capacity
        self._parts: deque[Release] = deque()
        self.held = 0
        """Tokens kept."""

    def push(self, release: Release) -> None:
        """Takes what was generated and may be shown."""
        for part in release.split():
            if part.ids or part.text:
                self._parts.append(part)
                self.held += len(part.ids)

    def take(self, room: int) -> Release:
        """The next `room` tokens at most, less where a character would be cut; empty when there are none."""
        taken = Release()
        texts = []
        while self._parts and len(self._parts[0].ids) <= room:
            part = self._parts.popleft()
            room -= len(part.ids)
            taken.ids += part.ids
            taken.details += part.details
            texts.append(part.text)
        taken.text = b"".join(texts)
        self.held -= len(taken.ids)
        return taken

    def drop(self) -> int:
        """Forgets everything; returns how many tokens that were."""
        dropped, self.held = self.held, 0
        self._parts.clear()
        return dropped

    def must_abort(self, generated: int, limit: int) -> bool:
        """Whether the engine has to stop working for the sequence."""
        return generated - limit >= self._capacity

    def may_resubmit(self, generated: int, limit: int) -> bool:
        """Whether an aborted sequence is worth its prefill again: half the capacity is free."""
        return generated - limit <= self._capacity // 2
