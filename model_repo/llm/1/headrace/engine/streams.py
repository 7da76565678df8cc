"""The streams that the loop speaks on: the owner's, which every sequence of `generate` has, and those of `run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.engine.owner import Owner, Sink


class Streams:
    """Who listens. There is at most one owner."""

    def __init__(self) -> None:
        self.owner: Owner | None = None
        self._one_shots: list[Owner] = []

    @property
    def is_congested(self) -> bool:
        """Whether a reader is so far behind that no step should be run."""
        return (self.owner is not None and self.owner.sink.is_congested) or any(
            one.sink.is_congested for one in self._one_shots
        )

    @property
    def has_events(self) -> bool:
        """Whether an event waits to be handed over."""
        return (self.owner is not None and bool(self.owner.events)) or any(one.events for one in self._one_shots)

    def open(self, sink: Sink, last_word: Mapping[str, Any], goes_on_ns: int | None = None) -> Owner:
        """A new owner; the one before hears `last_word`, because FINAL must ride on a response.

        Then the ends of its sequences, which an engine that schedules by itself may take a moment for, then FINAL.
        With `goes_on_ns`, the time, it is the same owner: its stream before ends with all that has gathered.
        """
        if self.owner is not None:
            self.owner.tell(last_word)
            if goes_on_ns is not None:
                self.owner.sink.close(self.owner.take(0, goes_on_ns))
                self.owner.sink = sink
                return self.owner
            self._one_shots.append(self.owner)
        self.owner = Owner(sink)
        return self.owner

    def open_one_shot(self, sink: Sink) -> Owner:
        """A stream for one sequence."""
        owner = Owner(sink, is_one_shot=True)
        self._one_shots.append(owner)
        return owner

    def take_lost(self) -> list[Owner]:
        """Closes and returns those whose reader has gone."""
        lost = [one for one in self._one_shots if one.sink.is_lost]
        for one in lost:
            self._one_shots.remove(one)
        if self.owner is not None and self.owner.sink.is_lost:
            lost.append(self.owner)
            self.owner = None
        for owner in lost:
            owner.sink.close(None)
        return lost

    def flush(self, steps: int, now_ns: int, is_busy: Callable[[Owner], bool]) -> None:
        """Hands over what has gathered; a `run` without a sequence gets FINAL."""
        if self.owner is not None:
            batch = self.owner.take(steps, now_ns)
            if batch is not None:
                self.owner.sink.put(batch)
        for one in list(self._one_shots):
            batch = one.take(steps, now_ns)
            if not is_busy(one):
                one.sink.close(batch)
                self._one_shots.remove(one)
            elif batch is not None:
                one.sink.put(batch)

    def close(self, now_ns: int) -> None:
        """Everything gathered, then FINAL."""
        for owner in [*self._one_shots, *([self.owner] if self.owner else [])]:
            owner.sink.close(owner.take(0, now_ns))
        self._one_shots, self.owner = [], None
