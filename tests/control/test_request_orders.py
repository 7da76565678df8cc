"""One request at the Router, with facts in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.control.credit import Reader
from headrace.control.deadlines import Budget
from headrace.control.errors import Reason
from headrace.control.holdings import Resource
from headrace.control.lifecycle import FINISH_OF, Finish, Phase
from headrace.control.request import CONFIRM_S, AttemptEnd, Step
from support.told import LOST, STOP, Told


class AnyOrder(RuleBasedStateMachine):
    """Facts in any order, late and repeated: one end, told last; references follow; versions never fall."""

    @initialize(resumable=st.booleans())
    def begin(self, resumable: bool) -> None:
        self.told = Told(resume_s=20.0 if resumable else None, budget=Budget(0.0, 200.0, 50.0, 60.0))
        self.now = 0.0
        self.keys = [(7, 7)]
        self.version = 0
        self.finish: Finish | None = None

    @rule(seconds=st.sampled_from([0.0, 0.3, 3.0, 11.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.told.machine.tick(self.now)

    @precondition(lambda self: self.told.machine.next(self.now) is Step.RETRY or not self.told.attempt)
    @rule()
    def dispatch(self) -> None:
        if self.told.machine.record.finish is None:
            self.told.dispatch()
            self.keys.append((self.told.attempt, self.told.machine.record.attempt_version))

    @rule(data=st.data())
    def admitted(self, data: st.DataObject) -> None:
        self.told.machine.admitted(*data.draw(st.sampled_from(self.keys)), self.now, cached_tokens=1)

    @rule(data=st.data(), tokens=st.integers(1, 3))
    def output(self, data: st.DataObject, tokens: int) -> None:
        self.told.machine.output(data.draw(st.sampled_from(self.keys))[0], tokens, self.now)

    @rule(data=st.data(), end=st.sampled_from([STOP, LOST, AttemptEnd(Finish.CANCELLED)]))
    def ended(self, data: st.DataObject, end: AttemptEnd) -> None:
        self.told.machine.ended(*data.draw(st.sampled_from(self.keys)), end, self.now)

    @rule(reason=st.sampled_from(list(FINISH_OF)))
    def ask_end(self, reason: Reason) -> None:
        decided = self.told.machine.record.finish
        self.told.machine.ask_end(reason, self.now)
        assert decided is None or self.told.machine.record.finish is decided

    @rule()
    def wind_down(self) -> None:
        self.told.machine.wind_down(Reason.DRAINING, self.now)

    @rule()
    def detach(self) -> None:
        self.told.machine.detach(self.now)

    @rule(reader=st.sampled_from([Reader.IMPLICIT, Reader.EXPLICIT]))
    def attach(self, reader: Reader) -> None:
        self.told.machine.attach(reader, self.told.machine.window.position, self.now)

    @rule()
    def read(self) -> None:
        self.told.read(self.now)

    @invariant()
    def laws_hold(self) -> None:
        told, machine = self.told, self.told.machine
        record = machine.record
        ends = [step for step in told.steps if step in (Step.TERMINAL, Step.REFUSED)]
        assert len(ends) <= 1
        assert not ends or told.steps[-1] is ends[0]
        assert told.sequences == list(range(1, len(told.sequences) + 1))
        assert record.version >= self.version
        assert (record.finish is not None) == (record.phase is Phase.TERMINAL)
        assert self.finish in (None, record.finish), "an end is for ever"
        assert (Resource.ENGINE_WORK in machine.holdings) == machine.is_running
        assert told.ledger.references == len(machine.holdings)
        assert machine.pending >= 0
        self.version, self.finish = record.version, record.finish

    def teardown(self) -> None:
        if not hasattr(self, "told"):
            return
        machine = self.told.machine
        machine.ask_end(Reason.CLIENT_CANCELLED, self.now)
        self.told.ended(STOP, self.now)
        self.told.read(self.now + CONFIRM_S)
        machine.close()
        assert self.told.ledger.references == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
