"""A rival beside the attempt that counts: the first to answer wins, the loser is held until its end is confirmed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.attempt_log import AttemptCause
from headrace.control.errors import Reason
from headrace.control.hedge import is_due
from headrace.control.holdings import Resource
from headrace.control.lifecycle import Finish
from headrace.control.request import CONFIRM_S, AttemptEnd, RequestMachine, Step
from support.told import LOST, STOP, Told

FIRST, RIVAL = 1, 2
CANCELLED = AttemptEnd(Finish.CANCELLED, Reason.CLIENT_CANCELLED)
ENGINE_FAILED = AttemptEnd(Finish.FAILED, Reason.ENGINE_FAILED)


class Two(Told):
    """A request whose first attempt, 1, has got a rival, 2."""

    def __init__(self, *, resume_s: float | None = None) -> None:
        super().__init__(resume_s=resume_s)
        self.dispatch()
        assert self.machine.may_hedge
        assert self.machine.hedge(RIVAL, "replicas/2") == 8
        self.versions = {FIRST: self.machine.record.attempt_version, RIVAL: self.machine.version_of(RIVAL)}

    def admit(self, attempt: int, now: float = 1.0) -> bool:
        return self.machine.admitted(attempt, self.versions[attempt], now, cached_tokens=1)

    def end(self, attempt: int, end: AttemptEnd, now: float = 3.0) -> bool:
        return self.machine.ended(attempt, self.versions[attempt], end, now)

    def stopped(self) -> int:
        """The loser that is to be stopped, as the shell takes it."""
        token, self.machine.unstopped = self.machine.unstopped, 0
        return token


@pytest.mark.parametrize(("after_s", "now", "due"), [(0.0, 1e9, False), (2.0, 11.9, False), (2.0, 12.0, True)])
def test_a_rival_is_due_after_the_wait_and_never_where_it_is_off(after_s: float, now: float, due: bool) -> None:
    assert is_due(after_s, 10.0, now) is due


@pytest.mark.parametrize("winner", [FIRST, RIVAL])
def test_the_first_to_answer_wins_and_the_other_is_stopped(winner: int) -> None:
    two = Two()
    loser = FIRST + RIVAL - winner
    assert two.admit(FIRST)
    assert two.admit(RIVAL)
    assert two.machine.output(winner, 2, 2.0)
    assert two.stopped() == loser
    assert not two.machine.output(loser, 3, 2.1)
    assert two.machine.pending == 2
    assert two.machine.current.token == two.machine.record.attempt == winner
    assert not two.machine.may_hedge


def test_the_reader_learns_of_the_one_that_counts() -> None:
    two = Two()
    two.admit(RIVAL)
    assert two.read(1.0) is Step.WAIT
    assert two.steps == [], "it may lose yet"
    two.machine.output(RIVAL, 1, 2.0)
    two.read(2.0)
    assert two.steps == [Step.ACCEPTED, Step.DELTA]
    other = Two()
    other.admit(FIRST)
    other.read(1.0)
    other.admit(RIVAL)
    other.machine.output(RIVAL, 1, 2.0)
    other.read(2.0)
    assert other.steps == [Step.ACCEPTED, Step.RETRIED, Step.DELTA]


def test_the_request_is_not_over_before_the_loser_is_confirmed() -> None:
    two = Two()
    two.admit(FIRST)
    two.admit(RIVAL)
    two.machine.output(RIVAL, 1, 2.0)
    two.end(RIVAL, AttemptEnd(Finish.STOP, output_tokens=1), 2.5)
    assert two.read(2.5) is Step.WAIT, "the loser's usage is not known"
    assert not two.machine.is_over
    assert two.ledger.held[Resource.SLOT] == 1
    assert two.end(FIRST, CANCELLED, 2.6)
    assert two.machine.is_over
    assert two.read(2.6) is Step.OVER
    assert two.steps[-1] is Step.TERMINAL
    two.machine.close()
    assert two.ledger.references == 0
    finishes = [(one.number, one.cause, one.finish, one.is_delivered) for one in two.machine.attempted]
    assert finishes == [
        (1, AttemptCause.FIRST, Finish.CANCELLED, False),
        (2, AttemptCause.HEDGE, Finish.STOP, True),
    ]


def test_the_end_is_told_though_the_loser_is_never_confirmed() -> None:
    two = Two()
    two.admit(FIRST)
    two.machine.output(FIRST, 1, 2.0)
    two.end(FIRST, AttemptEnd(Finish.STOP, output_tokens=1), 2.5)
    two.read(2.0 + CONFIRM_S - 0.01)
    assert two.steps[-1] is Step.DELTA
    two.read(2.0 + CONFIRM_S)
    assert two.steps[-1] is Step.TERMINAL
    assert not two.machine.is_over


def test_where_one_fails_the_other_goes_on_and_nothing_is_retried() -> None:
    two = Two()
    two.admit(RIVAL)
    two.end(FIRST, LOST)
    assert two.read(3.0) is Step.WAIT
    assert two.machine.record.attempt == RIVAL
    assert two.machine.unstopped == 0
    assert two.steps == [Step.ACCEPTED]
    waiting = Two()
    waiting.end(FIRST, LOST)
    waiting.read(3.0)
    assert waiting.steps == [], "the rival has not begun"
    waiting.admit(RIVAL)
    waiting.read(3.0)
    assert waiting.steps == [Step.ACCEPTED]
    rival_fails = Two()
    rival_fails.end(RIVAL, LOST)
    assert rival_fails.read(3.0) is Step.WAIT
    assert rival_fails.machine.record.attempt == FIRST
    rival_fails.end(FIRST, LOST)
    assert rival_fails.read(3.0) is Step.RETRY
    rival_fails.dispatch()
    assert not rival_fails.machine.may_hedge, "once for a request"


def test_an_error_that_another_worker_would_repeat_is_the_end() -> None:
    two = Two()
    two.end(FIRST, ENGINE_FAILED)
    assert two.stopped() == RIVAL
    assert two.machine.is_running
    two.end(RIVAL, CANCELLED)
    two.read(3.0)
    assert two.machine.record.reason is Reason.ENGINE_FAILED
    assert two.machine.is_over


@pytest.mark.parametrize("winner", [FIRST, RIVAL])
def test_a_whole_answer_without_a_token_wins(winner: int) -> None:
    two = Two()
    loser = FIRST + RIVAL - winner
    two.end(winner, AttemptEnd(Finish.STOP, output_tokens=0))
    assert two.stopped() == loser
    two.end(loser, CANCELLED)
    two.read(3.0)
    assert two.machine.record.finish is Finish.STOP
    assert two.machine.current.token == winner


def test_both_are_asked_to_stop_when_the_request_ends() -> None:
    two = Two()
    assert two.machine.ask_end(Reason.CLIENT_CANCELLED, 2.0)
    assert two.machine.runs(FIRST)
    assert two.machine.runs(RIVAL)
    assert not two.machine.output(RIVAL, 1, 2.1)
    two.end(FIRST, CANCELLED)
    assert not two.machine.is_over
    two.end(RIVAL, CANCELLED)
    assert two.machine.is_over


def test_what_an_old_version_says_of_the_rival_does_not_count() -> None:
    two = Two()
    assert not two.machine.admitted(RIVAL, two.versions[RIVAL] - 1, 1.0)
    assert not two.machine.ended(RIVAL, two.versions[RIVAL] - 1, LOST, 1.0)
    assert two.machine.runs(RIVAL)


EVENTS = ("admit", "output", "stop", "lost", "failed", "cancelled", "late")


@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from([FIRST, RIVAL])), max_size=12),
    st.sampled_from([None, "cancel", "drain", "gone"]),
    st.integers(0, 12),
)
def test_in_every_order_one_attempt_is_told_and_nothing_is_left(
    events: list[tuple[str, int]], end: str | None, end_at: int
) -> None:
    two = Two()
    machine = two.machine
    counted: dict[int, int] = {FIRST: 0, RIVAL: 0}
    running, now = {FIRST, RIVAL}, 1.0
    for number, (event, attempt) in enumerate(events):
        now += 0.01
        if number == end_at and end is not None:
            _ask(machine, end, now)
        if event == "late" or attempt not in running:
            version = two.versions[attempt] + (event == "late")
            if event == "late" or attempt not in running:
                assert not machine.ended(attempt, version, STOP, now)
            continue
        if event == "admit":
            two.admit(attempt, now)
        elif event == "output":
            counted[attempt] += machine.output(attempt, 1, now)
        else:
            outcome = {"stop": STOP, "lost": LOST, "failed": ENGINE_FAILED, "cancelled": CANCELLED}[event]
            assert two.end(attempt, outcome, now)
            running.discard(attempt)
        if machine.unstopped:
            assert machine.unstopped in running
        two.stopped()
        assert {token for token in (FIRST, RIVAL) if machine.runs(token)} == running
        two.read(now)
    for attempt in sorted(running):
        assert two.end(attempt, LOST, now)
        two.read(now)
    if two.read(now) is Step.RETRY:
        machine.give_up()
        two.read(now)
    assert machine.is_over
    assert 0 in counted.values(), "output of both"
    delivered = [one.output_tokens for one in machine.attempted if one.is_delivered]
    assert sum(delivered) == sum(counted.values()) == machine.record.output_tokens
    assert two.steps.count(Step.TERMINAL) <= 1
    machine.close()
    assert two.ledger.references == 0


def _ask(machine: RequestMachine, end: str, now: float) -> None:
    if end == "cancel":
        machine.ask_end(Reason.CLIENT_CANCELLED, now)
    elif end == "drain":
        machine.wind_down(Reason.DRAINING, now)
    else:
        machine.detach(now)
