"""What a Scheduler does with the attempts of one worker until the engine has them.

    dispatch --> refused: full, below `admits_from`, deadline not to be met
             --> queued --> handed over, as soon as the books have a slot and KV cells for it
                        --> ended here: shed, deadline not to be met, or as its limits say

The engine is given what it can run, and `stage_ahead` more, so that a slot which comes free between two steps has
somebody. What it is given it keeps: everything that is fair or urgent is decided here, before.

The policies of overload set the book's `concurrency_limit` and `admits_from`, and may be told (`QueuePolicy`).

Short load classes have a share of the slots to themselves, as much of it as they have used of late: what they leave
is lent to long ones, and what was lent comes back as long ones end.

Sans-io.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.control.attempt_book import WAITING_MIN, WAITING_PER_SLOT, Attempt, Dispatched, WorkerBook
from headrace.control.errors import RULES, Failure, Reason
from headrace.control.fair_room import FairRoom, has_share
from headrace.control.priority import Priority
from headrace.control.service_times import PRIOR_HOLD_S, Expected, Served, ServiceTimes
from headrace.control.wait_queue import PASS_S, Waiting, WaitQueue

WAITING_BYTES_MAX = 64 * 1024 * 1024
SHORT_MEMORY_S = 10.0
"""In this time the slots that short classes have used are forgotten by two thirds."""
END_TOKENS_MAX = 256
"""Up to this output limit the end is foreseen, too; above it, part of an answer may be worth its time."""
RETRY_MIN_S, RETRY_MAX_S = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What may wait for a worker, and what the engine is given."""

    requests_max: int = 0
    """Attempts that may wait; 0: twice the slots, and 16 at least."""
    kv_times_max: float = 4.0
    """KV cells that those who wait may need, in multiples of what the worker has."""
    bytes_max: int = WAITING_BYTES_MAX
    """Input that may wait in all workers together."""
    over_commit: float = 1.0
    """KV cells that may be promised, in multiples of what the worker has."""
    stage_ahead: int = 1
    """Attempts that the engine has beyond its slots."""
    short_share: float = 0.125
    """Share of the slots that short load classes have to themselves."""
    pass_s: float = PASS_S
    """How long one that needs more KV than is free is passed by others."""


class QueuePolicy(Protocol):
    """Told, in the order in which it happens, what the control of overload measures."""

    def departed(self, wait_s: float, now: float) -> None:
        """An attempt was handed over after so long."""

    def served(self, served: Served, busy: int, now: float) -> None:
        """An attempt has ended that the engine ran; so many were active, it included."""


