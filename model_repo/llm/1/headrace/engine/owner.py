"""Who hears of a sequence: an event stream's owner (or one `run`), and the columns being filled for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.engine.contract import StepBatch, merge
from headrace.engine.text import Release


class Sink(Protocol):
    """Where responses go. No method blocks; all but `is_lost` and `is_congested` are called by the loop only."""

    @property
    def is_lost(self) -> bool:
        """Whether nobody listens any more."""
        ...

    @property
    def is_congested(self) -> bool:
        """Whether so much waits that the loop should not add to it."""
        ...

    def put(self, batch: StepBatch) -> None:
        """Takes a response; its `number` is set when it is sent."""
        ...

    def close(self, batch: StepBatch | None) -> None:
        """Sends what waits, then `batch`, with FINAL. Afterwards `put` does nothing."""
        ...


class Owner:
    """One stream's columns. The loop's fast path appends to the lists directly."""

    __slots__ = ("counts", "events", "ids", "is_one_shot", "lengths", "rich", "seqs", "sink", "texts")

    def __init__(self, sink: Sink, *, is_one_shot: bool = False) -> None:
        self.sink = sink
        self.is_one_shot = is_one_shot
        self._clear()

    def _clear(self) -> None:
        self.seqs: list[int] = []
        self.counts: list[int] = []
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.texts: list[bytes] = []
        self.events: list[dict[str, Any]] = []
        # Parts with logprobs; kept apart so that the others need no columns of NaN until they meet.
        self.rich: list[StepBatch] = []

    def add(self, seq: int, release: Release, *, has_logprobs: bool) -> None:
        """A part that took the slow path."""
        if not release.ids and not release.text:
            return
        if not has_logprobs:
            self.seqs.append(seq)
            self.counts.append(len(release.ids))
            self.ids += release.ids
            self.lengths.append(len(release.text))
            self.texts.append(release.text)
            return
        tops = [detail.top for detail in release.details]
        self.rich.append(
            StepBatch(
                seqs=[seq],
                token_counts=[len(release.ids)],
                token_ids=list(release.ids),
                text_lengths=[len(release.text)],
                text=release.text,
                logprobs=[detail.logprob for detail in release.details],
                top_counts=[len(top) for top in tops],
                top_ids=[token for top in tops for token, _ in top],
                top_logprobs=[value for top in tops for _, value in top],
            )
        )

    def tell(self, event: Mapping[str, Any]) -> None:
        """An event for the next response."""
        self.events.append(dict(event))

    def take(self, steps: int, ended_ns: int) -> StepBatch | None:
        """What has gathered, as one response; None when that is nothing."""
        if not self.seqs and not self.events and not self.rich:
            return None
        batch = StepBatch(
            steps=steps,
            ended_ns=ended_ns,
            seqs=self.seqs,
            token_counts=self.counts,
            token_ids=self.ids,
            text_lengths=self.lengths,
            text=b"".join(self.texts),
            events=self.events,
        )
        if self.rich:
            batch = merge([batch, *self.rich])
        self._clear()
        return batch
