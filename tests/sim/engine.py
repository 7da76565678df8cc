"""A worker's engine: the real loop, turned by the timeline, and the stream that carries what it says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace.engine.continuation import Known, replay
from headrace.engine.contract import StepBatch, merge
from headrace.engine.loop import EngineLoop
from headrace.engine.operations import OpenStream, Operation, Submit
from headrace.engine.request import Continuation, Sampling
from headrace.engine.sequence import Prepared
from sim.model import END, PIECES, SimulatedBackend
from sim.timeline import Pipe

if TYPE_CHECKING:
    from sim.world import World

GREEDY = Sampling(temperature=0.0)
CREDIT_MAX = 2**63 - 1


class Engine:
    """One run of one worker's engine. It is its own sink: see `headrace.engine.owner.Sink`."""

    is_lost = False
    is_congested = False

    def __init__(self, world: World, replica: str, epoch: int, incarnation: int) -> None:
        scenario = world.scenario
        self.world = world
        self.replica = replica
        self.epoch = epoch
        self.incarnation = incarnation
        self.is_dead = False
        self.started_at = world.time.now
        self.loop = EngineLoop(
            SimulatedBackend(),
            identity={},
            incarnation=str(incarnation),
            slots=scenario.slots,
            kv_cells=scenario.kv_cells,
            lanes=2 * scenario.slots,
            max_waiting=16,
            prefill_chunk=scenario.prefill_chunk,
            preempt_after_ns=scenario.preempt_after_ms * 1_000_000,
            run_ahead_tokens=scenario.run_ahead,
            clock=lambda: world.time.now_ns,
        )
        self._inbox: list[Operation] = []
        self._next_ms = -1
        """When it turns next; -1: it sleeps."""
        self._says = Pipe(world.time, 3, self._deliver)
        self.loop.turn([OpenStream(self)])

    def take(self, operations: list[Operation]) -> None:
        """Operations arrive."""
        if self.is_dead:
            return
        self._inbox += operations
        self._turn_in(0)

    def kill(self) -> None:
        """The process is gone; what it has said may still be on its way."""
        self.is_dead = True

    def put(self, batch: StepBatch) -> None:
        if batch.seqs or any("seq" in event for event in batch.events):
            self._says.send(batch)

    def close(self, batch: StepBatch | None) -> None:
        raise AssertionError("nothing closes a stream here")

    def _deliver(self, batches: list[StepBatch]) -> None:
        self.world.scheduler.on_batch(self.replica, self.incarnation, merge(batches))

    def _turn_in(self, delay_ms: int) -> None:
        at = self.world.time.now_ns // 1_000_000 + delay_ms
        if self._next_ms < 0 or at < self._next_ms:
            self._next_ms = at
            self.world.time.later(delay_ms, self._turn, at)

    def _turn(self, at: int) -> None:
        if self.is_dead or at != self._next_ms:
            return
        self._next_ms = -1
        operations, self._inbox = self._inbox, []
        self.loop.turn(operations)
        self.world.laws.after_turn(self)
        wait_s = self.loop.wait_s()
        if wait_s == 0:
            self._turn_in(self.world.scenario.step_ms)
        elif self.loop._sequences:
            self._turn_in(max(1, math.ceil(wait_s * 1_000)))


def submit(
    token: int,
    prompt: list[int],
    known: Continuation | None,
    *,
    max_tokens: int,
    credit: int,
    now_ns: int,
    limits: Limits,
) -> Submit:
    """An attempt as the engine's intake would hand it to the loop."""
    deadline_s, queue_s, execution_s = limits
    return Submit(
        (
            Prepared(
                seq=token,
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=GREEDY,
                stop=(),
                stop_token_ids=frozenset(),
                ignore_eos=False,
                top_logprobs=None,
                credit=credit,
                received_ns=now_ns,
                deadline_ns=now_ns + int(deadline_s * 1e9),
                queue_until_ns=0 if queue_s is None else now_ns + max(1, int(queue_s * 1e9)),
                execution_ns=0 if execution_s is None else max(1, int(execution_s * 1e9)),
                known=None if known is None else _replay(known),
            ),
        )
    )


def _replay(known: Continuation) -> Known:
    return replay(known, PIECES.__getitem__, stop_strings=(), stop_token_ids=(), end_tokens={END})


Limits = tuple[float, float | None, float | None]
"""Seconds left: to the deadline, in the queue, in execution."""
