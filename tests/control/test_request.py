"""One request at the Router: what it tells, its one end, its timers, its readers, its releases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.control.credit import Reader
from headrace.control.errors import Reason
from headrace.control.holdings import ReleaseError, Resource
from headrace.control.lifecycle import FINISH_OF, Finish
from headrace.control.request import CONFIRM_S, PAUSED_NOTICE_S, AttemptEnd, Step
from support.told import LOST, STOP, Told


def decoding(**changes: object) -> Told:
    told = Told(**changes)  # type: ignore[arg-type]
    told.dispatch()
    told.admitted()
    told.output(3)
    told.read(2.0)
    return told


def test_the_story_of_a_request() -> None:
    told = decoding()
    told.output(2)
    assert told.ended(replace(STOP, output_tokens=5, release_s=0.5))
    assert told.read(3.0) is Step.OVER
    assert told.steps == [Step.ACCEPTED, Step.DELTA, Step.DELTA, Step.TERMINAL]
    assert told.sequences == [1, 2, 3, 4]
    record = told.machine.record
    assert (record.finish, record.sent_tokens, record.stopped_at, record.freed_at) == (Finish.STOP, 5, 2.5, 3.0)
    assert told.machine.is_over
    told.machine.close()
    assert told.ledger.references == 0


def test_a_retry_is_told_as_a_notice_and_counts_on() -> None:
    told = Told()
    told.dispatch()
    told.admitted()
    assert told.read(1.0) is Step.WAIT
    told.ended(LOST)
    assert told.read(3.0) is Step.RETRY
    assert told.dispatch() == 8
    told.admitted(4.0)
    told.output(1, 5.0)
    told.read(5.0)
    assert told.steps == [Step.ACCEPTED, Step.RETRIED, Step.DELTA]


@pytest.mark.parametrize(
    ("end", "had_output", "attempts", "step"),
    [
        (LOST, False, 1, Step.RETRY),
        (LOST, False, 3, Step.REFUSED),
        (LOST, True, 1, Step.TERMINAL),
        (replace(LOST, is_free=True), False, 3, Step.RETRY),
        (replace(LOST, is_retryable=False), False, 1, Step.REFUSED),
    ],
    ids=["retry", "no attempt left", "after output", "a refusal that cost nothing", "not retryable"],
)
def test_what_follows_a_failed_attempt(end: AttemptEnd, had_output: bool, attempts: int, step: Step) -> None:
    told = Told()
    for number in range(attempts):
        told.dispatch()
        if number + 1 < attempts:
            told.ended(LOST)
    if had_output:
        told.admitted()
        told.output(1)
        told.read(2.0)
    told.ended(end)
    assert told.machine.next(3.0) is step


@pytest.mark.parametrize(("now", "reason"), [(20.0, Reason.QUEUE_TIMEOUT), (100.0, Reason.DEADLINE_EXCEEDED)])
def test_no_retry_once_a_limit_has_passed(now: float, reason: Reason) -> None:
    told = Told()
    told.dispatch()
    told.ended(LOST, now)
    assert told.read(now) is Step.OVER
    assert (told.steps, told.machine.record.reason) == ([Step.REFUSED], reason)


def test_when_nobody_can_take_it_the_last_answer_is_the_end() -> None:
    told = Told()
    told.dispatch()
    told.ended(LOST)
    assert told.read(3.0) is Step.RETRY
    told.machine.give_up()
    assert told.read(3.0) is Step.OVER
    assert told.steps == [Step.REFUSED]
    assert told.machine.record.reason is Reason.WORKER_LOST_BEFORE_OUTPUT


@pytest.mark.parametrize("reason", FINISH_OF, ids=lambda reason: reason.name)
def test_an_end_of_this_side_is_told_once_the_engine_confirms(reason: Reason) -> None:
    told = decoding()
    told.output(2, 3.0)
    assert told.machine.ask_end(reason, 4.0), "the engine has to be told"
    assert not told.machine.ask_end(Reason.CLIENT_CANCELLED, 4.0)
    assert told.read(5.0) is Step.WAIT
    assert Resource.SLOT in told.machine.holdings, "asked is not confirmed"
    assert not told.output(1, 5.0), "output after the end"
    told.ended(AttemptEnd(Finish.CANCELLED, release_s=0.1, output_tokens=6), 5.5)
    told.read(5.5)
    assert told.steps[-1] is Step.TERMINAL
    record = told.machine.record
    assert (record.finish, record.reason, told.machine.dropped) == (FINISH_OF[reason], reason, 2)
    assert (record.asked_at, record.freed_at) == (4.0, 5.5)


def test_the_terminal_does_not_wait_for_a_silent_engine_but_the_resources_do() -> None:
    told = decoding()
    told.machine.ask_end(Reason.CLIENT_CANCELLED, 4.0)
    assert told.read(4.0 + CONFIRM_S - 0.01) is Step.WAIT
    assert told.read(4.0 + CONFIRM_S) is Step.OVER
    assert told.steps[-1] is Step.TERMINAL
    assert not told.machine.is_over
    with pytest.raises(ReleaseError):
        told.machine.close()
    told.ended(AttemptEnd(Finish.CANCELLED), 9.0)
    told.machine.close()
    assert told.ledger.references == 0


@pytest.mark.parametrize(
    ("end", "finish"),
    [
        (AttemptEnd(Finish.CANCELLED), Finish.DRAINED),
        (STOP, Finish.STOP),
        (AttemptEnd(Finish.INTERRUPTED, Reason.STREAM_INTERRUPTED), Finish.INTERRUPTED),
    ],
)
def test_winding_down_tells_what_was_generated_and_then_the_first_end(end: AttemptEnd, finish: Finish) -> None:
    told = decoding()
    assert told.machine.wind_down(Reason.DRAINING, 4.0)
    assert not told.machine.wind_down(Reason.CLIENT_CANCELLED, 4.0)
    assert told.output(2, 4.5)
    told.ended(end, 5.0)
    told.read(5.0)
    assert told.steps[-2:] == [Step.DELTA, Step.TERMINAL]
    assert (told.machine.record.finish, told.machine.dropped) == (finish, 0)


def test_winding_down_before_any_attempt_ends_at_once() -> None:
    told = Told()
    assert not told.machine.wind_down(Reason.DRAINING, 0.5)
    assert told.read(0.5) is Step.OVER
    assert (told.steps, told.machine.record.finish) == ([Step.REFUSED], Finish.DRAINED)


def test_a_number_of_tokens_that_does_not_agree_is_a_gap() -> None:
    told = decoding()
    told.ended(replace(STOP, output_tokens=4))
    told.read(3.0)
    assert (told.machine.record.finish, told.machine.record.reason) == (Finish.FAILED, Reason.SEQUENCE_GAP)


def test_late_messages_change_nothing_and_are_counted() -> None:
    told = Told()
    assert not told.machine.output(0, 1, 0.0), "before any attempt"
    told.machine.late = 0
    told.dispatch()
    old = told.attempt, told.machine.record.attempt_version
    told.ended(LOST)
    told.read(3.0)
    told.dispatch()
    machine, new = told.machine, told.machine.record.attempt_version
    before = repr(machine.record), machine.pending, len(machine.holdings)
    assert not machine.admitted(*old, 4.0)
    assert not machine.admitted(told.attempt, old[1], 4.0)
    assert not machine.admitted(old[0], new, 4.0)
    assert not machine.output(old[0], 3, 4.0)
    assert not machine.ended(*old, STOP, 4.0)
    assert not machine.ended(told.attempt, old[1], STOP, 4.0)
    assert (repr(machine.record), machine.pending, len(machine.holdings), machine.late) == (*before, 6)
    assert told.admitted(5.0)
    assert not told.admitted(5.0)
    told.ended(STOP)
    assert not told.ended(STOP)
    assert not told.output(1)
    assert machine.late == 9


@pytest.mark.parametrize(
    ("at", "state", "reason"),
    [
        (20.0, "queued", Reason.QUEUE_TIMEOUT),
        (30.9, "decode", None),
        (31.0, "decode", Reason.EXECUTION_TIMEOUT),
        (40.0, "finished", None),
        (100.0, "finished", Reason.DEADLINE_EXCEEDED),
        (100.0, "queued", Reason.DEADLINE_EXCEEDED),
    ],
)
def test_the_limits_of_time(at: float, state: str, reason: Reason | None) -> None:
    told = Told()
    told.dispatch()
    if state != "queued":
        told.admitted(1.0)
        told.output(2, 1.0)
    if state == "finished":  # the engine is done, the reader is not
        told.ended(STOP, 2.0)
    assert told.machine.tick(at) is (reason is not None and state != "finished")
    assert told.machine.record.reason is reason


def test_a_reader_that_is_too_slow_is_told_first_and_then_ended() -> None:
    told = decoding(window=3, slow_s=5.0)
    told.machine.window.attach(Reader.EXPLICIT, 0)
    assert told.machine.window.paused_at == 2.0
    assert not told.machine.tick(2.0 + PAUSED_NOTICE_S - 0.01)
    told.read(2.9)
    assert told.steps[-1] is Step.DELTA
    told.machine.tick(2.0 + PAUSED_NOTICE_S)
    told.read(3.0)
    told.machine.tick(4.0)
    told.read(4.0)
    assert told.steps[-1] is Step.PAUSED
    assert told.steps.count(Step.PAUSED) == 1, "once in a pause"
    assert told.machine.tick(7.0)
    assert told.machine.record.reason is Reason.SLOW_CONSUMER


def test_a_write_that_hangs_is_a_slow_reader_too() -> None:
    told = decoding(slow_s=5.0)
    told.machine.writing_since = 10.0
    assert not told.machine.tick(14.9)
    assert told.machine.tick(15.0)
    assert told.machine.record.reason is Reason.SLOW_CONSUMER


@pytest.mark.parametrize(("now", "finish"), [(4.0, Finish.CANCELLED), (100.0, Finish.DEADLINE_EXCEEDED)])
def test_a_call_that_ends_ends_its_request(now: float, finish: Finish) -> None:
    told = decoding()
    assert told.machine.detach(now)
    assert told.machine.record.finish is finish


def test_without_a_reader_the_log_goes_on_behind_the_newest_event() -> None:
    told = decoding(resume_s=10.0)
    machine = told.machine
    machine.attach(Reader.EXPLICIT, 0, 3.0)  # it repeats from the start, and goes before it has caught up
    assert not machine.detach(4.0)
    assert (machine.window.taken, machine.grant()) == (3, None)
    told.output(5, 4.5)
    told.read(4.5)
    assert machine.grant() == 16, "what the log took is taken"
    assert not machine.tick(13.9)
    assert machine.tick(14.0)
    assert machine.record.reason is Reason.CLIENT_DISCONNECTED


def test_a_log_takes_half_a_window_at_a_time_and_no_more_than_it_keeps() -> None:
    told = decoding(resume_s=10.0)
    machine = told.machine
    machine.detach(4.0)
    told.output(3, 5.0)
    assert told.read(5.0) is Step.WAIT
    told.output(1, 5.0)
    machine.log_is_full = True
    assert told.read(5.0) is Step.WAIT
    machine.log_is_full = False
    told.read(5.0)
    assert machine.pending == 0
    told.output(1, 5.0)
    told.ended(replace(STOP, output_tokens=8))
    machine.log_is_full = True
    assert told.read(5.0) is Step.OVER, "what is over is told to its end"


def test_a_part_of_what_waits_may_be_told() -> None:
    told = decoding()
    told.output(3, 3.0)
    assert told.machine.next(3.0) is Step.DELTA
    told.machine.take(Step.DELTA, 1)
    assert told.machine.pending == 2


@pytest.mark.parametrize("state", ["output", "nothing", "news", "detached", "over"])
def test_the_shortcut_tells_output_exactly_where_next_would(state: str) -> None:
    told = decoding()
    if state == "news":
        told = Told()
        told.dispatch()
        told.admitted()
    if state in ("output", "detached", "over"):
        told.output(2)
    if state == "detached":
        told.machine.detach(3.0)
    if state == "over":
        told.machine.ask_end(Reason.CLIENT_CANCELLED, 3.0)
    before, expected = told.machine.sequence, told.machine.next(3.0)
    sequence = told.machine.tell_output(3.0)
    assert (sequence > 0) is (state == "output")
    if sequence:
        assert expected is Step.DELTA
        assert (sequence, told.machine.sequence, told.machine.pending) == (before + 1, before + 1, 0)
        assert told.machine.next(3.0) is Step.WAIT
    else:
        assert (told.machine.sequence, told.machine.next(3.0)) == (before, expected)
