"""A worker at many times its load, on the real books and a virtual clock: its slots stay busy, and waits stay short."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest

from headrace.control.attempts import AttemptLedger
from headrace.control.errors import Failure
from headrace.control.overload import OverloadControl
from headrace.control.priority import Priority
from support.attempts import RUN, book, wanted

REPLICA = "replicas/a"
SLOTS = 8
SERVICE_S = 1.0
SECONDS = 60.0


class Worker:
    """Arrivals at a rate, an engine that runs what it is given for a second each, and the control of overload."""

    def __init__(self, rate: float, mix: dict[Priority, float], seed: int) -> None:
        self.ledger = AttemptLedger()
        self.ledger.open_worker(book(slots=SLOTS))
        self.control = OverloadControl(self.ledger)
        self.control.open(REPLICA)
        self.random = random.Random(seed)
        self.rate, self.mix = rate, mix
        self.staged: list[int] = []
        self.ends: list[tuple[float, int]] = []
        self.done: Counter[Priority] = Counter()
        self.offered: Counter[Priority] = Counter()
        self.waits: dict[Priority, list[float]] = {priority: [] for priority in Priority}
        self.shed = 0

    def start(self, now: float) -> None:
        self.staged += [attempt.token for attempt in self.ledger.take_ready()]
        while self.staged and self.ledger.workers[REPLICA].active < SLOTS:
            attempt = self.ledger.admit(self.staged.pop(0), RUN, 1, now)
            assert attempt is not None
            self.waits[attempt.priority].append(now - attempt.received_at)
            heapq.heappush(self.ends, (now + SERVICE_S * self.random.uniform(0.5, 1.5), attempt.token))
        self.shed += len(self.ledger.take_ended())

    def arrive(self, token: int, now: float) -> None:
        (priority,) = self.random.choices(list(self.mix), list(self.mix.values()))
        self.offered[priority] += 1
        try:
            self.ledger.dispatch(wanted(token, priority=priority), now)
        except Failure:
            return

    def run(self) -> None:
        now, token, tick_at = 0.0, 0, 1.0
        arrival = self.random.expovariate(self.rate)
        while now < SECONDS:
            end = self.ends[0][0] if self.ends else SECONDS
            now = min(arrival, end, tick_at)
            if now == tick_at:
                self.control.tick(now)
                tick_at += 1.0
            elif now == arrival:
                token += 1
                self.arrive(token, now)
                arrival += self.random.expovariate(self.rate)
            else:
                attempt = self.ledger.finish(heapq.heappop(self.ends)[1], RUN)
                assert attempt is not None
                self.done[attempt.priority] += 1
            self.ledger.advance(now)
            self.start(now)

    @property
    def goodput(self) -> float:
        """Share of what the slots can do."""
        return self.done.total() * SERVICE_S / SECONDS / SLOTS


STANDARD_ONLY = {Priority.STANDARD: 1.0}
MIX = {Priority.SHEDDABLE: 0.3, Priority.BATCH: 0.3, Priority.STANDARD: 0.3, Priority.CRITICAL: 0.1}


@pytest.mark.parametrize("mix", [STANDARD_ONLY, {Priority.SHEDDABLE: 1.0}, MIX], ids=["STANDARD", "SHEDDABLE", "mixed"])
@pytest.mark.parametrize("times", [3, 10])
def test_at_many_times_its_load_a_worker_does_as_much_as_it_can(mix: dict[Priority, float], times: int) -> None:
    worker = Worker(times * SLOTS / SERVICE_S, mix, seed=5)
    worker.run()
    assert worker.goodput >= 0.95
    assert max(max(waits, default=0.0) for waits in worker.waits.values()) <= 20.0


def test_at_half_its_load_nobody_is_refused() -> None:
    worker = Worker(0.5 * SLOTS / SERVICE_S, MIX, seed=6)
    worker.run()
    for priority in MIX:
        assert worker.done[priority] >= worker.offered[priority] - SLOTS
    assert worker.shed == 0


def test_under_overload_the_critical_are_served_and_the_lower_ones_refused_in_order() -> None:
    worker = Worker(3 * SLOTS / SERVICE_S, MIX, seed=7)
    worker.run()
    share = {priority: worker.done[priority] / worker.offered[priority] for priority in MIX}
    assert share[Priority.CRITICAL] >= 0.97
    assert share[Priority.CRITICAL] > share[Priority.STANDARD] > share[Priority.BATCH] > share[Priority.SHEDDABLE]
    waits = sorted(worker.waits[Priority.CRITICAL])
    assert waits[int(len(waits) * 0.99)] <= 1.0
