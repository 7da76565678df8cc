"""Several Routers whose load reports are old: they neither herd, nor wait longer than they would without any report.

A small simulation, seeded: replicas with slots and queues, exponential times, reports of what was true `age` seconds
ago. Beside the production class run two policies that know the same: the least reported load, which herds, and chance.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from headrace.control.filters import Demand
from headrace.control.load_view import ReplicaReport
from headrace.control.resources import Replica
from headrace.control.routing import Routing
from support.fleets import REVISION, replica, snapshot

ROUTERS, REPLICAS, SLOTS, SERVICE_S, UTILIZATION, SECONDS = 4, 24, 4, 1.0, 0.85, 60.0
REPORT_S = 0.1

Choose = Callable[[int, float], Replica]


@dataclass
class Worker:
    """Runs SLOTS attempts at a time, the others wait in order."""

    running: int = 0
    queue: deque[tuple[int, int, float]] = field(default_factory=deque)


class World:
    """Routers, replicas and what is said of them late."""

    def __init__(self, policy: str, age_s: float, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.replicas = tuple(replica(f"r{n:02}", slots=SLOTS) for n in range(REPLICAS))
        self.workers = {r.name: Worker() for r in self.replicas}
        self.snapshot = snapshot(*self.replicas)
        self.routers = [Routing() for _ in range(ROUTERS)]
        for router in self.routers:
            router.apply(self.snapshot, 0.0)
        self.reported: dict[str, int] = {}
        self.policy, self.age_s = policy, age_s
        self.waits: list[float] = []
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.tokens = 0
        self.bursts: Counter[tuple[int, str]] = Counter()

    def run(self) -> None:
        rate = UTILIZATION * REPLICAS * SLOTS / SERVICE_S
        at = 0.0
        while at < SECONDS:
            at += self.rng.expovariate(rate)
            self.at(at, self.arrive)
        for n in range(int(SECONDS / REPORT_S)):
            self.at(n * REPORT_S, self.report)
        while self.events:
            now, _, event = heapq.heappop(self.events)
            event(now)

    def at(self, when: float, event: Callable[[float], None]) -> None:
        self.tokens += 1
        heapq.heappush(self.events, (when, self.tokens, event))

    def report(self, now: float) -> None:
        """Told now, known `age_s` seconds later."""
        told = {name: (w.running, len(w.queue)) for name, w in self.workers.items()}

        def arrive(later: float) -> None:
            self.reported = {name: running + waiting for name, (running, waiting) in told.items()}
            for name, (running, waiting) in told.items():
                for router in self.routers:
                    router.report(name, ReplicaReport(running, waiting, SLOTS), later, age_s=self.age_s)

        self.at(now + self.age_s, arrive)

    def arrive(self, now: float) -> None:
        at = self.rng.randrange(ROUTERS)
        router = self.routers[at]
        if self.policy == "chance" or (self.policy == "least" and not self.reported):
            chosen = self.rng.choice(self.replicas).name
        elif self.policy == "least":
            chosen = min(self.reported, key=lambda name: (self.reported[name], name))
        else:
            chosen = router.choose(
                self.snapshot, REVISION, Demand(), reachable=lambda e: True, random=self.rng.random, now=now
            ).name
        self.tokens += 1
        token = self.tokens
        router.dispatched(token, chosen, 7, REVISION.name, Demand(), now)
        self.bursts[int(now), chosen] += 1
        worker = self.workers[chosen]
        worker.queue.append((at, token, now))
        self.start(chosen, now)

    def start(self, name: str, now: float) -> None:
        worker = self.workers[name]
        while worker.running < SLOTS and worker.queue:
            router, token, arrived = worker.queue.popleft()
            worker.running += 1
            self.waits.append(now - arrived)
            self.routers[router].admitted(token, 10, 0, now)
            self.routers[router].first_output(token, now)

            def end(later: float, router: int = router, token: int = token) -> None:
                worker.running -= 1
                self.routers[router].ended(token, None, later)
                self.start(name, later)

            self.at(now + self.rng.expovariate(1.0 / SERVICE_S), end)


@functools.cache
def simulate(policy: str, age_s: float) -> tuple[float, int]:
    """Mean wait for a slot, seconds, and the most that one replica got in one second."""
    world = World(policy, age_s)
    world.run()
    assert all(not router.loads.tokens for router in world.routers), "nothing is left in flight"
    settled = world.waits[len(world.waits) // 4 :]
    return sum(settled) / len(settled), max(world.bursts.values())


@pytest.mark.parametrize("age_s", [0.1, 1.0, 5.0])
def test_old_reports_do_not_herd(age_s: float) -> None:
    wait_s, burst = simulate("routing", age_s)
    by_chance_s, burst_of_chance = simulate("chance", 0.0)
    least_s, burst_of_least = simulate("least", age_s)
    assert wait_s < 0.5 * by_chance_s, "what each Router knows itself is enough to do better"
    assert burst <= burst_of_chance
    assert burst_of_least > 2 * burst, "the policy that herds does, or this test shows nothing"
    assert least_s > 3 * wait_s
