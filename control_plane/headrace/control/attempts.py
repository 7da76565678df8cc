"""The Scheduler's ledger of attempts: which may start, whose they are, and how each ends exactly once.

    dispatch --> QUEUED --handed over--> STAGED --admitted--> ACTIVE --finished--> (ended)
                    |                      |                   |  ^
                    |                      |          preempted|  |resumed
                    |                      |                   v  |
                    |                      |                PREEMPTED --finished--> (ended)
                    |                      |                     |
                    |                      +------- cancel ------+--> the same state, with a cause; ended when the
                    |                      |                     |    engine confirms
                    |                      +---- worker lost ----+--> (ended)
                    +-- cancelled, shed, too late, worker lost -----> (ended), at once: no engine knows of it

Who is handed over, and when, is decided by headrace.control.worker_queue. `dispatch` and `advance` decide it; whoever
calls a method here takes what is ready and what has ended before anything else happens.

Nothing here happens once a token. Output passes by the ledger: the hot path only asks a worker's book for the
owner of an attempt, and `outputs` remembers who has had any.

An attempt that is cancelled keeps its slot and KV in the books until the engine confirms the end: "cancel
sent" and "cancel confirmed" are different facts. An attempt whose session is gone stays for the same reason,
and its end is told to nobody. An engine that never confirms is hung: `unconfirmed` finds it.

An attempt belongs to one run of one engine. What another run says of it is dropped and counted, as is everything
that comes late, twice or out of order.

Sans-io.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.control.attempt_book import CAUSE_OF_LIMIT, Attempt, Cause, Dispatched, EndedHere, WorkerBook
from headrace.control.attempt_events import AttemptBooks
from headrace.control.deadlines import Budget
from headrace.control.door_keeper import DoorKeeper
from headrace.control.errors import Failure, Reason
from headrace.control.worker_queue import QueueSettings, WorkerQueue, estimate_cells


class DuplicateAttempt(Exception):
    """A dispatch repeats a token of the same session: the first one stands, nothing is sent."""


class AttemptLedger(AttemptBooks):
    """The books, with what Routers ask for and what time does."""

    def __init__(self, settings: QueueSettings | None = None) -> None:
        super().__init__(settings)
        self.draining = False
        self.revoked: frozenset[str] = frozenset()
        """Revisions and replicas on which nothing may start."""

    # Workers

    def open_worker(self, book: WorkerBook) -> None:
        """Take a worker into the books: it is READY."""
        assert book.replica not in self.workers
        self.workers[book.replica] = book
        self.queues[book.replica] = queue = WorkerQueue(book, self.times, self.settings)
        self.keepers[book.replica] = DoorKeeper(queue, self.workers)
        self.version += 1

    def add_epoch(self, replica: str, epoch: int) -> None:
        """The same run of the engine was registered again, after a lost lease; its last epoch stays valid."""
        book = self.workers.get(replica)
        if book is not None and epoch not in book.epochs:
            book.epochs = (*book.epochs[-1:], epoch)

    def drain_worker(self, replica: str) -> None:
        """Refuse new attempts for this worker; what waits is kept, as it was accepted."""
        if replica in self.workers:
            self.workers[replica].draining = True

    def close_worker(self, replica: str) -> tuple[tuple[Attempt, bool], ...]:
        """The worker is gone, and with it its attempts.

        Returns:
            Each attempt that ended by this, with whether output of it was forwarded.
        """
        book = self.workers.get(replica)
        if book is None:
            return ()
        self.version += 1
        ended = []
        for attempt in tuple(book.attempts.values()):
            ended.append((attempt, attempt.token in self.outputs))
            self._end(attempt, book)
        del self.workers[replica], self.queues[replica], self.keepers[replica]
        self._freed.discard(replica)
        return tuple(ended)

    # Attempts

    def dispatch(self, wanted: Dispatched, now: float, payload: object = None) -> Attempt:
        """Decide whether an attempt may start, and let it wait for its turn, which may have come.

        Args:
            wanted: the attempt.
            now: monotonic seconds.
            payload: what the carrier needs to hand it over.

        Raises:
            DuplicateAttempt: the session repeats itself; nothing is to be sent.
            Failure: why it may not; the attempt has ended with it.
        """
        self._refuse_repetition(wanted)
        try:
            book = self._worker_for(wanted)
            attempt = self._make(wanted, book, now, payload)
            self._enter(attempt, wanted, book, now)
        except Failure as failure:
            self._count_refusal(failure)
            self._remember(wanted.token)  # its one end is this refusal
            raise
        self._hand_over(self.queues[book.replica], now)
        return attempt

    def advance(self, now: float) -> None:
        """Hand over what may be, and end what has waited too long. At any event of an engine, and at `next_due`."""
        for replica, queue in self.queues.items():
            for token in queue.waiting.expired(now):
                self._expire(self.attempts[token], now)
            if replica in self._freed or queue.next_due() <= now:
                self._hand_over(queue, now)
        self._freed.clear()

    def look_again(self) -> None:
        """Let the next `advance` look at every queue: a limit may have changed."""
        self._freed.update(self.queues)

    def next_due(self) -> float:
        """When to call `advance` though nothing has happened; infinite: never."""
        queues, keepers = self.queues.values(), self.keepers.values()
        return min((*(q.next_due() for q in queues), *(k.next_due for k in keepers)), default=math.inf)

    def take_ready(self) -> list[Attempt]:
        """Attempts to give to their engines, in this order; each is returned once."""
        ready, self._ready = self._ready, []
        return ready

    def take_ended(self) -> list[EndedHere]:
        """Attempts that ended while they waited; each is returned once."""
        ended, self._ended_here = self._ended_here, []
        return ended

    def credit(self, token: int, session: int, limit: int) -> Attempt | None:
        """Raise the limit of an attempt.

        Returns:
            The attempt, when the engine has to be told; None when that is no more than it may already, when it is
            to end anyway, when the engine will hear it with the attempt, or when it does not concern `session`.
        """
        attempt = self._of_session(token, session)
        if attempt is None:
            return None
        if attempt.cause is not None:
            self.counts.late += 1
            return None
        if limit <= attempt.credit_limit:
            self.counts.stale_credits += 1
            return None
        attempt.credit_limit = limit
        return None if attempt.is_queued else attempt

    def cancel(self, token: int, session: int, cause: Cause, now: float) -> Attempt | None:
        """Mark an attempt for its end; one that waits here ends at once. The first cause stands.

        Returns:
            The attempt, when the engine has to be told; None when it was told before, knows nothing of it, or when it
            does not concern `session`.
        """
        attempt = self._of_session(token, session)
        if attempt is None:
            return None
        if self._mark(attempt, cause, now):
            return attempt if attempt.token in self.attempts else None
        self.counts.duplicate_cancels += 1
        return None

    def cancel_worker(self, replica: str, cause: Cause, now: float) -> list[int]:
        """Mark every attempt of a worker for its end; returns those that the engine has to be told of."""
        book = self.workers.get(replica)
        marked = [a for a in tuple(book.attempts.values()) if self._mark(a, cause, now)] if book else []
        return [a.token for a in marked if a.token in self.attempts]

    def shed(self, replica: str, count: int, now: float) -> None:
        """End so many that wait for a worker, the oldest of the lowest priority first: its queue stands."""
        queue = self.queues.get(replica)
        for _ in range(count if queue is not None else 0):
            assert queue is not None
            entry = queue.waiting.oldest_of_lowest()
            if entry is None:
                return
            attempt = self.attempts[entry.token]
            self._end_here(attempt, queue.shed_failure(attempt, now))

    def overdue(self, now: float, slack_s: float) -> list[Attempt]:
        """Mark attempts that are more than `slack_s` past one of their limits, with that limit as the cause.

        Returns:
            Those that the engine has to be told of.
        """
        found = []
        for attempt in self.attempts.values():
            if attempt.is_queued:
                continue  # `advance` ends those
            limit = attempt.budget.passed(now - slack_s, admitted_at=attempt.admitted_at)
            if limit is not None and self._mark(attempt, CAUSE_OF_LIMIT[limit], now):
                found.append(attempt)
        return found

    def unconfirmed(self, before: float) -> list[str]:
        """Replicas whose engine owes an answer to a cancel that was asked before that instant.

        Only what two looks in a row have found counts: where it was this process that stood still, the answer may be
        here, unread. Each look is meant to be a second or so after the last.
        """
        hung = set()
        for attempt in self.attempts.values():
            if attempt.cancel_asked_at is None or attempt.cancel_asked_at >= before:
                continue
            if attempt.is_unconfirmed:
                hung.add(attempt.replica)
            attempt.is_unconfirmed = True
        return sorted(hung)

    def close_session(self, session: int, now: float) -> Mapping[str, list[int]]:
        """A Router's session is gone: its attempts belong to nobody. Returns, by replica, those to cancel."""
        orphans: dict[str, list[int]] = {}
        for book in self.workers.values():
            if not book.sessions.pop(session, 0):
                continue
            for attempt in tuple(book.attempts.values()):
                if attempt.session == session:
                    attempt.session = 0
                    book.sessions[0] = book.sessions.get(0, 0) + 1
                    if self._mark(attempt, Cause.CANCELLED, now) and attempt.token in self.attempts:
                        orphans.setdefault(book.replica, []).append(attempt.token)
        return orphans

    def _refuse_repetition(self, wanted: Dispatched) -> None:
        known = self.attempts.get(wanted.token)
        if known is None and wanted.token not in self._ended:
            return
        self.counts.duplicates += 1
        if known is not None and known.session != wanted.session:
            raise Failure(Reason.ALREADY_EXISTS, "Another session has an attempt with this token.")
        raise DuplicateAttempt

    def _worker_for(self, wanted: Dispatched) -> WorkerBook:
        if self.draining:
            raise Failure(Reason.DRAINING, "This Scheduler is draining; choose another replica.")
        if wanted.revision in self.revoked:
            raise Failure(Reason.REVOKED, "This model was revoked; name another one.", field="model")
        book = None if wanted.replica in self.revoked else self.workers.get(wanted.replica)
        if book is None or wanted.epoch not in book.epochs or book.revision != wanted.revision:
            raise Failure(
                Reason.STALE_EPOCH,
                "The replica does not serve here under that epoch; take a newer routing snapshot.",
                metadata={
                    "replica": wanted.replica,
                    "have": str(book.epochs[-1]) if book else "0",
                    "want": str(wanted.epoch),
                },
            )
        if book.draining:
            raise Failure(Reason.DRAINING, "The replica is draining; choose another one.")
        if wanted.remaining_s is not None and wanted.remaining_s <= 0:
            raise _too_late(Reason.DEADLINE_EXCEEDED, 0.0)
        if wanted.queue_s is not None and wanted.queue_s <= 0:
            raise _too_late(Reason.QUEUE_TIMEOUT, 0.0)
        return book

    def _make(self, wanted: Dispatched, book: WorkerBook, now: float, payload: object) -> Attempt:
        kind, guess = wanted.load_class, wanted.prompt_tokens
        prompt_tokens = guess if wanted.is_prompt_exact else self.times.prompt_tokens(kind, guess)
        return Attempt(
            token=wanted.token,
            session=wanted.session,
            replica=wanted.replica,
            incarnation=book.incarnation,
            record_version=wanted.record_version,
            input_bytes=wanted.input_bytes,
            budget=Budget(
                received_at=now,
                deadline_at=math.inf if wanted.remaining_s is None else now + wanted.remaining_s,
                queue_s=wanted.queue_s,
                execution_s=wanted.execution_s,
            ),
            max_tokens=wanted.max_tokens,
            credit_limit=wanted.credit_limit,
            tenant=wanted.tenant,
            weight=wanted.weight,
            priority=wanted.priority,
            load_class=kind,
            prompt_tokens=prompt_tokens,
            prompt_guess=0 if wanted.is_prompt_exact else guess,
            is_extra=wanted.is_extra,
            kv_cells=estimate_cells(prompt_tokens, wanted.max_tokens, book),
            payload=payload,
        )

    def _enter(self, attempt: Attempt, wanted: Dispatched, book: WorkerBook, now: float) -> None:
        """Put it into the books and the queue, or raise why not."""
        queue = self.queues[book.replica]
        self.version += self.keepers[book.replica].asked(attempt)
        expected = queue.foresee(attempt, now)
        queue.check_deadline(attempt, expected, now, is_next=False)
        for token in self._make_room(wanted, attempt, queue, now):
            victim = self.attempts[token]
            self._end_here(victim, queue.shed_failure(victim, now))
        self.attempts[attempt.token] = attempt
        book.attempts[attempt.token] = attempt
        book.sessions[attempt.session] = book.sessions.get(attempt.session, 0) + 1
        book.waiting += 1
        self._waiting_bytes += attempt.input_bytes
        self.version += 1
        queue.put(attempt, expected, now)

    def _make_room(self, wanted: Dispatched, attempt: Attempt, queue: WorkerQueue, now: float) -> list[int]:
        """Those who have to go for it."""
        return queue.make_room(wanted, attempt.kv_cells, self._waiting_bytes, now)

    def _hand_over(self, queue: WorkerQueue, now: float) -> None:
        book = queue.book
        while (token := queue.next(now)) is not None:
            attempt = book.attempts[token]
            try:
                self._check_time(attempt, queue, now)
            except Failure as failure:
                self._end_here(attempt, failure)
                continue
            attempt.handed_at = now
            book.staged += 1
            book.staged_cells += attempt.kv_cells
            book.shorts += attempt.load_class.is_short
            self._ready.append(attempt)

    def _check_time(self, attempt: Attempt, queue: WorkerQueue, now: float) -> None:
        limit = attempt.budget.passed(now)
        if limit is not None:
            raise _too_late(limit, now - attempt.received_at)
        queue.check_deadline(attempt, queue.foresee(attempt, now), now, is_next=True)

    def _expire(self, attempt: Attempt, now: float) -> None:
        limit = attempt.budget.passed(now)
        if limit is not None:
            self._end_here(attempt, _too_late(limit, now - attempt.received_at))

    def _of_session(self, token: int, session: int) -> Attempt | None:
        """The attempt that a Router speaks of, if it lives and is this session's; counted as late otherwise."""
        attempt = self.attempts.get(token)
        if attempt is None or attempt.session != session:
            self.counts.late += 1
            return None
        return attempt

    def _mark(self, attempt: Attempt, cause: Cause, now: float) -> bool:
        if attempt.cause is not None:
            return False
        attempt.cause = cause
        attempt.cancel_asked_at = now
        self.counts.cancels_asked += 1
        if attempt.is_queued:
            self.counts.cancels_confirmed += 1
            self._end_here(attempt, None)
        return True


def _too_late(limit: Reason, waited_s: float) -> Failure:
    sentence = {
        Reason.DEADLINE_EXCEEDED: "The deadline passed before the attempt started.",
        Reason.QUEUE_TIMEOUT: "It waited too long for a slot.",
    }[limit]
    return Failure(limit, sentence, metadata={"stage": "queue", "waitedMs": str(round(waited_s * 1000))})
