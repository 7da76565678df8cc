"""An answer that lost its worker: when another goes on with it, and that readers, credits and counts go on, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.attempt_log import AttemptCause
from headrace.control.backoff import FREE_MAX, Retries
from headrace.control.continuation import KnownAnswer
from headrace.control.credit import CreditWindow, Reader
from headrace.control.errors import Reason
from headrace.control.lifecycle import Finish, Phase
from headrace.control.request import AttemptEnd, Step
from headrace.control.retry_budget import RetryBudget
from support.told import LOST, STOP, Told

CUT = AttemptEnd(Finish.INTERRUPTED, Reason.STREAM_INTERRUPTED)
DRAINED = AttemptEnd(Finish.DRAINED, Reason.DRAINING, is_retryable=True, is_free=True)
OVERLOADED = AttemptEnd(Finish.REJECTED, Reason.OVERLOADED)


def cut(tokens: int = 5, end: AttemptEnd = CUT, known_max: int = 100, **changes: object) -> Told:
    """A request that lost its worker after so many tokens, all of them told."""
    told = Told(known_max=known_max, **changes)  # type: ignore[arg-type]
    told.dispatch()
    told.admitted()
    told.output(tokens)
    told.read(2.0)
    told.ended(end)
    return told


def test_the_answer_goes_on_behind_what_was_told() -> None:
    told = cut()
    assert told.read(3.0) is Step.RETRY
    assert told.dispatch() == 13, "five were taken, and a window of eight: counted from the answer's first token"
    record = told.machine.record
    assert (record.phase, record.known_tokens) == (Phase.QUEUED, 5)
    told.admitted(4.0)
    told.output(2, 4.5)
    assert record.phase is Phase.DECODE
    assert told.read(5.0) is Step.WAIT
    assert told.ended(replace(STOP, output_tokens=2), 6.0), "it handed out two itself"
    told.read(6.0)
    assert told.steps == [Step.ACCEPTED, Step.DELTA, Step.CONTINUED, Step.DELTA, Step.TERMINAL]
    assert told.sequences == [1, 2, 3, 4, 5], "without a gap"
    assert (record.finish, record.attempts, record.output_tokens, record.sent_tokens) == (Finish.STOP, 2, 7, 7)
    assert [(one.cause, one.output_tokens, one.finish) for one in told.machine.attempted] == [
        (AttemptCause.FIRST, 5, Finish.INTERRUPTED),
        (AttemptCause.CONTINUATION, 2, Finish.STOP),
    ]
    told.machine.close()
    assert told.ledger.references == 0


@pytest.mark.parametrize(
    ("end", "known_max", "step"),
    [
        (CUT, 5, Step.RETRY),
        (DRAINED, 5, Step.RETRY),
        (CUT, 4, Step.TERMINAL),
        (CUT, 0, Step.TERMINAL),
        (DRAINED, 0, Step.TERMINAL),
        (AttemptEnd(Finish.FAILED, Reason.ENGINE_FAILED), 5, Step.TERMINAL),
        (AttemptEnd(Finish.FAILED, Reason.SEQUENCE_GAP), 5, Step.TERMINAL),
        (replace(CUT, output_tokens=6), 5, Step.TERMINAL),
        (AttemptEnd(Finish.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED), 5, Step.TERMINAL),
        (AttemptEnd(Finish.DEADLINE_EXCEEDED, Reason.EXECUTION_TIMEOUT), 5, Step.TERMINAL),
        (AttemptEnd(Finish.CANCELLED, Reason.CLIENT_CANCELLED), 5, Step.TERMINAL),
        (AttemptEnd(Finish.SLOW_CONSUMER, Reason.SLOW_CONSUMER), 5, Step.TERMINAL),
        (STOP, 5, Step.TERMINAL),
    ],
    ids=[
        "the worker is lost", "it was drained", "more tokens than are kept", "not asked for", "a drain, not asked for",
        "the engine failed on it", "a gap", "a token is missing", "the deadline", "the execution limit", "a cancel",
        "a slow reader", "the end of the answer",
    ],
)  # fmt: skip
def test_only_a_loss_is_continued_and_only_where_all_is_known(end: AttemptEnd, known_max: int, step: Step) -> None:
    assert cut(5, end, known_max).machine.next(3.0) is step


def test_without_it_the_request_ends_as_the_loss_did() -> None:
    for end in (CUT, DRAINED):
        told = cut(5, end, known_max=0)
        told.read(3.0)
        assert (told.machine.record.finish, told.machine.record.reason) == (end.finish, end.reason)


def test_before_any_output_it_is_a_plain_retry() -> None:
    told = Told(known_max=100)
    told.dispatch()
    told.admitted()
    told.read(1.0)
    told.ended(LOST)
    assert told.read(3.0) is Step.RETRY
    assert told.dispatch() == 8
    assert told.machine.current.cause is AttemptCause.RETRY
    told.admitted(4.0)
    told.read(4.0)
    assert told.steps == [Step.ACCEPTED, Step.RETRIED]


def test_output_that_waits_here_is_told_before_the_next_attempt() -> None:
    told = Told(known_max=100)
    told.dispatch()
    told.admitted()
    told.output(5)
    told.ended(CUT)  # nothing was read yet
    assert told.read(3.0) is Step.RETRY
    assert told.steps == [Step.ACCEPTED, Step.DELTA]
    assert told.machine.record.sent_tokens == 5


@pytest.mark.parametrize("failed", [OVERLOADED, LOST, CUT, DRAINED], ids=["overloaded", "lost", "cut", "drained"])
def test_a_continuation_that_fails_before_its_own_output_is_tried_again_with_the_same_tokens(
    failed: AttemptEnd,
) -> None:
    told = cut(retries=Retries(RetryBudget(), lambda: 0.0))
    told.read(3.0)
    told.dispatch()
    told.ended(failed, 4.0)
    assert told.read(4.0) is Step.RETRY
    told.dispatch()
    record = told.machine.record
    assert (record.known_tokens, record.attempts) == (5, 3)
    assert told.machine.current.cause is AttemptCause.CONTINUATION
    told.admitted(5.0)
    told.output(1, 5.0)
    told.ended(replace(STOP, output_tokens=1), 6.0)
    told.read(6.0)
    assert told.steps == [Step.ACCEPTED, Step.DELTA, Step.CONTINUED, Step.DELTA, Step.TERMINAL], "one notice"


@pytest.mark.parametrize("last", [OVERLOADED, LOST, CUT, AttemptEnd(Finish.REJECTED, Reason.QUEUE_TIMEOUT)])
def test_attempts_are_bounded_and_then_the_loss_is_the_end(last: AttemptEnd) -> None:
    told = cut(end=CUT)
    for number in range(2):
        assert told.read(3.0) is Step.RETRY
        told.dispatch()
        told.ended(LOST if number == 0 else last, 4.0)
    assert told.read(4.0) is Step.OVER
    record = told.machine.record
    assert (record.finish, record.reason, record.attempts) == (Finish.INTERRUPTED, Reason.STREAM_INTERRUPTED, 3)


def test_nobody_to_take_it_is_the_end_as_the_loss_was() -> None:
    told = cut(end=DRAINED)
    told.read(3.0)
    told.machine.give_up()
    told.read(3.0)
    assert (told.machine.record.finish, told.machine.record.reason) == (Finish.DRAINED, Reason.DRAINING)


def test_a_deadline_in_a_continuation_is_a_deadline() -> None:
    told = cut()
    told.read(3.0)
    told.dispatch()
    told.ended(AttemptEnd(Finish.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED), 50.0)
    told.read(50.0)
    assert told.machine.record.finish is Finish.DEADLINE_EXCEEDED


def test_drains_cost_no_attempt_but_do_not_go_on_for_ever() -> None:
    told = cut(end=DRAINED)
    for _ in range(FREE_MAX - 1):
        assert told.read(3.0) is Step.RETRY
        told.dispatch()
        told.admitted(3.0)
        told.output(1, 3.0)
        told.read(3.0)
        told.ended(DRAINED, 3.0)
    assert told.read(3.0) is Step.RETRY
    told.dispatch()
    told.output(1, 3.0)
    told.ended(DRAINED, 3.0)
    assert told.read(3.0) is Step.OVER


def test_the_fleets_budget_bounds_continuations_too() -> None:
    budget = RetryBudget(floor=0)
    told = cut(retries=Retries(budget, lambda: 0.0))
    assert told.read(3.0) is Step.OVER
    assert (told.machine.record.finish, told.machine.refused_retry) == (Finish.INTERRUPTED, "budget")
    assert budget.refused == 1
    told = cut(end=DRAINED, retries=Retries(RetryBudget(floor=0), lambda: 0.0))
    assert told.read(3.0) is Step.RETRY, "a drain is no sign of trouble"


def test_its_queue_limit_is_behind_it_but_deadline_and_execution_go_on() -> None:
    told = cut(retries=Retries(RetryBudget(), lambda: 0.0))  # admitted at 1.0; limits: 20 in the queue, 30 in an engine
    assert told.machine.next(25.0) is Step.RETRY
    assert not told.machine.tick(25.0)
    told.dispatch()
    assert told.machine.record.finish is None
    told.admitted(26.0)
    assert told.machine.record.admitted_at == 1.0
    assert told.machine.tick(31.0)
    assert told.machine.record.reason is Reason.EXECUTION_TIMEOUT
    told = cut()
    assert told.read(31.5) is Step.OVER
    assert told.machine.record.reason is Reason.EXECUTION_TIMEOUT
    told = cut()
    told.machine.next(3.0)
    told.machine.tick(100.0)
    assert told.machine.record.finish is Finish.DEADLINE_EXCEEDED


def test_a_cancel_between_two_attempts_is_the_end() -> None:
    told = cut()
    told.read(3.0)
    assert not told.machine.ask_end(Reason.CLIENT_CANCELLED, 3.5), "no engine runs it"
    assert told.read(3.5) is Step.OVER
    assert told.machine.record.finish is Finish.CANCELLED


def test_a_router_that_drains_continues_nothing() -> None:
    told = Told(known_max=100)
    told.dispatch()
    told.admitted()
    told.output(2)
    told.machine.wind_down(Reason.DRAINING, 2.5)
    told.ended(CUT)
    assert told.read(3.0) is Step.OVER
    assert told.machine.record.finish is Finish.INTERRUPTED


def test_text_that_has_no_token_of_its_own_is_told() -> None:
    """The lost engine had held back the end of a known token's text, where a stop string might have begun."""
    told = cut()
    told.read(3.0)
    told.dispatch()
    told.admitted(4.0)
    assert told.machine.output(told.attempt, 0, 4.0)
    assert not told.machine.is_quiet
    assert told.read(4.0) is Step.WAIT
    assert told.steps[-2:] == [Step.CONTINUED, Step.DELTA]
    assert told.machine.is_quiet
    assert told.machine.output(told.attempt, 0, 5.0)
    told.ended(replace(STOP, output_tokens=0), 5.0)
    assert told.read(5.0) is Step.OVER
    assert told.steps[-2:] == [Step.DELTA, Step.TERMINAL], "also where nothing follows it"


