"""The Scheduler's ledger of attempts: which may start, whose they are, and how each ends exactly once.

    dispatch --> WAITING --admitted--> ACTIVE --finished--> (ended)
                    |                   |  ^
                    |          preempted|  |resumed
                    |                   v  |
                    |                PREEMPTED --finished--> (ended)
                    |                     |
                    +------- cancel ------+--> the same state, with a cause; ended when the engine confirms
                    +---- worker lost ----+--> (ended)

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
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from headrace.control.attempt_book import CAUSE_OF_LIMIT, Attempt, AttemptCounts, Cause, Dispatched, Load, WorkerBook
from headrace.control.deadlines import Budget
from headrace.control.errors import Failure, Reason

WAITING_BYTES_MAX = 64 * 1024 * 1024
"""Input that may wait in all workers together."""
REMEMBERED_TOKENS = 65_536
"""Ended attempt tokens that are still known, so that a repeated dispatch is not run again."""


class DuplicateAttempt(Exception):
    """A dispatch repeats a token of the same session: the first one stands, nothing is sent."""


class AttemptLedger:
    """All attempts of one Scheduler. Invariant: an attempt is in `attempts` until its one end."""

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.workers: dict[str, WorkerBook] = {}
        self.outputs: set[int] = set()
        """Attempts of which output was forwarded; the hot path adds whole steps."""
        self.counts = AttemptCounts()
        self.draining = False
        self.revoked: frozenset[str] = frozenset()
        """Revisions and replicas on which nothing may start."""
        self.version = 0
        """Rises whenever a load may have changed."""
        self._waiting_bytes = 0
        self._ended: OrderedDict[int, None] = OrderedDict()

    # Workers

    def open_worker(self, book: WorkerBook) -> None:
        """Take a worker into the books: it is READY."""
        assert book.replica not in self.workers
        self.workers[book.replica] = book
        self.version += 1

    def add_epoch(self, replica: str, epoch: int) -> None:
        """The same run of the engine was registered again, after a lost lease; its last epoch stays valid."""
        book = self.workers.get(replica)
        if book is not None and epoch not in book.epochs:
            book.epochs = (*book.epochs[-1:], epoch)

    def drain_worker(self, replica: str) -> None:
        """Refuse new attempts for this worker."""
        if replica in self.workers:
            self.workers[replica].draining = True

    def close_worker(self, replica: str) -> tuple[tuple[Attempt, bool], ...]:
        """The worker is gone, and with it its attempts.

        Returns:
            Each attempt that ended by this, with whether output of it was forwarded.
        """
        book = self.workers.pop(replica, None)
        if book is None:
            return ()
        self.version += 1
        ended = []
        for attempt in tuple(book.attempts.values()):
            ended.append((attempt, attempt.token in self.outputs))
            self._end(attempt, book)
        return tuple(ended)

    # Attempts

    def dispatch(self, wanted: Dispatched, now: float) -> Attempt:
        """Decide whether an attempt may start, and enter it as WAITING.

        Raises:
            DuplicateAttempt: the session repeats itself; nothing is to be sent.
            Failure: why it may not; the attempt has ended with it.
        """
        self._refuse_repetition(wanted)
        try:
            book = self._worker_for(wanted)
        except Failure:
            self._remember(wanted.token)  # its one end is this refusal
            raise
        attempt = Attempt(
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
        )
        self.attempts[wanted.token] = attempt
        book.attempts[wanted.token] = attempt
        book.sessions[wanted.session] = book.sessions.get(wanted.session, 0) + 1
        book.waiting += 1
        self._waiting_bytes += wanted.input_bytes
        self.version += 1
        return attempt

    def admit(self, token: int, incarnation: int, prompt_tokens: int, now: float) -> Attempt | None:
        """The engine has begun with an attempt; None when the event does not count."""
        attempt = self._of_engine(token, incarnation)
        if attempt is None or attempt.admitted_at is not None:
            self.counts.late += attempt is not None
            return None
        book = self.workers[attempt.replica]
        attempt.admitted_at = now
        # What the engine reserves: prompt and output, never more than the context holds.
        attempt.kv_cells = min(prompt_tokens + attempt.max_tokens, book.context_tokens)
        book.waiting -= 1
        self._waiting_bytes -= attempt.input_bytes
        self._take_slot(attempt, book)
        return attempt

    def preempt(self, token: int, incarnation: int, number: int) -> Attempt | None:
        """The engine has taken slot and KV back, for the `number`th time; None when the event does not count.

        Responses are merged, so that the end of a preemption may be told before its beginning.
        """
        attempt = self._of_engine(token, incarnation)
        if attempt is None or attempt.admitted_at is None or number <= attempt.preempted_last:
            self.counts.late += attempt is not None
            return None
        was_active = attempt.is_active
        attempt.preempted_last = number
        self.counts.preemptions += 1
        if was_active and not attempt.is_active:
            book = self.workers[attempt.replica]
            self._give_slot(attempt, book)
            book.preempted += 1
        return attempt

    def resume(self, token: int, incarnation: int, number: int) -> Attempt | None:
        """The engine has given slot and KV again after that preemption; None when the event does not count."""
        attempt = self._of_engine(token, incarnation)
        if attempt is None or attempt.admitted_at is None or number <= attempt.resumed_last:
            self.counts.late += attempt is not None
            return None
        was_active = attempt.is_active
        attempt.resumed_last = number
        self.counts.resumptions += 1
        if not was_active and attempt.is_active:
            book = self.workers[attempt.replica]
            book.preempted -= 1
            self._take_slot(attempt, book)
        return attempt

    def finish(self, token: int, incarnation: int) -> Attempt | None:
        """The engine has let go of an attempt; None when the event does not count."""
        attempt = self._of_engine(token, incarnation)
        if attempt is None:
            return None
        self.counts.cancels_confirmed += attempt.cause is not None
        self._end(attempt, self.workers[attempt.replica])
        return attempt

    def credit(self, token: int, session: int, limit: int) -> Attempt | None:
        """Raise the limit of an attempt.

        Returns:
            The attempt, when the engine has to be told; None when that is no more than it may already, when it is
            to end anyway, or when it does not concern `session`.
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
        return attempt

    def cancel(self, token: int, session: int, cause: Cause, now: float) -> Attempt | None:
        """Mark an attempt for its end. The first cause stands.

        Returns:
            The attempt, when the engine has to be told; None when it was told before or does not concern `session`.
        """
        attempt = self._of_session(token, session)
        if attempt is None:
            return None
        if self._mark(attempt, cause, now):
            return attempt
        self.counts.duplicate_cancels += 1
        return None

    def cancel_worker(self, replica: str, cause: Cause, now: float) -> list[int]:
        """Mark every attempt of a worker for its end; returns those that the engine has to be told of."""
        book = self.workers.get(replica)
        return [a.token for a in book.attempts.values() if self._mark(a, cause, now)] if book else []

    def overdue(self, now: float, slack_s: float) -> list[Attempt]:
        """Mark attempts that are more than `slack_s` past one of their limits, with that limit as the cause.

        Returns:
            Those that the engine has to be told of.
        """
        found = []
        for attempt in self.attempts.values():
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
            for attempt in book.attempts.values():
                if attempt.session == session:
                    attempt.session = 0
                    book.sessions[0] = book.sessions.get(0, 0) + 1
                    if self._mark(attempt, Cause.CANCELLED, now):
                        orphans.setdefault(book.replica, []).append(attempt.token)
        return orphans

    def current(self, replica: str, incarnation: int) -> WorkerBook | None:
        """The book of a worker, if that run of its engine is the one that serves; None otherwise."""
        book = self.workers.get(replica)
        return book if book is not None and book.incarnation == incarnation else None

    def load(self, replica: str) -> Load | None:
        """How busy a worker is; None: it does not serve."""
        book = self.workers.get(replica)
        if book is None:
            return None
        return Load(book.active, book.waiting + book.preempted, book.slots, book.kv_cells_reserved, book.kv_cells)

    def is_idle(self, replicas: Iterable[str]) -> bool:
        """Whether no attempt of these workers is left."""
        return not any(self.workers[r].attempts for r in replicas if r in self.workers)

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
            raise Failure(
                Reason.DEADLINE_EXCEEDED, "The deadline passed before the attempt started.", metadata={"stage": "queue"}
            )
        if wanted.queue_s is not None and wanted.queue_s <= 0:
            raise Failure(Reason.QUEUE_TIMEOUT, "No time was left to wait for a slot.", metadata={"stage": "queue"})
        self._refuse_overload(wanted, book)
        return book

    def _refuse_overload(self, wanted: Dispatched, book: WorkerBook) -> None:
        # Preempted ones have a bound of their own: readers that stand still must not close the queue for the others.
        depth = max(book.waiting, book.preempted)
        if depth >= book.waiting_max:
            raise Failure(
                Reason.OVERLOADED,
                "Too many attempts wait for this replica.",
                metadata={"queueDepth": str(depth), "limit": str(book.waiting_max)},
            )
        if self._waiting_bytes + wanted.input_bytes > WAITING_BYTES_MAX:
            raise Failure(
                Reason.OVERLOADED,
                "Too much input waits in this Scheduler.",
                metadata={"queueBytes": str(self._waiting_bytes), "limitBytes": str(WAITING_BYTES_MAX)},
            )

    def _of_engine(self, token: int, incarnation: int) -> Attempt | None:
        """The attempt that an engine speaks of, if it lives and is this run's; counted otherwise."""
        attempt = self.attempts.get(token)
        if attempt is None:
            self.counts.late += 1
        elif attempt.incarnation != incarnation:
            self.counts.stale_incarnation += 1
            return None
        return attempt

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
        return True

    def _take_slot(self, attempt: Attempt, book: WorkerBook) -> None:
        book.active += 1
        book.kv_cells_reserved += attempt.kv_cells
        self.version += 1

    def _give_slot(self, attempt: Attempt, book: WorkerBook) -> None:
        book.active -= 1
        book.kv_cells_reserved -= attempt.kv_cells
        self.version += 1

    def _end(self, attempt: Attempt, book: WorkerBook) -> None:
        del self.attempts[attempt.token]
        del book.attempts[attempt.token]
        self.outputs.discard(attempt.token)
        left = book.sessions[attempt.session] - 1
        if left:
            book.sessions[attempt.session] = left
        else:
            del book.sessions[attempt.session]
        if attempt.is_active:
            self._give_slot(attempt, book)
        elif attempt.is_preempted:
            book.preempted -= 1
        else:
            book.waiting -= 1
            self._waiting_bytes -= attempt.input_bytes
        self.version += 1
        self._remember(attempt.token)

    def _remember(self, token: int) -> None:
        self._ended[token] = None
        if len(self._ended) > REMEMBERED_TOKENS:
            self._ended.popitem(last=False)
