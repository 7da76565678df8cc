"""The Scheduler's ledger of attempts: which may start, whose they are, and how each ends exactly once.

    dispatch --> WAITING --admitted--> ACTIVE --finished--> (ended)
                    |                     |
                    +------- cancel ------+--> the same state, with a cause; ended when the engine confirms
                    +---- worker lost ----+--> (ended)

Nothing here happens once a token. Output passes by the ledger: the hot path only asks `session_of` for the
owner of an attempt, and `outputs` remembers who has had any.

An attempt that is cancelled keeps its slot and KV in the books until the engine confirms the end: "cancel
sent" and "cancel confirmed" are different facts. An attempt whose session is gone stays for the same reason,
and its end is told to nobody.

Sans-io.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.control.errors import Failure, Reason

WAITING_BYTES_MAX = 64 * 1024 * 1024
"""Input that may wait in all workers together."""
WAITING_MIN = 16
WAITING_PER_SLOT = 2
REMEMBERED_TOKENS = 65_536
"""Ended attempt tokens that are still known, so that a repeated dispatch is not run again."""


class Cause(enum.Enum):
    """Why an attempt was told to end before the engine ended it."""

    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    SLOW_CONSUMER = "slow_consumer"
    DRAINED = "drained"


@dataclass(slots=True)
class Attempt:
    """One attempt that has not ended."""

    token: int
    session: int
    """Number of the Router session that owns it; 0 once that session is gone."""
    replica: str
    input_bytes: int
    received_at: float
    """Monotonic seconds."""
    deadline_at: float | None
    max_tokens: int
    """Tokens it may generate; with the prompt, the KV cells that the engine reserves."""
    admitted_at: float | None = None
    kv_cells: int = 0
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What the ledger needs to know of a dispatch."""

    token: int
    session: int
    replica: str
    revision: str
    epoch: int
    input_bytes: int
    max_tokens: int
    remaining_s: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """How busy one worker is."""

    active: int
    waiting: int
    slots: int
    kv_cells_reserved: int
    kv_cells: int


def waiting_max(slots: int) -> int:
    """Attempts that may wait for a worker with so many slots."""
    return max(WAITING_MIN, WAITING_PER_SLOT * slots)


@dataclass(slots=True)
class WorkerBook:
    """What the ledger keeps of one worker."""

    replica: str
    revision: str
    epochs: tuple[int, ...]
    """Fencing tokens under which this run of the engine is known: one, or two after a lost lease."""
    slots: int
    kv_cells: int
    context_tokens: int
    draining: bool = False
    waiting: int = 0
    active: int = 0
    kv_cells_reserved: int = 0
    attempts: dict[int, Attempt] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)
    """Attempts here of each session."""

    @property
    def waiting_max(self) -> int:
        """Attempts that may wait for a slot."""
        return waiting_max(self.slots)


