"""The books of a Scheduler's attempts, and what engines say of them.

What Routers ask for, what time does to attempts, and the picture of their states is in headrace.control.attempts.
Sans-io.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from headrace.control.attempt_book import Attempt, AttemptCounts, EndedHere, Load, WorkerBook
from headrace.control.door_keeper import DoorKeeper
from headrace.control.errors import Failure
from headrace.control.priority import Priority
from headrace.control.service_times import Served, ServiceTimes
from headrace.control.worker_queue import QueueSettings, WorkerQueue

REMEMBERED_TOKENS = 65_536
"""Ended attempt tokens that are still known, so that a repeated dispatch is not run again."""


class AttemptBooks:
    """All attempts of one Scheduler. Invariant: an attempt is in `attempts` until its one end."""

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.workers: dict[str, WorkerBook] = {}
        self.queues: dict[str, WorkerQueue] = {}
        """What waits for each worker, by replica."""
        self.keepers: dict[str, DoorKeeper] = {}
        """To whom it is closed, by replica."""
        self.times = ServiceTimes()
        self.outputs: set[int] = set()
        """Attempts of which output was forwarded; the hot path adds whole steps."""
        self.counts = AttemptCounts()
        self.version = 0
        """Rises whenever a load may have changed."""
        self.settings = settings or QueueSettings()
        self._ready: list[Attempt] = []
        self._ended_here: list[EndedHere] = []
        self._freed: set[str] = set()
        """Replicas where somebody may now be handed over."""
        self._waiting_bytes = 0
        self._ended: OrderedDict[int, None] = OrderedDict()

    # What engines say

    def admit(self, token: int, incarnation: int, prompt_tokens: int, now: float) -> Attempt | None:
        """The engine has begun with an attempt; None when the event does not count."""
        attempt = self._of_engine(token, incarnation)
        if attempt is None or attempt.admitted_at is not None:
            self.counts.late += attempt is not None
            return None
        book = self.workers[attempt.replica]
        self._leave_stage(attempt, book)
        if attempt.prompt_guess:
            self.times.counted(attempt.load_class, attempt.prompt_guess, prompt_tokens, now)
        attempt.admitted_at = now
        attempt.prompt_tokens = prompt_tokens
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

    def measure(self, attempt: Attempt, served: Served, now: float) -> None:
        """What an attempt took that `finish` has returned."""
        queue = self.queues.get(attempt.replica)
        if queue is not None:
            queue.measure(attempt, served, now)

    # Views

    def current(self, replica: str, incarnation: int) -> WorkerBook | None:
        """The book of a worker, if that run of its engine is the one that serves; None otherwise."""
        book = self.workers.get(replica)
        return book if book is not None and book.incarnation == incarnation else None

    def load(self, replica: str, now: float = 0.0) -> Load | None:
        """How busy a worker is; None: it does not serve.

        Args:
            replica: which.
            now: monotonic seconds; what was measured long before does not count.
        """
        book, queue = self.workers.get(replica), self.queues.get(replica)
        if book is None or queue is None:
            return None
        return Load(
            active=book.active,
            waiting=book.waiting + book.preempted,
            slots=book.slots,
            kv_cells_reserved=book.kv_cells_reserved,
            kv_cells=book.kv_cells,
            queue_wait_s=queue.wait_s(Priority.STANDARD, now)[0],
            waiting_tokens=queue.waiting.tokens + book.staged_cells,
            concurrency_limit=queue.limit,
            admits_from=queue.admits_from,
            prefill_tokens_per_s=queue.prefill_tokens_per_s(now),
            waiting_max=queue.requests_max,
            room=queue.room,
            closed=self.keepers[replica].closed(now),
        )

    def is_idle(self, replicas: Iterable[str]) -> bool:
        """Whether no attempt of these workers is left."""
        return not any(self.workers[r].attempts for r in replicas if r in self.workers)

    @property
    def waiting_bytes(self) -> int:
        """Input of the attempts that no engine has begun with."""
        return self._waiting_bytes

    def _of_engine(self, token: int, incarnation: int) -> Attempt | None:
        """The attempt that an engine speaks of, if it lives, was given to it and is this run's; counted otherwise."""
        attempt = self.attempts.get(token)
        if attempt is None:
            self.counts.late += 1
        elif attempt.incarnation != incarnation:
            self.counts.stale_incarnation += 1
            return None
        elif attempt.is_queued:
            self.counts.late += 1
            return None
        return attempt

    # The one end

    def _take_slot(self, attempt: Attempt, book: WorkerBook) -> None:
        book.active += 1
        book.kv_cells_reserved += attempt.kv_cells
        self.version += 1

    def _give_slot(self, attempt: Attempt, book: WorkerBook) -> None:
        book.active -= 1
        book.kv_cells_reserved -= attempt.kv_cells
        self._freed.add(book.replica)
        self.version += 1

    def _leave_stage(self, attempt: Attempt, book: WorkerBook) -> None:
        book.staged -= 1
        book.staged_cells -= attempt.kv_cells
        self._freed.add(book.replica)  # where it now has a slot, the estimate of its cells may have been too high

    def _end_here(self, attempt: Attempt, failure: Failure | None) -> None:
        """End an attempt that the engine knows nothing of."""
        if failure is not None:
            self._count_refusal(failure)
        self._end(attempt, self.workers[attempt.replica])
        self._ended_here.append(EndedHere(attempt, failure))

    def _count_refusal(self, failure: Failure) -> None:
        name = failure.reason.name, failure.metadata.get("stage", "")
        self.counts.refused[name] = self.counts.refused.get(name, 0) + 1

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
            self._leave_queue(attempt, book)
        book.shorts -= attempt.load_class.is_short and not attempt.is_queued
        self.version += 1
        self._remember(attempt.token)

    def _leave_queue(self, attempt: Attempt, book: WorkerBook) -> None:
        book.waiting -= 1
        self._waiting_bytes -= attempt.input_bytes
        if attempt.is_staged:
            self._leave_stage(attempt, book)
        elif attempt.token in self.queues[book.replica].waiting:
            self.queues[book.replica].waiting.remove(attempt.token)
            self._freed.add(book.replica)  # it may have been the one that was reserved for

    def _remember(self, token: int) -> None:
        self._ended[token] = None
        if len(self._ended) > REMEMBERED_TOKENS:
            self._ended.popitem(last=False)
