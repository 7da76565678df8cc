"""To whom a worker is closed: what its Scheduler tells the Routers, so that nobody of those asks in vain.

It is asked again for each tenant and priority that has asked of late, as if the latest request of them came once more
now. Those that would be refused are told, with what would refuse them, so that a Router can judge by another request's
own limits.

Sans-io; instants are monotonic seconds. It costs about as much as that many dispatches, and is done as soon as what
waits or runs has changed, at most `LOOKS_A_SECOND` on the average over all workers of a Scheduler.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sized
from dataclasses import replace

from headrace.control.attempt_book import Attempt
from headrace.control.doors import Closed
from headrace.control.errors import Failure, Reason
from headrace.control.priority import Priority
from headrace.control.worker_queue import WorkerQueue

ASKS_MAX = 32
"""Tenants, each with a priority, that are asked for again: those that have asked last."""
LOOKS_A_SECOND = 80.0
"""At all workers of a Scheduler, shared evenly: a look at a worker takes a millisecond or two, and those that end
hundreds of requests a second get no more."""
LOOKS_MAX, LOOKS_MIN = 20.0, 2.0
"""How many that were not used may be had at once, of all workers and of one: what comes, begins or ends is mostly
followed by another."""
ASK_S = 60.0
"""For so long after they asked."""


_EPSILON = 1e-6


class Looks:
    """How often one worker may still be looked at."""

    def __init__(self) -> None:
        self._left = math.inf
        self._at = -math.inf

    def take(self, now: float, workers: int) -> float:
        """Take one, where so many workers share what there is; returns 0, or when there will be one."""
        rate = LOOKS_A_SECOND / workers
        most = max(LOOKS_MIN, LOOKS_MAX / workers)
        self._left = min(most, self._left + max(0.0, now - self._at) * rate)
        self._at = now
        if self._left < 1.0 - _EPSILON:
            return now + (1.0 - self._left) / rate
        self._left -= 1.0
        return 0.0


class DoorKeeper:
    """Of one run of a worker's engine.

    Args:
        queue: what waits for it.
        workers: all workers of the Scheduler, of which there are so many as there are doors.
    """

    def __init__(self, queue: WorkerQueue, workers: Sized) -> None:
        self._queue = queue
        self._workers = workers
        self._looks = Looks()
        self._asks: OrderedDict[tuple[str, Priority], Attempt] = OrderedDict()
        self._seen: tuple[object, ...] = ()
        self.next_due = math.inf
        """When to look at what has changed since it was looked at last; infinite: nothing has."""
        self._closed: tuple[Closed, ...] = ()

    def asked(self, attempt: Attempt) -> bool:
        """An attempt came to the door, let in or not. Returns whether that may change what is told."""
        key = attempt.tenant, attempt.priority
        is_news = all((one.tenant, one.priority) != key for one in self._closed)
        if is_news:
            self._seen = ()
        self._asks[key] = replace(attempt, payload=None)  # what it says is nobody's business here
        self._asks.move_to_end(key)
        if len(self._asks) > ASKS_MAX:
            self._asks.popitem(last=False)
        return is_news

    def closed(self, now: float) -> tuple[Closed, ...]:
        """To whom it is closed; as found last, where nothing that decides it has changed."""
        queue, book = self._queue, self._queue.book
        waiting, busy = queue.waiting, book.active + book.staged
        seen = (busy, book.preempted, queue.limit, len(waiting), waiting.tokens, waiting.latest)
        if seen == self._seen:
            self.next_due = math.inf
        elif due := self._looks.take(now, len(self._workers)):
            self.next_due = due
        else:
            self._seen, self._closed, self.next_due = seen, tuple(self._look(now)), math.inf
        return self._closed

    def _look(self, now: float) -> Iterator[Closed]:
        if not len(self._queue.waiting):
            return
        for (tenant, priority), attempt in tuple(self._asks.items()):
            if now - attempt.received_at > ASK_S:
                del self._asks[tenant, priority]
            elif (found := self._again(attempt, now)) is not None:
                yield found

    def _again(self, attempt: Attempt, now: float) -> Closed | None:
        """What would become of it if it came once more."""
        queue, budget = self._queue, attempt.budget
        attempt = queue.estimated(attempt)
        tokens = (attempt.prompt_guess or attempt.prompt_tokens) + attempt.max_tokens
        if not queue.leaves_share(attempt.priority, attempt.tenant, attempt.weight, attempt.kv_cells, now):
            return Closed(attempt.tenant, int(attempt.priority))
        remaining_s = budget.deadline_at - budget.received_at
        again = replace(attempt, budget=replace(budget, received_at=now, deadline_at=now + remaining_s))
        try:
            queue.check_deadline(again, queue.foresee(again, now), now, is_next=False)
        except Failure as failure:
            expected_s = int(failure.metadata["expectedMs"]) / 1000
            is_late = failure.reason is Reason.DEADLINE_UNMEETABLE
            return Closed(
                attempt.tenant,
                int(attempt.priority),
                tokens,
                wait_s=0.0 if is_late else expected_s,
                done_s=expected_s if is_late else 0.0,
            )
        return None
