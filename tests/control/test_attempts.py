"""The ledger of attempts: what is refused, and that each attempt ends once and gives everything back."""

import pytest

from headrace.control import attempt_events
from headrace.control.attempt_book import Cause
from headrace.control.attempts import AttemptLedger, DuplicateAttempt
from headrace.control.errors import Failure, Reason
from headrace.control.worker_queue import WAITING_BYTES_MAX
from support.attempts import REVISION, RUN, book, wanted


@pytest.fixture
def ledger() -> AttemptLedger:
    made = AttemptLedger()
    made.open_worker(book())
    return made


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": 6}, Reason.STALE_EPOCH),
        ({"epoch": 8}, Reason.STALE_EPOCH),
        ({"replica": "replicas/b"}, Reason.STALE_EPOCH),
        ({"revision": "models/m/revisions/ba9876543210"}, Reason.STALE_EPOCH),
        ({"remaining_s": 0.0}, Reason.DEADLINE_EXCEEDED),
        ({"remaining_s": -1.0}, Reason.DEADLINE_EXCEEDED),
        ({"queue_s": 0.0}, Reason.QUEUE_TIMEOUT),
        ({"remaining_s": 0.0, "queue_s": 0.0}, Reason.DEADLINE_EXCEEDED),
        ({"input_bytes": WAITING_BYTES_MAX + 1}, Reason.OVERLOADED),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_costs_nothing(ledger, changes, reason):
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(1, **changes), 0.0)
    assert refused.value.reason is reason
    assert not ledger.attempts
    with pytest.raises(DuplicateAttempt):  # its one end was the refusal
        ledger.dispatch(wanted(1), 0.0)


@pytest.mark.parametrize(
    ("name", "reason"), [(REVISION, Reason.REVOKED), ("replicas/a", Reason.STALE_EPOCH)], ids=["revision", "replica"]
)
def test_nothing_starts_on_what_is_revoked_and_what_runs_goes_on(ledger, name, reason):
    ledger.dispatch(wanted(1), 0.0)
    ledger.revoked = frozenset({name})
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(2), 0.0)
    assert refused.value.reason is reason
    assert ledger.finish(1, RUN) is not None


def test_draining_refuses_new_attempts_and_keeps_the_old(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.drain_worker("replicas/a")
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(2), 0.0)
    assert refused.value.reason is Reason.DRAINING
    assert not ledger.is_idle(["replicas/a"])
    assert ledger.finish(1, RUN) is not None
    assert ledger.is_idle(["replicas/a"])
    other = AttemptLedger()
    other.open_worker(book())
    other.draining = True
    with pytest.raises(Failure) as refused:
        other.dispatch(wanted(1), 0.0)
    assert refused.value.reason is Reason.DRAINING


def test_only_so_many_wait(ledger):
    limit = ledger.queues["replicas/a"].requests_max
    for token in range(1, limit + 3):  # two of them have a slot as good as certain
        ledger.dispatch(wanted(token), 0.0)
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(1000), 0.0)
    assert refused.value.reason is Reason.OVERLOADED
    assert refused.value.metadata == {"queueDepth": str(limit), "limit": str(limit), "stage": "requests"}
    ledger.admit(1, RUN, 5, 1.0)
    ledger.finish(1, RUN)
    ledger.dispatch(wanted(1001), 1.0)


def test_a_repetition_is_dropped_for_its_session_and_refused_to_another(ledger):
    ledger.dispatch(wanted(1), 0.0)
    with pytest.raises(DuplicateAttempt):
        ledger.dispatch(wanted(1), 0.0)
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(1, session=2), 0.0)
    assert refused.value.reason is Reason.ALREADY_EXISTS
    ledger.finish(1, RUN)
    with pytest.raises(DuplicateAttempt):
        ledger.dispatch(wanted(1), 0.0)
    assert ledger.counts.duplicates == 3


