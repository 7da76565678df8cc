"""The ledger of attempts under any order of events, against a plain account of who is owed an end."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.control.attempt_book import Cause
from headrace.control.attempts import AttemptLedger
from headrace.control.errors import Failure
from headrace.control.priority import Priority
from support.attempts import book, wanted

PICK = st.integers(0, 100)
"""Which attempt: one that lives, mostly."""
OLD = st.sampled_from([False, False, False, True])


class LedgerMachine(RuleBasedStateMachine):
    """Any order of what Routers, engines and failures do, against a plain account of who is owed an end."""

    @initialize()
    def begin(self) -> None:
        self.ledger = AttemptLedger()
        self.owed: dict[int, str] = {}
        self.ended: set[int] = set()
        self.handed: set[int] = set()
        self.now = 0.0
        self.run: dict[int, int] = {}
        self.preemptions: dict[int, dict[bool, int]] = {}
        self.epoch = 1
        self.next = 1
        self.runs = {"a": 1, "b": 2}
        self.ledger.open_worker(book("replicas/a", 1, incarnation=1))
        self.ledger.open_worker(book("replicas/b", 1, incarnation=2))
        self.dispatch("a", [1, 2, 1], False)
        self.dispatch("b", [1], False)

    def _token(self, pick: int) -> int:
        """An attempt that lives; or, one time in eight, any that has ended or was never made."""
        alive = sorted(self.owed)
        return pick % (self.next + 1) if pick % 8 == 0 or not alive else alive[pick % len(alive)]

    def _speak_of(self, pick: int, is_old: bool) -> tuple[int, int]:
        """An attempt, and the run of an engine that speaks of it: its own, or another."""
        token = self._token(pick)
        return token, self.run.get(token, 0) + is_old

    def _settle(self) -> None:
        """What the ledger has decided by itself: each is told once."""
        for attempt in self.ledger.take_ready():
            assert attempt.token not in self.handed
            self.handed.add(attempt.token)
        for ended in self.ledger.take_ended():
            assert ended.attempt.token not in self.handed
            assert (ended.failure is None) == (ended.attempt.cause is not None)
            self._end(ended.attempt.token)

    def _end(self, token: int) -> None:
        assert token not in self.ended
        self.ended.add(token)
        del self.owed[token]

    @rule(
        replica=st.sampled_from("ab"),
        sessions=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        is_old=OLD,
        priority=st.sampled_from(Priority),
        queue_s=st.sampled_from([None, 1.0, 5.0]),
        size=st.sampled_from([10, 300]),
    )
    def dispatch(self, replica, sessions, is_old, priority=Priority.STANDARD, queue_s=None, size=10):
        name = f"replicas/{replica}"
        for session in sessions:
            token, self.next = self.next, self.next + 1
            try:
                asked = wanted(
                    token,
                    replica=name,
                    session=session,
                    tenant=f"tenants/{session}",
                    epoch=1 + is_old,
                    priority=priority,
                    queue_s=queue_s,
                    input_bytes=size,
                )
                self.ledger.dispatch(asked, self.now)
                self.owed[token] = name
                self.run[token] = self.runs[replica]
            except Failure:
                self.ended.add(token)
            self._settle()

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def advance(self, seconds):
        self.now += seconds
        self.ledger.advance(self.now)
        self._settle()
        assert self.ledger.next_due() > self.now, "it would be called again at once"
        for queue in self.ledger.queues.values():
            assert not queue.waiting or queue.book.active + queue.book.staged, "an idle engine, and somebody waits"

    @rule(pick=PICK, is_old=OLD)
    def admit(self, pick, is_old):
        token, run = self._speak_of(pick, is_old)
        attempt = self.ledger.admit(token, run, 5, self.now)
        assert attempt is None or (token in self.owed and token in self.handed and self.run[token] == run)

    @rule(pick=PICK, told=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=5))
    def preempt_and_resume(self, pick, told):
        """In any order and repeated: the highest numbers decide, says the engine contract."""
        begun = sorted(token for token in self.owed if self.ledger.attempts[token].admitted_at is not None)
        token = begun[pick % len(begun)] if begun else self._token(pick)
        highest = self.preemptions.setdefault(token, {False: 0, True: 0})
        for is_resumed, number in told:
            tell = self.ledger.resume if is_resumed else self.ledger.preempt
            attempt = tell(token, self.run.get(token, 0), number)
            assert attempt is None or token in self.owed
            highest[is_resumed] = max(highest[is_resumed], number)
            if token in begun:
                assert self.ledger.attempts[token].is_preempted == (highest[False] > highest[True])
        if token not in begun:
            del self.preemptions[token]

    @rule(pick=PICK, is_old=OLD)
    def finish(self, pick, is_old):
        token, run = self._speak_of(pick, is_old)
        if self.ledger.finish(token, run) is not None:
            assert self.run[token] == run
            assert token in self.handed
            self._end(token)

    @rule(pick=PICK, session=st.integers(1, 3))
    def cancel(self, pick, session):
        token = self._token(pick)
        if self.ledger.cancel(token, session, Cause.CANCELLED, self.now) is not None:
            assert token in self.owed
            assert token in self.handed, "the engine knows nothing of it"
        self._settle()

    @rule(pick=PICK, session=st.integers(1, 3), limit=st.integers(0, 100))
    def credit(self, pick, session, limit):
        token = self._token(pick)
        attempt = self.ledger.credit(token, session, limit)
        if attempt is not None:
            assert token in self.owed
            assert attempt.cause is None

    @rule(session=st.integers(1, 3))
    def close_session(self, session):
        for replica, tokens in self.ledger.close_session(session, self.now).items():
            assert all(self.owed[token] == replica and token in self.handed for token in tokens)
        self._settle()

    @precondition(lambda self: len(self.owed) > 3)
    @rule(replica=st.sampled_from("ab"), is_back=st.booleans())
    def lose_worker(self, replica, is_back):
        for attempt, _ in self.ledger.close_worker(f"replicas/{replica}"):
            self._end(attempt.token)
        if is_back:
            self.open_worker(replica)

    @precondition(lambda self: len(self.ledger.workers) < 2)
    @rule(replica=st.sampled_from("ab"))
    def open_worker(self, replica):
        if f"replicas/{replica}" not in self.ledger.workers:
            self.runs[replica] = max(self.runs.values()) + 1
            self.ledger.open_worker(book(f"replicas/{replica}", 1, incarnation=self.runs[replica]))

    @rule(tokens=st.sets(st.integers(1, 60)))
    def output(self, tokens):
        self.ledger.outputs.update(t for t in tokens if t in self.ledger.attempts)

    @invariant()
    def everything_adds_up(self):
        ledger = self.ledger
        assert all((a.cause is None) == (a.cancel_asked_at is None) for a in ledger.attempts.values())
        assert ledger.counts.cancels_asked - ledger.counts.cancels_confirmed >= sum(
            a.cause is not None for a in ledger.attempts.values()
        )
        assert ledger.attempts.keys() == self.owed.keys()
        assert ledger.outputs <= ledger.attempts.keys()
        waiting_bytes = 0
        for replica, kept in ledger.workers.items():
            here = [a for a in ledger.attempts.values() if a.replica == replica]
            assert {a.token for a in here} == kept.attempts.keys()
            assert kept.active == sum(a.is_active for a in here)
            assert kept.preempted == sum(a.is_preempted for a in here)
            assert kept.waiting == sum(a.admitted_at is None for a in here)
            queue = ledger.queues[replica]
            assert {a.token for a in here if a.is_queued} == queue.waiting._entries.keys()
            assert {a.token for a in here if not a.is_queued} == self.handed & {a.token for a in here}
            assert kept.staged == sum(a.is_staged for a in here)
            assert kept.staged_cells == sum(a.kv_cells for a in here if a.is_staged)
            assert kept.shorts == sum(a.load_class.is_short and not a.is_queued for a in here)
            assert queue.waiting.tokens == sum(a.kv_cells for a in here if a.is_queued)
            assert queue.waiting.tokens <= max(queue.tokens_max, 100)
            assert queue.depth <= queue.requests_max
            assert kept.waiting <= queue.requests_max + kept.slots
            # At most the slots and what is staged, but for those that came back from a preemption.
            assert kept.staged <= kept.slots + 1
            assert kept.waiting + kept.active + kept.preempted == len(here)
            assert kept.kv_cells_reserved == sum(a.kv_cells for a in here if a.is_active)
            assert all(a.incarnation == kept.incarnation for a in here)
            assert sum(kept.sessions.values()) == len(here)
            assert all(count > 0 for count in kept.sessions.values())
            waiting_bytes += sum(a.input_bytes for a in here if a.admitted_at is None)
        assert ledger._waiting_bytes == waiting_bytes


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