def test_late_words_of_the_lost_attempt_count_for_nothing() -> None:
    told = cut()
    told.read(3.0)
    lost = told.attempt
    told.dispatch()
    assert not told.machine.output(lost, 3, 4.0)
    assert told.machine.record.output_tokens == 5


def test_credit_counts_over_the_whole_answer() -> None:
    window = CreditWindow(8)
    assert window.open() == 8
    window.output(8, 1.0)
    window.write(3, 1)
    assert window.paused_at == 1.0
    assert window.reopen(2.0) == 11
    assert (window.paused_at, window.produced) == (None, 8)
    window.write(5, 2)
    assert window.grant() == 16
    window.output(8, 3.0)
    assert window.reopen(4.0) == 16
    assert window.paused_at == 4.0, "its reader has as much as it can hold"
    window.attach(Reader.IMPLICIT, 2)
    assert window.reopen(5.0) == 16, "a reader that goes back takes no credit from the engine"


def test_what_is_known_of_an_answer_is_bounded() -> None:
    known = KnownAnswer(5)
    known.add([1, 2], 7)
    known.add([], 2)
    known.add((3, 4, 5), 1)
    assert (list(known.token_ids), known.text_bytes) == ([1, 2, 3, 4, 5], 10)
    known.add([6], 1)
    assert list(known.token_ids) == []
    known.add([7], 1)
    assert list(known.token_ids) == [], "what is not whole is nothing"


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([CUT, DRAINED, LOST, OVERLOADED])), max_size=9))
def test_whatever_is_lost_how_often_the_events_are_one_story(losses: list[tuple[int, AttemptEnd]]) -> None:
    told = Told(known_max=30, window=64)
    total, limit = 0, 0
    told.dispatch()
    for tokens, end in losses:
        told.admitted(2.0)
        if tokens:
            told.output(tokens, 2.0)
            total += tokens
        assert told.ended(replace(end, output_tokens=tokens), 2.5)
        if told.read(3.0) is not Step.RETRY:
            break
        credit = told.dispatch()
        assert credit >= total
        assert not total or credit >= limit
        limit = credit
    record, machine = told.machine.record, told.machine
    assert told.sequences == list(range(1, len(told.sequences) + 1))
    assert record.output_tokens == record.sent_tokens == total == sum(one.output_tokens for one in machine.attempted)
    assert record.attempts - record.attempts_free <= 3
    assert total <= 30 + 6
    if record.finish is not None and total:
        assert record.finish in (Finish.INTERRUPTED, Finish.DRAINED, Finish.REJECTED, Finish.FAILED)
        assert told.steps[-1] is Step.TERMINAL
