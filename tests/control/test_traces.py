"""The two worked traces of the design through the real classes, tick by tick: a slow reader with and without a bound.

Tokens A to G, at most one generated in a tick; the reader takes [1,0,0,0,1,0,1,0,0] tokens, before generation; the
deadline comes at tick 8, and a cancel in that same tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from engine.harness import Hand, prepared

from headrace.control.credit import CreditWindow
from headrace.control.deadlines import Budget
from headrace.control.errors import Reason
from headrace.control.holdings import ENGINE_SIDE, Resource, ResourceLedger
from headrace.control.lifecycle import Finish
from headrace.control.request import AttemptEnd, RequestMachine, Step, Terms

DRAIN = [1, 0, 0, 0, 1, 0, 1, 0, 0]
DEADLINE_TICK = 8
ATTEMPT = 77
UNBOUNDED = 1_000
_ENDS = {"stop": Finish.STOP, "length": Finish.LENGTH, "cancelled": Finish.CANCELLED}


@dataclass
class Tick:
    """What one tick did."""

    sent: str = ""
    generated: str = ""
    is_paused: bool = False
    granted: int | None = None


@dataclass
class Trace:
    """One request, its engine, and the wires between them, all without delay. A tick is a second."""

    window: int
    ledger: ResourceLedger = field(default_factory=ResourceLedger)
    ticks: list[Tick] = field(default_factory=list)
    waiting: str = ""
    """The text behind `machine.pending`."""
    terminals: int = 0
    confirmations: int = 0
    batches_read: int = 0

    def __post_init__(self) -> None:
        self.hand = Hand()
        self.hand.now_ns = 0
        self.machine = RequestMachine(
            Budget(received_at=0.0, deadline_at=float(DEADLINE_TICK)),
            CreditWindow(self.window, low=self.window - 1),  # each token taken is granted again
            Terms(attempts_max=1, slow_consumer_s=60.0),
            self.ledger,
        )
        credit = self.machine.dispatch(ATTEMPT, "replicas/a")
        self.request = prepared(self.hand.backend, ATTEMPT, "[[say=ABCDEFG]]", max_tokens=32, credit=credit)

    def drain(self, tick: Tick, now: float) -> None:
        """The reader takes one token, if there is one."""
        machine = self.machine
        if machine.next(now) is Step.ACCEPTED:
            machine.write(0, machine.take(Step.ACCEPTED))
        if machine.next(now) is Step.DELTA:
            sequence = machine.take(Step.DELTA, 1)
            tick.sent, self.waiting = self.waiting[0], self.waiting[1:]
            machine.write(1, sequence)

    def generate(self, tick: Tick, now: float) -> None:
        """One turn of the engine, with what is granted; then its output arrives."""
        tick.granted = self.machine.grant()
        if tick.granted is not None:
            self.hand.grant(ATTEMPT, tick.granted)
        elif now == 0:
            self.hand.submit(self.request)
        else:
            self.hand.turn()
        self.carry(tick, now)

    def carry(self, tick: Tick, now: float) -> None:
        """What the engine said since."""
        machine, version = self.machine, self.machine.record.attempt_version
        for batch in self.hand.sink.batches[self.batches_read :]:
            for event in batch.events:
                if event["type"] == "admitted":
                    assert machine.admitted(ATTEMPT, version, now)
            for part in batch.parts():
                tick.generated += part.text.decode()
                if machine.output(ATTEMPT, len(part.token_ids), now):
                    self.waiting += part.text.decode()
            for event in batch.events:
                if event["type"] == "finished":
                    end = AttemptEnd(_ENDS[event["reason"]], output_tokens=event["usage"]["emitted"])
                    self.confirmations += machine.ended(ATTEMPT, version, end, now)
        self.batches_read = len(self.hand.sink.batches)

    def run(self) -> None:
        for number, drains in enumerate(DRAIN):
            now = float(number)
            self.hand.now_ns = number * 1_000_000_000
            tick = Tick()
            self.ticks.append(tick)
            must_stop = self.machine.tick(now)
            if number == DEADLINE_TICK:
                assert not self.machine.ask_end(Reason.CLIENT_CANCELLED, now), "the first end stands"
            if must_stop:
                self.hand.cancel(ATTEMPT)
                self.carry(tick, now)
            for _ in range(drains):
                self.drain(tick, now)
            if self.machine.record.finish is None:
                self.generate(tick, now)
                tick.is_paused = not tick.generated and self.hand.loop.stats()["paused"] == 1
        while (step := self.machine.next(now)) is not Step.OVER:
            assert step is Step.TERMINAL
            self.machine.take(step)
            self.terminals += 1
        self.machine.close()

    @property
    def sent(self) -> str:
        return "".join(tick.sent for tick in self.ticks)

    @property
    def generated(self) -> str:
        return "".join(tick.generated for tick in self.ticks)


@pytest.mark.parametrize(
    ("window", "sent_in", "generated_in", "paused_in", "dropped"),
    [
        (3, {4: "A", 6: "B"}, {0: "A", 1: "B", 2: "C", 4: "D", 6: "E"}, [3, 5, 7], "CDE"),
        (UNBOUNDED, {4: "A", 6: "B"}, dict(enumerate("ABCDEFG")), [], "CDEFG"),
    ],
    ids=["bounded stream", "unbounded stream"],
)
def test_the_trace(
    window: int, sent_in: dict[int, str], generated_in: dict[int, str], paused_in: list[int], dropped: str
) -> None:
    trace = Trace(window)
    trace.run()
    assert {n: tick.sent for n, tick in enumerate(trace.ticks) if tick.sent} == sent_in
    assert {n: tick.generated for n, tick in enumerate(trace.ticks) if tick.generated} == generated_in
    assert [n for n, tick in enumerate(trace.ticks) if tick.is_paused] == paused_in
    assert trace.sent + dropped == trace.generated
    assert (trace.waiting, trace.machine.dropped) == (dropped, len(dropped))

    machine = trace.machine
    assert (machine.record.finish, machine.record.reason) == (Finish.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED)
    assert (machine.record.sent_tokens, machine.record.output_tokens) == (len(trace.sent), len(trace.generated))
    assert (trace.terminals, machine.sequence) == (1, 4), "accepted, two deltas, one terminal, and nothing behind it"


@pytest.mark.parametrize("window", [3, UNBOUNDED])
def test_after_the_trace_nothing_is_held_and_each_thing_was_freed_once(window: int) -> None:
    trace = Trace(window)
    trace.run()
    assert trace.confirmations == 1
    assert trace.machine.late == 0
    taken = {Resource.ENGINE_WORK, Resource.KV, Resource.SLOT, Resource.SEND_BUFFER, Resource.TRACE}
    assert dict(trace.ledger.released) == dict.fromkeys(taken, 1)
    assert trace.ledger.references == 0
    assert all(trace.ledger.held[resource] == 0 for resource in ENGINE_SIDE)
    trace.hand.assert_idle()
    assert len(trace.hand.events("finished")) == 1


def test_the_bounded_trace_never_runs_further_ahead_than_its_capacity() -> None:
    trace = Trace(3)
    trace.run()
    sent = generated = 0
    for tick in trace.ticks:
        sent += len(tick.sent)
        generated += len(tick.generated)
        assert generated - sent <= 3
    assert [tick.granted for tick in trace.ticks if tick.granted] == [4, 5]
