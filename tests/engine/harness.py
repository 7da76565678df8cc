"""An engine turned by hand: no thread, no sleep, a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.engine.backend import Backend
from headrace.engine.contract import StepBatch
from headrace.engine.loop import EngineLoop
from headrace.engine.operations import Cancel, Grant, OpenStream, Operation, Submit
from headrace.engine.request import Rejected, Sampling
from headrace.engine.sequence import Prepared
from headrace.engine.synthetic import SyntheticBackend


class ListSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []
        self.is_lost = False
        self.is_congested = False
        self.is_closed = False

    def put(self, batch: StepBatch) -> None:
        assert not self.is_closed
        self.batches.append(batch)

    def close(self, batch: StepBatch | None) -> None:
        if batch is not None:
            self.put(batch)
        self.is_closed = True


@dataclass
class Hand:
    """The loop, its clock, and what it said."""

    backend: Backend = field(default_factory=SyntheticBackend)
    slots: int = 4
    kv_cells: int = 4096
    max_waiting: int = 8
    prefill_chunk: int = 64
    preempt_after_ns: int = 200_000_000
    run_ahead: int = 0
    over_commit: float = 1.0
    now_ns: int = 1_000_000_000

    def __post_init__(self) -> None:
        self.loop = EngineLoop(
            self.backend,
            identity={},
            incarnation="test",
            slots=self.slots,
            kv_cells=self.kv_cells,
            lanes=2 * self.slots,
            max_waiting=self.max_waiting,
            prefill_chunk=self.prefill_chunk,
            preempt_after_ns=self.preempt_after_ns,
            run_ahead_tokens=self.run_ahead,
            kv_over_commit=self.over_commit,
            clock=lambda: self.now_ns,
        )
        self.sink = ListSink()
        self.turn(OpenStream(self.sink))

    def turn(self, *operations: Operation) -> None:
        self.loop.turn(list(operations))

    def submit(self, *prepared: Prepared | Rejected) -> None:
        self.turn(Submit(prepared))

    def grant(self, seq: int, limit: int) -> None:
        self.turn(Grant(((seq, limit),)))

    def cancel(self, *seqs: int, reason: str = "cancelled") -> None:
        self.turn(Cancel(seqs, reason))

    def run(self, turns_max: int = 2000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(turns_max):
            if self.loop.wait_s() > 0:
                return
            self.turn()
        raise AssertionError("the engine does not come to rest")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [dict(event) for batch in self.sink.batches for event in batch.events if event["type"] == kind]

    def finished(self, seq: int) -> dict[str, Any]:
        (event,) = [event for event in self.events("finished") if event["seq"] == seq]
        return event

    def output(self, seq: int) -> tuple[list[int], str]:
        """All ids and text of one sequence; each part must be valid UTF-8 by itself."""
        ids: list[int] = []
        text = ""
        for batch in self.sink.batches:
            id_at = text_at = 0
            for owner, count, length in zip(batch.seqs, batch.token_counts, batch.text_lengths, strict=True):
                if owner == seq:
                    ids += batch.token_ids[id_at : id_at + count]
                    text += batch.text[text_at : text_at + length].decode("utf-8")
                id_at += count
                text_at += length
        return ids, text

    def assert_idle(self) -> None:
        stats = self.loop.stats()
        assert (stats["active"], stats["waiting"], stats["paused"], stats["kv_reserved"]) == (0, 0, 0, 0)


GREEDY = Sampling(temperature=0.0)


def prepared(backend: Backend, seq: int, prompt: str | Sequence[int], **changes: Any) -> Prepared:
    """A request that passed every check."""
    tokens = backend.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
    base = Prepared(
        seq=seq,
        prompt=tokens,
        max_tokens=16,
        sampling=GREEDY,
        stop=(),
        stop_token_ids=frozenset(),
        ignore_eos=False,
        top_logprobs=None,
        credit=-1,
        received_ns=0,
        deadline_ns=0,
    )
    return replace(base, **changes)