def test_old_tokens_are_forgotten_in_order(ledger, monkeypatch):
    monkeypatch.setattr(attempt_events, "REMEMBERED_TOKENS", 2)
    for token in (1, 2, 3):
        ledger.dispatch(wanted(token), 0.0)
        ledger.finish(token, RUN)
    ledger.dispatch(wanted(1), 0.0)
    with pytest.raises(DuplicateAttempt):
        ledger.dispatch(wanted(3), 0.0)


def test_admission_books_kv_for_prompt_and_output_within_the_context(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.dispatch(wanted(2, max_tokens=99), 0.0)
    ledger.admit(1, RUN, 5, 2.5)
    ledger.admit(2, RUN, 50, 2.5)
    load = ledger.load("replicas/a")
    assert load is not None
    assert (load.active, load.waiting, load.kv_cells_reserved) == (2, 0, 25 + 100)
    assert ledger.admit(1, RUN, 5, 3.0) is None
    assert ledger.admit(99, RUN, 5, 3.0) is None
    assert ledger.counts.late == 2


def test_the_first_cause_of_a_cancel_stands_and_only_the_owner_may(ledger):
    ledger.dispatch(wanted(1), 0.0)
    assert ledger.cancel(1, 2, Cause.CANCELLED, 1.0) is None
    attempt = ledger.cancel(1, 1, Cause.SLOW_CONSUMER, 2.0)
    assert attempt is not None
    assert ledger.cancel(1, 1, Cause.CANCELLED, 3.0) is None
    assert (attempt.cause, attempt.cancel_asked_at) == (Cause.SLOW_CONSUMER, 2.0)
    assert ledger.cancel_worker("replicas/a", Cause.DRAINED, 4.0) == []
    assert ledger.attempts  # "cancel sent" is not "cancel confirmed"
    counts = ledger.counts
    assert (counts.late, counts.duplicate_cancels, counts.cancels_asked, counts.cancels_confirmed) == (1, 1, 1, 0)
    ledger.finish(1, RUN)
    ledger.dispatch(wanted(2), 5.0)
    ledger.finish(2, RUN)  # nobody asked for it
    assert (counts.cancels_asked, counts.cancels_confirmed) == (1, 1)


def test_a_cancel_that_goes_with_its_worker_is_not_confirmed(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.cancel(1, 1, Cause.CANCELLED, 1.0)
    ledger.close_worker("replicas/a")
    assert (ledger.counts.cancels_asked, ledger.counts.cancels_confirmed) == (1, 0)


def test_credits_only_rise_for_the_owner_and_end_with_a_cancel(ledger):
    ledger.dispatch(wanted(1, credit_limit=8), 0.0)
    assert [ledger.credit(1, 1, limit) is not None for limit in (8, 7, 9, 9, 32)] == [False, False, True, False, True]
    assert ledger.counts.stale_credits == 3
    assert ledger.credit(1, 2, 100) is None
    assert ledger.credit(9, 1, 100) is None
    ledger.cancel(1, 1, Cause.CANCELLED, 1.0)
    assert ledger.credit(1, 1, 100) is None
    assert (ledger.counts.stale_credits, ledger.counts.late) == (3, 3)


def test_what_another_run_of_an_engine_says_does_not_count(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.close_worker("replicas/a")
    ledger.open_worker(book(incarnation=RUN + 1))
    ledger.dispatch(wanted(2), 1.0)
    assert ledger.admit(2, RUN, 5, 2.0) is None
    assert ledger.preempt(2, RUN, 1) is None
    assert ledger.resume(2, RUN, 1) is None
    assert ledger.finish(2, RUN) is None
    assert (ledger.counts.stale_incarnation, ledger.counts.late) == (4, 0)
    assert ledger.current("replicas/a", RUN) is None
    assert ledger.current("replicas/b", RUN) is None
    assert ledger.current("replicas/a", RUN + 1) is ledger.workers["replicas/a"]
    assert ledger.finish(2, RUN + 1) is not None


def numbers(ledger, replica="replicas/a"):
    load = ledger.load(replica)
    return load.active, load.waiting, load.kv_cells_reserved


def test_a_preempted_attempt_holds_neither_slot_nor_kv_until_it_is_resumed(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.dispatch(wanted(2), 0.0)
    assert ledger.preempt(1, RUN, 1) is None  # it has nothing to lose yet
    ledger.admit(1, RUN, 5, 1.0)
    ledger.admit(2, RUN, 5, 1.0)
    assert numbers(ledger) == (2, 0, 50)
    version = ledger.version
    assert ledger.preempt(1, RUN, 1) is not None
    assert numbers(ledger) == (1, 1, 25)
    assert ledger.version > version  # a load report is due
    assert ledger.preempt(1, RUN, 1) is None
    assert numbers(ledger) == (1, 1, 25)
    version = ledger.version
    assert ledger.resume(1, RUN, 1) is not None
    assert ledger.version > version
    assert ledger.resume(1, RUN, 1) is None
    assert numbers(ledger) == (2, 0, 50)
    ledger.preempt(1, RUN, 2)
    ledger.finish(1, RUN)
    assert numbers(ledger) == (1, 0, 25)
    assert (ledger.workers["replicas/a"].waiting, ledger.workers["replicas/a"].preempted) == (0, 0)
    assert ledger.preempt(1, RUN, 3) is None
    assert (ledger.counts.preemptions, ledger.counts.resumptions, ledger.counts.late) == (2, 1, 4)


def test_the_end_of_a_preemption_may_be_told_before_its_beginning(ledger):
    """Responses are merged, and a reader takes `resumed` first."""
    ledger.dispatch(wanted(1), 0.0)
    ledger.admit(1, RUN, 5, 1.0)
    ledger.resume(1, RUN, 1)
    assert numbers(ledger) == (1, 0, 25)
    ledger.preempt(1, RUN, 1)
    assert numbers(ledger) == (1, 0, 25)
    ledger.resume(1, RUN, 3)  # and more than one of them
    ledger.preempt(1, RUN, 2)
    ledger.preempt(1, RUN, 3)
    assert numbers(ledger) == (1, 0, 25)
    ledger.preempt(1, RUN, 4)
    assert numbers(ledger) == (0, 1, 0)


def test_readers_that_stand_still_do_not_close_the_queue_until_there_are_many(ledger):
    limit = ledger.queues["replicas/a"].requests_max
    for token in range(1, limit):
        ledger.dispatch(wanted(token), 0.0)
        ledger.admit(token, RUN, 5, 0.0)
        ledger.preempt(token, RUN, 1)
    for token in (1001, 1002):
        ledger.dispatch(wanted(token), 0.0)
    ledger.admit(1001, RUN, 5, 0.0)
    ledger.preempt(1001, RUN, 1)
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(1003), 0.0)
    assert refused.value.reason is Reason.OVERLOADED


def test_an_engine_that_does_not_confirm_a_cancel_is_found_by_the_second_look(ledger):
    ledger.open_worker(book("replicas/b", incarnation=RUN + 1))
    for token, replica in ((1, "a"), (2, "b"), (3, "b")):
        ledger.dispatch(wanted(token, replica=f"replicas/{replica}"), 0.0)
    ledger.cancel(1, 1, Cause.CANCELLED, 10.0)
    ledger.cancel(2, 1, Cause.CANCELLED, 10.0)
    assert ledger.unconfirmed(10.0) == []
    assert ledger.unconfirmed(10.1) == []  # the answer may be here, unread: it was this process that stood still
    ledger.finish(1, RUN)
    assert ledger.unconfirmed(11.1) == ["replicas/b"]
    ledger.close_worker("replicas/b")
    assert ledger.unconfirmed(99.0) == []


def test_an_attempt_that_nobody_cancelled_makes_no_engine_suspect(ledger):
    ledger.dispatch(wanted(1), 0.0)
    assert ledger.unconfirmed(1e9) == []
    assert ledger.unconfirmed(1e9) == []


def test_a_session_that_leaves_orphans_its_attempts_until_the_engine_confirms(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.dispatch(wanted(2, session=2), 0.0)
    ledger.admit(1, RUN, 5, 0.0)
    assert ledger.close_session(1, 3.0) == {"replicas/a": [1]}
    assert ledger.workers["replicas/a"].session_of(1) == 0
    assert ledger.cancel(1, 1, Cause.CANCELLED, 4.0) is None
    load = ledger.load("replicas/a")
    assert load is not None
    assert load.active == 1
    attempt = ledger.finish(1, RUN)
    assert attempt is not None
    assert (attempt.session, attempt.cause, attempt.cancel_asked_at) == (0, Cause.CANCELLED, 3.0)
    assert ledger.workers["replicas/a"].session_of(2) == 2
    assert ledger.workers["replicas/a"].session_of(1) == 0


def test_a_lost_worker_tells_who_had_output(ledger):
    for token in (1, 2):
        ledger.dispatch(wanted(token), 0.0)
    ledger.outputs.add(2)
    assert [(a.token, had) for a, had in ledger.close_worker("replicas/a")] == [(1, False), (2, True)]
    assert ledger.close_worker("replicas/a") == ()
    assert ledger.load("replicas/a") is None
    assert not ledger.outputs
    with pytest.raises(Failure):
        ledger.dispatch(wanted(3), 0.0)


def test_after_a_lost_lease_the_last_epoch_stays_valid_and_older_ones_do_not(ledger):
    ledger.add_epoch("replicas/a", 9)
    ledger.dispatch(wanted(1, epoch=7), 0.0)
    ledger.dispatch(wanted(2, epoch=9), 0.0)
    ledger.add_epoch("replicas/a", 11)
    with pytest.raises(Failure):
        ledger.dispatch(wanted(3, epoch=7), 0.0)
    ledger.dispatch(wanted(4, epoch=9), 0.0)
    ledger.add_epoch("replicas/unknown", 1)


@pytest.mark.parametrize(
    ("limits", "admitted_at", "passes_at", "cause"),
    [
        ({"remaining_s": 5.0}, None, 15.0, Cause.DEADLINE_EXCEEDED),
        ({"remaining_s": 5.0}, 12.0, 15.0, Cause.DEADLINE_EXCEEDED),
        ({"queue_s": 5.0}, None, 15.0, Cause.QUEUE_TIMEOUT),
        ({"queue_s": 5.0}, 12.0, None, None),
        ({"execution_s": 5.0}, 12.0, 17.0, Cause.EXECUTION_TIMEOUT),
        ({"execution_s": 5.0}, None, None, None),
        ({"remaining_s": 5.0, "queue_s": 5.0}, None, 15.0, Cause.DEADLINE_EXCEEDED),
        ({"remaining_s": 7.0, "execution_s": 3.0}, 12.0, 15.0, Cause.EXECUTION_TIMEOUT),
        ({}, None, None, None),
    ],
    ids=str,
)
def test_attempts_past_a_limit_are_found_once_with_that_limit_as_the_cause(
    ledger, limits, admitted_at, passes_at, cause
):
    ledger.dispatch(wanted(1, **limits), 10.0)
    if admitted_at is not None:
        ledger.admit(1, RUN, 5, admitted_at)
    if passes_at is None:
        assert ledger.overdue(1e9, 2.0) == []
        return
    assert ledger.overdue(passes_at + 1.9, 2.0) == []
    (found,) = ledger.overdue(passes_at + 2.1, 2.0)
    assert (found.cause, found.cancel_asked_at) == (cause, passes_at + 2.1)
    assert ledger.overdue(1e9, 2.0) == []