@dataclass(slots=True)
class AttemptCounts:
    """Things that are counted and otherwise dropped."""

    duplicates: int = 0
    late: int = 0
    """Engine events, credits and cancels of attempts that are over or were never known."""


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
            input_bytes=wanted.input_bytes,
            received_at=now,
            deadline_at=None if wanted.remaining_s is None else now + wanted.remaining_s,
            max_tokens=wanted.max_tokens,
        )
        self.attempts[wanted.token] = attempt
        book.attempts[wanted.token] = attempt
        book.sessions[wanted.session] = book.sessions.get(wanted.session, 0) + 1
        book.waiting += 1
        self._waiting_bytes += wanted.input_bytes
        self.version += 1
        return attempt

    def admit(self, token: int, prompt_tokens: int, now: float) -> Attempt | None:
        """The engine has begun with an attempt; None when the event is late."""
        attempt = self.attempts.get(token)
        if attempt is None or attempt.admitted_at is not None:
            self.counts.late += 1
            return None
        book = self.workers[attempt.replica]
        attempt.admitted_at = now
        # What the engine reserves: prompt and output, never more than the context holds.
        attempt.kv_cells = min(prompt_tokens + attempt.max_tokens, book.context_tokens)
        book.waiting -= 1
        book.active += 1
        book.kv_cells_reserved += attempt.kv_cells
        self._waiting_bytes -= attempt.input_bytes
        self.version += 1
        return attempt

    def finish(self, token: int) -> Attempt | None:
        """The engine has let go of an attempt; None when the event is late."""
        attempt = self.attempts.get(token)
        if attempt is None:
            self.counts.late += 1
            return None
        self._end(attempt, self.workers[attempt.replica])
        return attempt

    def cancel(self, token: int, session: int, cause: Cause) -> Attempt | None:
        """Mark an attempt for its end. The first cause stands.

        Returns:
            The attempt, when the engine has to be told; None when it was told before or does not concern `session`.
        """
        attempt = self.attempts.get(token)
        if attempt is None or attempt.session != session:
            self.counts.late += 1
            return None
        return attempt if self._mark(attempt, cause) else None

    def cancel_worker(self, replica: str, cause: Cause) -> list[int]:
        """Mark every attempt of a worker for its end; returns those that the engine has to be told of."""
        book = self.workers.get(replica)
        return [a.token for a in book.attempts.values() if self._mark(a, cause)] if book else []

    def overdue(self, before: float) -> list[Attempt]:
        """Mark attempts whose deadline lies before that instant; returns those that the engine has to be told of."""
        return [
            attempt
            for attempt in self.attempts.values()
            if attempt.deadline_at is not None
            and attempt.deadline_at < before
            and self._mark(attempt, Cause.DEADLINE_EXCEEDED)
        ]

    def close_session(self, session: int) -> Mapping[str, list[int]]:
        """A Router's session is gone: its attempts belong to nobody. Returns, by replica, those to cancel."""
        orphans: dict[str, list[int]] = {}
        for book in self.workers.values():
            if not book.sessions.pop(session, 0):
                continue
            for attempt in book.attempts.values():
                if attempt.session == session:
                    attempt.session = 0
                    book.sessions[0] = book.sessions.get(0, 0) + 1
                    if self._mark(attempt, Cause.CANCELLED):
                        orphans.setdefault(book.replica, []).append(attempt.token)
        return orphans

    def owns(self, token: int, session: int) -> Attempt | None:
        """The attempt, if it lives and is this session's; counted as late otherwise."""
        attempt = self.attempts.get(token)
        if attempt is None or attempt.session != session:
            self.counts.late += 1
            return None
        return attempt

    def session_of(self, token: int) -> int:
        """The session that an attempt's output goes to; 0: nobody. The hot path's only question."""
        attempt = self.attempts.get(token)
        return 0 if attempt is None else attempt.session

    def load(self, replica: str) -> Load | None:
        """How busy a worker is; None: it does not serve."""
        book = self.workers.get(replica)
        if book is None:
            return None
        return Load(book.active, book.waiting, book.slots, book.kv_cells_reserved, book.kv_cells)

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
        book = self.workers.get(wanted.replica)
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
        self._refuse_overload(wanted, book)
        return book

    def _refuse_overload(self, wanted: Dispatched, book: WorkerBook) -> None:
        if book.waiting >= book.waiting_max:
            raise Failure(
                Reason.OVERLOADED,
                "Too many attempts wait for this replica.",
                metadata={"queueDepth": str(book.waiting), "limit": str(book.waiting_max)},
            )
        if self._waiting_bytes + wanted.input_bytes > WAITING_BYTES_MAX:
            raise Failure(
                Reason.OVERLOADED,
                "Too much input waits in this Scheduler.",
                metadata={"queueBytes": str(self._waiting_bytes), "limitBytes": str(WAITING_BYTES_MAX)},
            )

    def _mark(self, attempt: Attempt, cause: Cause) -> bool:
        if attempt.cause is not None:
            return False
        attempt.cause = cause
        return True

    def _end(self, attempt: Attempt, book: WorkerBook) -> None:
        del self.attempts[attempt.token]
        del book.attempts[attempt.token]
        self.outputs.discard(attempt.token)
        left = book.sessions[attempt.session] - 1
        if left:
            book.sessions[attempt.session] = left
        else:
            del book.sessions[attempt.session]
        if attempt.admitted_at is None:
            book.waiting -= 1
            self._waiting_bytes -= attempt.input_bytes
        else:
            book.active -= 1
            book.kv_cells_reserved -= attempt.kv_cells
        self.version += 1
        self._remember(attempt.token)

    def _remember(self, token: int) -> None:
        self._ended[token] = None
        if len(self._ended) > REMEMBERED_TOKENS:
            self._ended.popitem(last=False)