class WorkerQueue:
    """Attempts that wait for one run of a worker's engine, and the rule that hands them over."""

    def __init__(self, book: WorkerBook, times: ServiceTimes, settings: QueueSettings) -> None:
        self.book = book
        self.policy: QueuePolicy | None = None
        self.waiting = WaitQueue(pass_s=settings.pass_s)
        self._times = times
        self._settings = settings
        self._short_used = 0.0
        self._short_used_at = -math.inf
        self._rooms = {priority: FairRoom() for priority in Priority}

    # Limits

    @property
    def limit(self) -> int:
        """Attempts that the engine may run at a time."""
        book = self.book
        return min(book.slots, book.concurrency_limit) if book.concurrency_limit > 0 else book.slots

    @property
    def requests_max(self) -> int:
        """Attempts that may wait."""
        return self._settings.requests_max or max(WAITING_MIN, WAITING_PER_SLOT * self.book.slots)

    @property
    def depth(self) -> int:
        """Attempts that wait for a slot; those that the engine has and has one for do not."""
        book = self.book
        return len(self.waiting) + min(book.staged, max(0, book.active + book.staged - self.limit))

    @property
    def tokens_max(self) -> int:
        """KV cells that those who wait may need; 0: the worker has not said how many it has."""
        return int(self._settings.kv_times_max * self.book.kv_cells)

    @property
    def bytes_max(self) -> int:
        """Input that may wait in all workers together."""
        return self._settings.bytes_max

    def head_age_s(self, now: float) -> float | None:
        """For how long the oldest of the highest priority has waited; None: nobody waits."""
        return self.waiting.head_age_s(now)

    # At the door

    @property
    def admits_from(self) -> Priority:
        """Lowest priority that may come in now; where as many wait as may, one above the lowest that waits.

        CRITICAL is never refused by this: whether there is room for it is decided when it comes.
        """
        lowest = self.book.admits_from
        if self.depth < self.requests_max and self.book.preempted < self.requests_max:
            return lowest
        waits = min(self.waiting.waiting, default=Priority.STANDARD)
        return max(lowest, Priority(min(waits + 1, Priority.CRITICAL)))

    @property
    def room(self) -> int:
        """How many more may come before it is full."""
        if self.book.preempted >= self.requests_max:
            return 0
        return max(0, self.requests_max - self.depth)

    def make_room(self, wanted: Dispatched, cells: int, waiting_bytes: int, now: float) -> list[int]:
        """Decide whether one more may wait.

        Returns:
            Those of lower priority that have to go for it.

        Raises:
            Failure: OVERLOADED; which bound, how much, and when to come again.
        """
        book = self.book
        if wanted.priority < book.admits_from:
            stage = {"admitsFrom": book.admits_from.name, "priority": wanted.priority.name, "stage": "priority"}
            raise self._overloaded("Requests of this priority are refused for a while.", stage, wanted.priority, now)
        self._check_share(wanted, cells, now)
        requests = self.depth + 1 - self.requests_max
        tokens = self.waiting.tokens + cells - self.tokens_max if self.tokens_max and len(self.waiting) else 0
        bytes_ = waiting_bytes + wanted.input_bytes - self.bytes_max
        # Preempted ones have a bound of their own: readers that stand still must not close the queue for the others.
        is_stuck = book.preempted >= self.requests_max
        if max(requests, tokens, bytes_) <= 0 and not is_stuck:
            return []
        victims = self.waiting.victims(
            wanted.priority,
            requests=requests,
            tokens=tokens,
            bytes_=bytes_,
            size_of=lambda token: book.attempts[token].input_bytes,
        )
        if victims and not is_stuck:
            return victims
        if requests > 0 or is_stuck:
            depth = max(self.depth, book.preempted)
            said = {"queueDepth": str(depth), "limit": str(self.requests_max), "stage": "requests"}
            raise self._overloaded("Too many attempts wait for this replica.", said, wanted.priority, now)
        if tokens > 0:
            said = {"queueTokens": str(self.waiting.tokens), "limitTokens": str(self.tokens_max), "stage": "tokens"}
            raise self._overloaded("Too many tokens wait for this replica.", said, wanted.priority, now)
        said = {"queueBytes": str(waiting_bytes), "limitBytes": str(self.bytes_max), "stage": "bytes"}
        raise self._overloaded("Too much input waits in this Scheduler.", said, wanted.priority, now)

    def leaves_share(self, priority: Priority, tenant: str, weight: float, cells: int, now: float) -> bool:
        """Whether a tenant may add one of so many KV cells to what waits of its own, since others ask, too."""
        requests, tokens = self.waiting.held_by(priority, tenant)
        if not requests or not self._rooms[priority].others(tenant, now):
            return True
        below_requests, below_tokens = self.waiting.below(priority)
        free = self.requests_max - self.depth + below_requests
        free_tokens = self.tokens_max - self.waiting.tokens + below_tokens if self.tokens_max else math.inf
        return has_share(requests, 1, free, weight) and has_share(tokens, cells, free_tokens, weight)

    def _check_share(self, wanted: Dispatched, cells: int, now: float) -> None:
        """Refuse a tenant that has so many waiting that others, who ask too, would find no room."""
        self._rooms[wanted.priority].asks(wanted.tenant, now)
        if self.leaves_share(wanted.priority, wanted.tenant, wanted.weight, cells, now):
            return
        requests, _ = self.waiting.held_by(wanted.priority, wanted.tenant)
        said = {"queueDepth": str(self.depth), "limit": str(self.requests_max), "tenantDepth": str(requests)}
        said["stage"] = "share"
        raise self._overloaded("What room is left is for tenants with less that waits.", said, wanted.priority, now)

    def shed_failure(self, attempt: Attempt, now: float) -> Failure:
        """What is said to one that has to go."""
        said = {"queueDepth": str(self.depth), "limit": str(self.requests_max), "stage": "shed"}
        return self._overloaded("Work of higher priority took its place in the queue.", said, attempt.priority, now)

    def estimated(self, attempt: Attempt) -> Attempt:
        """The same with what its prompt would be estimated at now, where it is not known exactly."""
        if not attempt.prompt_guess:
            return attempt
        prompt_tokens = self._times.prompt_tokens(attempt.load_class, attempt.prompt_guess)
        cells = estimate_cells(prompt_tokens, attempt.max_tokens, self.book)
        return replace(attempt, prompt_tokens=prompt_tokens, kv_cells=cells)

    def put(self, attempt: Attempt, expected: Expected, now: float) -> None:
        """One more waits."""
        self.waiting.put(self._entry(attempt, expected, now))

    def foresee(self, attempt: Attempt, now: float) -> Expected:
        """What it may take once it has its slot."""
        return self._times.estimate(
            attempt.load_class, prompt_tokens=attempt.prompt_tokens, max_tokens=attempt.max_tokens, now=now
        )

    def check_deadline(self, attempt: Attempt, expected: Expected, now: float, *, is_next: bool) -> None:
        """Refuse one that by measured times cannot make it; where nothing was measured nobody is refused.

        Args:
            attempt: which.
            expected: what it may take.
            now: monotonic seconds.
            is_next: it would be handed over now, so it does not wait any more.

        Raises:
            Failure: DEADLINE_UNMEETABLE; OVERLOADED where it is the longest wait that would not be kept.
        """
        queue_s = attempt.budget.queue_remaining_s(now)
        remaining_s = attempt.budget.deadline_at - now
        end_s = expected.end_s(expected.output_tokens) if attempt.max_tokens <= END_TOKENS_MAX else None
        wait_s = 0.0 if is_next else self._wait_of(attempt, expected, now)
        if queue_s is not None and wait_s > queue_s:
            said = {"expectedMs": _ms(wait_s), "limitMs": _ms(queue_s), "stage": "wait"}
            raise self._overloaded("It would wait longer than it may.", said, attempt.priority, now)
        needs_s = wait_s + (expected.prefill_s or 0.0)
        stage = "firstToken"
        if end_s is not None and needs_s <= remaining_s:
            needs_s, stage = wait_s + end_s, "end"
        if needs_s > remaining_s:
            raise Failure(
                Reason.DEADLINE_UNMEETABLE,
                "By measured times it cannot be done before its deadline.",
                metadata={"expectedMs": _ms(needs_s), "remainingMs": _ms(remaining_s), "stage": stage},
                retry_after_s=_retry_s(wait_s) if wait_s else None,
            )

    # Handing over

    @property
    def has_room(self) -> bool:
        """Whether somebody could be handed over if it fits."""
        return len(self.waiting) > 0 and self._free > 0

    def next(self, now: float) -> int | None:
        """Take out whoever is to be handed over now; None: nobody."""
        if not self.has_room:
            return None
        book = self.book
        kept = self._kept_for_short(now)
        free = self._free
        is_idle = book.active + book.staged == 0
        cells = book.kv_cells * self._settings.over_commit - book.kv_cells_reserved - book.staged_cells
        entry = self.waiting.next(
            now,
            may_start=lambda e: e.is_short or free > kept,
            fits=lambda e: is_idle or not book.kv_cells or e.cells <= cells,
        )
        reserved = self.waiting.reserved
        if entry is None and reserved is not None and not book.staged:
            # The engine takes its queue in order: what comes free is kept for it there, and readers who stand still
            # are preempted for it.
            entry = self.waiting.take_reserved()
        if entry is None:
            return None
        if self.policy is not None:
            self.policy.departed(now - entry.arrived_at, now)
        return entry.token

    def next_due(self) -> float:
        """When to look again though nothing has happened; infinite: never."""
        return self.waiting.next_due(has_room=self.has_room)

    def measure(self, attempt: Attempt, served: Served, now: float) -> None:
        """The engine has let go of an attempt that it ran."""
        self._times.add(attempt.load_class, served, now)
        if self.policy is not None:
            self.policy.served(served, self.book.active + 1, now)

    # Load

    def wait_s(self, priority: Priority, now: float) -> tuple[float, bool]:
        """What a request of middling size that came now would wait, and whether that was measured."""
        return self._wait_s(self.waiting.work_ahead(priority), now)

    def prefill_tokens_per_s(self, now: float) -> int:
        """Prompt tokens a second of one prefill; 0: not known."""
        return self._times.prefill_tokens_per_s(self.book.revision, now)

    @property
    def _free(self) -> int:
        """How many may be handed over. One that is limited below its slots is given none ahead: it would run them."""
        book, limit = self.book, self.limit
        ahead = self._settings.stage_ahead if limit == book.slots else 0
        return limit + ahead - book.active - book.staged

    def _kept_for_short(self, now: float) -> int:
        """Slots that long classes may not take now: what short ones have used of late of their share, and do not."""
        share = int(self.limit * self._settings.short_share)
        if not share:
            return 0
        book = self.book
        faded = self._short_used * math.exp(-max(0.0, now - self._short_used_at) / SHORT_MEMORY_S)
        self._short_used = max(faded, float(book.shorts + self.waiting.shorts))
        self._short_used_at = now
        return max(0, min(share, round(self._short_used)) - book.shorts)

    def _wait_of(self, attempt: Attempt, expected: Expected, now: float) -> float:
        """Its wait, by measured times; 0 where there are none."""
        hold_s = self._times.hold_s(self.book.revision, now)
        if hold_s is None or self._is_free(self.waiting.work_ahead(attempt.priority)):
            return 0.0
        entry = self._entry(attempt, expected, now)
        entry.number = 1 << 62
        before, width = self._before_all()
        return self.waiting.ahead_of(entry, now).wait_s(width / hold_s, before)

    def _wait_s(self, ahead: float, now: float) -> tuple[float, bool]:
        """Wait behind so much work. It is counted in usual ones, so that it is right when their time is known."""
        if self._is_free(ahead):
            return 0.0, True
        hold_s = self._times.hold_s(self.book.revision, now)
        before, width = self._before_all()
        return (ahead + before) * (PRIOR_HOLD_S if hold_s is None else hold_s) / width, hold_s is not None

    def _is_free(self, ahead: float) -> bool:
        """Whether one that comes now, behind so much work, has its slot at once."""
        return ahead <= 0 and self.book.active + self.book.staged < self.limit

    def _before_all(self) -> tuple[int, int]:
        """Usual ones that have to end before anybody who waits begins, and how many run at a time."""
        busy = self.book.active + self.book.staged
        # Where KV is what is missing, fewer run than there are slots.
        return max(0, busy - self.limit) + 1, max(1, min(self.limit, busy))

    def _overloaded(self, message: str, metadata: Mapping[str, str], priority: Priority, now: float) -> Failure:
        wait_s, is_measured = self.wait_s(priority, now)
        retry_s = _retry_s(wait_s) if is_measured and wait_s else RULES[Reason.OVERLOADED].retry_after_s
        return Failure(Reason.OVERLOADED, message, metadata=metadata, retry_after_s=retry_s)

    def _entry(self, attempt: Attempt, expected: Expected, now: float) -> Waiting:
        usual_s = self._times.hold_s(self.book.revision, now) if expected.is_measured else None
        budget = attempt.budget
        queue_end = math.inf if budget.queue_s is None else budget.received_at + budget.queue_s
        return Waiting(
            token=attempt.token,
            tenant=attempt.tenant,
            weight=attempt.weight,
            priority=attempt.priority,
            cost=max(1, attempt.prompt_tokens + round(expected.output_tokens)),
            cells=attempt.kv_cells,
            arrived_at=budget.received_at,
            deadline_at=budget.deadline_at,
            expires_at=min(budget.deadline_at, queue_end),
            work=1.0 if usual_s is None else expected.hold_s / usual_s,
            is_short=attempt.load_class.is_short,
        )


def estimate_cells(prompt_tokens: int, max_tokens: int, book: WorkerBook) -> int:
    """KV cells that an attempt will reserve, until the engine has counted: never more than the context holds."""
    return min(prompt_tokens + max_tokens, book.context_tokens or 1 << 31)


def _ms(seconds: float) -> str:
    return str(max(0, round(seconds * 1000)))


def _retry_s(wait_s: float) -> float:
    return min(RETRY_MAX_S, max(RETRY_MIN_S, wait_s))
