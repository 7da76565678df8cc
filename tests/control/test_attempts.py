"""The ledger of attempts: what is refused, and that each attempt ends once and gives everything back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.control import attempts
from headrace.control.attempts import AttemptLedger, Cause, Dispatched, DuplicateAttempt, WorkerBook
from headrace.control.errors import Failure, Reason

REVISION = "models/m/revisions/0123456789ab"


def book(replica: str = "replicas/a", epoch: int = 7, slots: int = 2) -> WorkerBook:
    return WorkerBook(replica, REVISION, (epoch,), slots=slots, kv_cells=1000, context_tokens=100)


def wanted(token: int, **changes: object) -> Dispatched:
    fields: dict[str, object] = {
        "token": token,
        "session": 1,
        "replica": "replicas/a",
        "revision": REVISION,
        "epoch": 7,
        "input_bytes": 10,
        "max_tokens": 20,
        "remaining_s": None,
    }
    return Dispatched(**(fields | changes))  # type: ignore[arg-type]


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
        ({"input_bytes": attempts.WAITING_BYTES_MAX + 1}, Reason.OVERLOADED),
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


def test_draining_refuses_new_attempts_and_keeps_the_old(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.drain_worker("replicas/a")
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(2), 0.0)
    assert refused.value.reason is Reason.DRAINING
    assert not ledger.is_idle(["replicas/a"])
    assert ledger.finish(1) is not None
    assert ledger.is_idle(["replicas/a"])
    other = AttemptLedger()
    other.open_worker(book())
    other.draining = True
    with pytest.raises(Failure) as refused:
        other.dispatch(wanted(1), 0.0)
    assert refused.value.reason is Reason.DRAINING


def test_only_so_many_wait(ledger):
    limit = ledger.workers["replicas/a"].waiting_max
    for token in range(1, limit + 1):
        ledger.dispatch(wanted(token), 0.0)
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(1000), 0.0)
    assert refused.value.reason is Reason.OVERLOADED
    assert refused.value.metadata == {"queueDepth": str(limit), "limit": str(limit)}
    ledger.admit(1, 5, 1.0)
    ledger.dispatch(wanted(1001), 1.0)


def test_a_repetition_is_dropped_for_its_session_and_refused_to_another(ledger):
    ledger.dispatch(wanted(1), 0.0)
    with pytest.raises(DuplicateAttempt):
        ledger.dispatch(wanted(1), 0.0)
    with pytest.raises(Failure) as refused:
        ledger.dispatch(wanted(1, session=2), 0.0)
    assert refused.value.reason is Reason.ALREADY_EXISTS
    ledger.finish(1)
    with pytest.raises(DuplicateAttempt):
        ledger.dispatch(wanted(1), 0.0)
    assert ledger.counts.duplicates == 3


def test_old_tokens_are_forgotten_in_order(ledger, monkeypatch):
    monkeypatch.setattr(attempts, "REMEMBERED_TOKENS", 2)
    for token in (1, 2, 3):
        ledger.dispatch(wanted(token), 0.0)
        ledger.finish(token)
    ledger.dispatch(wanted(1), 0.0)
    with pytest.raises(DuplicateAttempt):
        ledger.dispatch(wanted(3), 0.0)


def test_admission_books_kv_for_prompt_and_output_within_the_context(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.dispatch(wanted(2, max_tokens=99), 0.0)
    ledger.admit(1, 5, 2.5)
    ledger.admit(2, 50, 2.5)
    load = ledger.load("replicas/a")
    assert load is not None
    assert (load.active, load.waiting, load.kv_cells_reserved) == (2, 0, 25 + 100)
    assert ledger.admit(1, 5, 3.0) is None
    assert ledger.admit(99, 5, 3.0) is None
    assert ledger.counts.late == 2


def test_the_first_cause_of_a_cancel_stands_and_only_the_owner_may(ledger):
    ledger.dispatch(wanted(1), 0.0)
    assert ledger.cancel(1, 2, Cause.CANCELLED) is None
    attempt = ledger.cancel(1, 1, Cause.SLOW_CONSUMER)
    assert attempt is not None
    assert ledger.cancel(1, 1, Cause.CANCELLED) is None
    assert attempt.cause is Cause.SLOW_CONSUMER
    assert ledger.cancel_worker("replicas/a", Cause.DRAINED) == []
    assert ledger.attempts  # "cancel sent" is not "cancel confirmed"


def test_a_session_that_leaves_orphans_its_attempts_until_the_engine_confirms(ledger):
    ledger.dispatch(wanted(1), 0.0)
    ledger.dispatch(wanted(2, session=2), 0.0)
    ledger.admit(1, 5, 0.0)
    assert ledger.close_session(1) == {"replicas/a": [1]}
    assert ledger.session_of(1) == 0
    assert ledger.owns(1, 1) is None
    load = ledger.load("replicas/a")
    assert load is not None
    assert load.active == 1
    attempt = ledger.finish(1)
    assert attempt is not None
    assert (attempt.session, attempt.cause) == (0, Cause.CANCELLED)
    assert ledger.session_of(2) == 2


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


def test_attempts_past_their_deadline_are_found_once(ledger):
    ledger.dispatch(wanted(1, remaining_s=5.0), 10.0)
    ledger.dispatch(wanted(2), 10.0)
    assert ledger.overdue(15.0) == []
    assert [a.token for a in ledger.overdue(15.1)] == [1]
    assert ledger.overdue(16.0) == []


class LedgerMachine(RuleBasedStateMachine):
    """Any order of what Routers, engines and failures do, against a plain account of who is owed an end."""

    @initialize()
    def begin(self) -> None:
        self.ledger = AttemptLedger()
        self.owed: dict[int, str] = {}
        self.ended: set[int] = set()
        self.epoch = 1
        self.next = 1
        self.ledger.open_worker(book("replicas/a", 1))
        self.ledger.open_worker(book("replicas/b", 1))

    def _end(self, token: int) -> None:
        assert token not in self.ended
        self.ended.add(token)
        del self.owed[token]

    @rule(replica=st.sampled_from("ab"), session=st.integers(1, 3), epoch=st.integers(1, 2))
    def dispatch(self, replica, session, epoch):
        token, self.next = self.next, self.next + 1
        try:
            self.ledger.dispatch(wanted(token, replica=f"replicas/{replica}", session=session, epoch=epoch), 0.0)
            self.owed[token] = f"replicas/{replica}"
        except Failure:
            self.ended.add(token)

    @rule(token=st.integers(1, 60))
    def admit(self, token):
        attempt = self.ledger.admit(token, 5, 1.0)
        assert attempt is None or token in self.owed

    @rule(token=st.integers(1, 60))
    def finish(self, token):
        if self.ledger.finish(token) is not None:
            self._end(token)

    @rule(token=st.integers(1, 60), session=st.integers(1, 3))
    def cancel(self, token, session):
        if self.ledger.cancel(token, session, Cause.CANCELLED) is not None:
            assert token in self.owed

    @rule(session=st.integers(1, 3))
    def close_session(self, session):
        for replica, tokens in self.ledger.close_session(session).items():
            assert all(self.owed[token] == replica for token in tokens)

    @rule(replica=st.sampled_from("ab"))
    def lose_worker(self, replica):
        for attempt, _ in self.ledger.close_worker(f"replicas/{replica}"):
            self._end(attempt.token)

    @precondition(lambda self: len(self.ledger.workers) < 2)
    @rule(replica=st.sampled_from("ab"), epoch=st.integers(1, 2))
    def open_worker(self, replica, epoch):
        if f"replicas/{replica}" not in self.ledger.workers:
            self.ledger.open_worker(book(f"replicas/{replica}", epoch))

    @rule(tokens=st.sets(st.integers(1, 60)))
    def output(self, tokens):
        self.ledger.outputs.update(t for t in tokens if t in self.ledger.attempts)

    @invariant()
    def everything_adds_up(self):
        ledger = self.ledger
        assert ledger.attempts.keys() == self.owed.keys()
        assert ledger.outputs <= ledger.attempts.keys()
        waiting_bytes = 0
        for replica, kept in ledger.workers.items():
            here = [a for a in ledger.attempts.values() if a.replica == replica]
            assert {a.token for a in here} == kept.attempts.keys()
            assert kept.active == sum(a.admitted_at is not None for a in here)
            assert kept.waiting == len(here) - kept.active
            assert kept.kv_cells_reserved == sum(a.kv_cells for a in here)
            assert sum(kept.sessions.values()) == len(here)
            assert all(count > 0 for count in kept.sessions.values())
            waiting_bytes += sum(a.input_bytes for a in here if a.admitted_at is None)
        assert ledger._waiting_bytes == waiting_bytes


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
