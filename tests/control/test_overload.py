"""Control of a worker's overload on the real books: who is refused, who is shed, and how many run at a time."""

from __future__ import annotations

import pytest

from headrace.control.attempts import AttemptLedger
from headrace.control.concurrency_limit import WINDOW_SAMPLES_MIN
from headrace.control.errors import Failure, Reason
from headrace.control.overload import OverloadControl, OverloadSettings
from headrace.control.priority import Priority
from support.attempts import RUN, book, wanted

REPLICA = "replicas/a"
SHEDDABLE, BATCH, STANDARD, CRITICAL = Priority
SLOTS = 4


class Bench:
    """One worker, its queue, and a clock; what was handed over is admitted while slots are free, else it is staged."""

    def __init__(self, **settings: float) -> None:
        self.ledger = AttemptLedger()
        self.ledger.open_worker(book(slots=SLOTS))
        self.control = OverloadControl(self.ledger, OverloadSettings(**settings))
        self.control.open(REPLICA)
        self.now = 0.0
        self.staged: list[int] = []
        self.next_token = 1
        self.ended_ns = 1_000_000_000

    @property
    def book(self):
        return self.ledger.workers[REPLICA]

    def send(self, priority: Priority, count: int = 1) -> list[int]:
        tokens = []
        for _ in range(count):
            token, self.next_token = self.next_token, self.next_token + 1
            self.ledger.dispatch(wanted(token, priority=priority), self.now)
            tokens.append(token)
            self.admit()
        return tokens

    def admit(self) -> None:
        self.staged += [attempt.token for attempt in self.ledger.take_ready()]
        while self.staged and self.book.active < SLOTS:
            self.ledger.admit(self.staged.pop(0), RUN, 1, self.now)

    def finish_oldest(self) -> None:
        active = [a for a in self.ledger.attempts.values() if a.is_active]
        self.ledger.finish(min(active, key=lambda a: a.admitted_at).token, RUN)
        self.admit()
        self.ledger.advance(self.now)
        self.admit()

    def tick(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.control.tick(self.now)
            self.ledger.advance(self.now)
            self.admit()

    def waiting(self) -> dict[Priority, int]:
        return dict(self.ledger.queues[REPLICA].waiting.waiting)

    def steps(self, count: int, step_s: float, merged: int = 1) -> None:
        for _ in range(count):
            self.now += step_s * merged
            self.ended_ns += int(step_s * merged * 1e9)
            self.control.stepped(REPLICA, merged, self.ended_ns, self.now)


def test_under_pressure_lower_priorities_are_refused_and_the_highest_that_waits_is_not() -> None:
    bench = Bench()
    bench.send(BATCH, SLOTS + 2)
    bench.send(STANDARD, 12)
    bench.tick(6)
    assert bench.book.admits_from is STANDARD, "the pressure would refuse more, but there is nobody to do it for"
    for priority in (SHEDDABLE, BATCH):
        with pytest.raises(Failure) as refused:
            bench.send(priority)
        assert refused.value.reason is Reason.OVERLOADED
    bench.send(STANDARD)


def test_work_of_one_priority_is_neither_browned_out_nor_shed() -> None:
    for priority in (SHEDDABLE, STANDARD):
        bench = Bench()
        bench.send(priority, SLOTS + 12)
        before = bench.waiting()
        bench.tick(40)
        assert bench.waiting() == before
        assert bench.book.admits_from <= priority


def test_a_queue_that_stands_is_shed_from_at_its_lowest_priority() -> None:
    bench = Bench(queue_age_target_s=1.0, queue_age_interval_s=5.0)
    low = bench.send(BATCH, SLOTS + 1 + 4)[-4:]
    high = bench.send(STANDARD, 3)
    bench.tick(5)
    assert set(low) <= bench.ledger.attempts.keys(), "not for an interval yet"
    bench.tick(2)
    (shed,) = bench.ledger.take_ended()
    assert shed.attempt.token == low[0], "the oldest"
    assert shed.failure is not None
    assert (shed.failure.reason, shed.failure.metadata["stage"]) == (Reason.OVERLOADED, "shed")
    bench.tick(60)
    assert set(high) <= bench.ledger.attempts.keys(), "STANDARD is kept"
    assert not set(low) & bench.ledger.attempts.keys()
    assert bench.control.workers[REPLICA].shed == 4


def test_what_was_accepted_as_standard_is_kept_also_for_critical_work() -> None:
    bench = Bench(queue_age_target_s=1.0, queue_age_interval_s=5.0)
    bench.send(STANDARD, SLOTS + 4)
    bench.send(CRITICAL, 3)
    bench.tick(60)
    assert bench.ledger.take_ended() == []


def test_one_short_wait_shows_that_a_queue_does_not_stand() -> None:
    bench = Bench(queue_age_target_s=1.0, queue_age_interval_s=5.0)
    bench.send(BATCH, SLOTS + 4)
    bench.send(STANDARD, 3)
    for _ in range(10):
        bench.tick(4)
        bench.ledger.queues[REPLICA].policy.departed(0.5, bench.now)
    assert bench.control.workers[REPLICA].shed == 0


def test_a_queue_that_drains_is_left_alone() -> None:
    bench = Bench(queue_age_target_s=1.0, queue_age_interval_s=5.0)
    for _ in range(30):
        bench.send(BATCH, 2)
        bench.send(STANDARD, 2)
        bench.tick()
        for _ in range(4):
            bench.finish_oldest()
    assert bench.control.workers[REPLICA].shed == 0


def test_slow_steps_lower_what_the_engine_is_given_and_fast_ones_raise_it_again() -> None:
    bench = Bench(step_target_s=0.1)
    bench.send(STANDARD, SLOTS + 8)
    bench.steps(3 * WINDOW_SAMPLES_MIN, 0.05, merged=10)
    assert bench.book.concurrency_limit in (0, SLOTS), "ten steps in one response"
    bench.steps(3 * WINDOW_SAMPLES_MIN, 0.5)
    limit = bench.book.concurrency_limit
    assert 1 <= limit < SLOTS
    while bench.book.active > limit:
        bench.finish_oldest()
    bench.finish_oldest()
    assert bench.book.active + bench.book.staged == limit, "one comes for one that goes, and none is staged"
    bench.steps(400, 0.02)
    for _ in range(3):
        bench.tick()
        bench.finish_oldest()
        bench.steps(400, 0.02)
    assert bench.book.concurrency_limit == SLOTS


def test_time_without_work_is_no_step() -> None:
    bench = Bench(step_target_s=0.1)
    for _ in range(4 * WINDOW_SAMPLES_MIN):
        bench.send(STANDARD)
        bench.send(STANDARD, SLOTS - 1)
        bench.steps(1, 60.0)
        bench.steps(1, 0.02)
        for one in tuple(bench.ledger.attempts):
            bench.ledger.finish(one, RUN)
        bench.ledger.advance(bench.now)
        bench.now += 60.0
        bench.ended_ns += 60_000_000_000
        bench.control.stepped(REPLICA, 1, bench.ended_ns, bench.now)
    assert bench.book.concurrency_limit in (0, SLOTS)


def test_a_worker_that_is_gone_is_forgotten() -> None:
    bench = Bench()
    bench.control.close(REPLICA)
    bench.ledger.close_worker(REPLICA)
    bench.control.stepped(REPLICA, 1, 5, 1.0)
    bench.control.tick(1.0)
    assert not bench.control.workers


@pytest.mark.parametrize(
    ("waits", "told"),
    [((STANDARD,) * 16, CRITICAL), ((STANDARD,) * 15 + (BATCH,), STANDARD), ((STANDARD,) * 15, SHEDDABLE)],
    ids=["full", "full, and one would have to go for higher ones", "not full"],
)
def test_a_full_queue_says_whom_it_still_takes(waits: tuple[Priority, ...], told: Priority) -> None:
    bench = Bench()
    bench.send(CRITICAL, SLOTS + 1)  # the last one is staged, and counts as one that waits
    for priority in waits[1:]:
        bench.send(priority)
    load = bench.ledger.load(REPLICA, bench.now)
    assert load is not None
    assert (load.admits_from, load.waiting_max) == (told, 16)
    for priority in (SHEDDABLE, BATCH, STANDARD):
        if priority < told:
            with pytest.raises(Failure):
                bench.send(priority)
    bench.send(CRITICAL if told is CRITICAL else told)
