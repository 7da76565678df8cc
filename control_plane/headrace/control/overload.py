"""Control of overload of one worker: what its book's `concurrency_limit` and `admits_from` are, and whom to shed.

    response of the engine   time of its steps  ->  concurrency_limit   (headrace.control.concurrency_limit)
    hand-over                wait               ->  the queue stands?   (headrace.control.queue_age)
    tick                     age, use           ->  admits_from, shed   (headrace.control.brownout)

Sans-io. O(1) a response and a hand-over; nothing is done for a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.control.attempts import AttemptLedger
from headrace.control.brownout import Brownout, floor, pressure_of
from headrace.control.concurrency_limit import ConcurrencyLimit
from headrace.control.queue_age import INTERVAL_S, SHED_BELOW, TARGET_S, QueueAge
from headrace.control.service_times import Served
from headrace.control.worker_queue import WorkerQueue


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """When a worker has too much."""

    step_target_s: float = 0.0
    """What a step of the engine may take; 0: `step_tolerance` times what is usual for the worker when it is full."""
    step_tolerance: float = 3.0
    queue_age_target_s: float = TARGET_S
    queue_age_interval_s: float = INTERVAL_S


class WorkerOverload:
    """Of one run of a worker's engine. It is the `policy` of that worker's queue."""

    def __init__(self, queue: WorkerQueue, settings: OverloadSettings | None = None) -> None:
        self.settings = settings or OverloadSettings()
        self.concurrency = ConcurrencyLimit(
            queue.book.slots, target_s=self.settings.step_target_s, tolerance=self.settings.step_tolerance
        )
        self.age = QueueAge(target_s=self.settings.queue_age_target_s, interval_s=self.settings.queue_age_interval_s)
        self.brownout = Brownout()
        self.shed = 0
        """Attempts that were to be shed, in all."""
        self._queue = queue
        self._ended_ns = 0
        self._was_busy = False
        self._has_steps = False

    def departed(self, wait_s: float, now: float) -> None:
        """See QueuePolicy."""
        self.age.departed(wait_s, now)

    def served(self, served: Served, busy: int, now: float) -> None:
        """See QueuePolicy. Where steps are told, they are the better measure: a reader's pauses are not in them."""
        if served.token_s is not None and not self._has_steps:
            self._observe(served.token_s, busy, now)

    def stepped(self, steps: int, ended_ns: int, now: float) -> None:
        """A response of the engine tells of `steps`, the newest of which ended at `ended_ns` of its clock.

        Call it before the books learn what the response says: the steps ran with what was active before.
        """
        book = self._queue.book
        if steps > 0:
            if self._was_busy and book.active and 0 < self._ended_ns < ended_ns:
                self._has_steps = True
                self._observe((ended_ns - self._ended_ns) / 1e9 / steps, book.active, now)
            self._ended_ns = ended_ns
        self._was_busy = book.active > 0

    def tick(self, now: float) -> int:
        """Look at the queue; about once a second. Returns how many to shed, the oldest of the lowest priority first."""
        queue, book = self._queue, self._queue.book
        waiting = queue.waiting.waiting
        highest = max(waiting, default=None)
        head_age_s = queue.head_age_s(now)
        pressure = pressure_of(
            queue_age_s=head_age_s or 0.0,
            target_s=self.settings.queue_age_target_s,
            waiting=queue.depth,
            waiting_max=queue.requests_max,
        )
        book.admits_from = floor(self.brownout.observe(pressure, now), highest)
        due = self.age.due(head_age_s, now)
        if highest is None:
            return 0
        due = min(due, sum(count for priority, count in waiting.items() if priority < min(SHED_BELOW, highest)))
        self.shed += due
        return due

    def _observe(self, step_s: float, busy: int, now: float) -> None:
        if self.concurrency.observe(step_s, busy, now):
            self._queue.book.concurrency_limit = self.concurrency.limit


class OverloadControl:
    """Of all workers of one Scheduler. Tell it of workers as they come and go, and `tick` it about once a second."""

    def __init__(self, ledger: AttemptLedger, settings: OverloadSettings | None = None) -> None:
        self.workers: dict[str, WorkerOverload] = {}
        """By replica."""
        self._ledger = ledger
        self._settings = settings

    def open(self, replica: str) -> None:
        """The ledger has opened this worker."""
        queue = self._ledger.queues[replica]
        queue.policy = self.workers[replica] = WorkerOverload(queue, self._settings)

    def close(self, replica: str) -> None:
        """The worker is gone."""
        self.workers.pop(replica, None)

    def stepped(self, replica: str, steps: int, ended_ns: int, now: float) -> None:
        """See WorkerOverload."""
        worker = self.workers.get(replica)
        if worker is not None:
            worker.stepped(steps, ended_ns, now)

    def tick(self, now: float) -> None:
        """Look at all queues. Whoever calls lets the ledger advance afterwards."""
        for replica, worker in self.workers.items():
            due = worker.tick(now)
            if due:
                self._ledger.shed(replica, due, now)
