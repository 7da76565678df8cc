"""One run: Routers, Schedulers, engines and callers on one virtual clock, and the books at its end."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.control.priority import Priority
from headrace.control.resources import FailureDomain, Replica, ReplicaState
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.tenants import Tenant, unlimited
from sim_load.clients import Caller
from sim_load.clock import Clock
from sim_load.engine import CONTEXT, KV_CELLS, REVISION, SLOTS, Engine, Sequence
from sim_load.policies import POLICIES
from sim_load.router import Router
from sim_load.scheduler import Report, Scheduler
from sim_load.tally import TTFT_SLO_S, Tally
from sim_load.traffic import PRIORITIES, TENANTS, USUAL, Call, Kind, Traffic

ROUTERS = 4
ZONES = ("a", "b", "c", "d")
SCHEDULERS_PER_ZONE = 2
NOTICED_S = 1.0
"""When a Router knows that a link is dead."""
QUEUE_S = 60.0
"""The Routers' setting `queue_timeout_s`: its default."""
TTFT_S = TTFT_SLO_S
"""Their setting `ttft_target_s`."""
TTFT_DEFAULT_S = 10.0
"""Its default."""
REPORT_S = 0.2
DRAIN_S = 200.0


def _always(tenant: str, at: float) -> float:
    return 1.0


@dataclass(frozen=True)
class Scenario:
    """What happens in one run."""

    name: str
    load: float
    """Offered, in multiples of what the fleet can do."""
    seconds: float = 30.0
    """How long calls come."""
    warm_s: float = 8.0
    kinds: tuple[Kind, ...] = USUAL
    priorities: Mapping[Priority, float] = field(default_factory=lambda: PRIORITIES)
    share_of: Callable[[str, float], float] = _always
    """How many times its usual share a tenant asks for, at a time."""
    policy: str = "headrace"
    resends: int = 0
    """How often a caller sends again at once what was refused or failed."""
    attempts_max: int = 3
    queue_s: float = QUEUE_S
    ttft_s: float = TTFT_S
    report_s: float = REPORT_S
    """Time between a Scheduler's reports."""
    late_s: float = 0.0
    """By how much they are late without anybody knowing."""
    slow: dict[int, float] = field(default_factory=dict)
    """How many times slower replicas are, by number."""
    zone_lost: tuple[float, float] | None = None
    """When the last zone goes, and when it is back."""
    outage: tuple[float, float] | None = None
    """While every attempt fails."""
    equal: tuple[str, ...] = TENANTS
    """Tenants that are entitled to as much as each other and ask for as much, or for more than that."""
    tenants: tuple[Tenant, ...] = ()
    """Those with limits; the others have none."""
    per_scheduler: int = 8
    """Replicas; there are 8 Schedulers in 4 zones."""

    @property
    def slo_s(self) -> float:
        """When a first token is soon enough: as is promised."""
        return self.ttft_s or TTFT_SLO_S

    @property
    def replicas(self) -> int:
        """Of the fleet."""
        return len(ZONES) * SCHEDULERS_PER_ZONE * self.per_scheduler


class World:
    """See the module."""

    def __init__(self, scenario: Scenario, calls: list[Call], seed: int) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.tally = Tally((scenario.warm_s, scenario.seconds), scenario.outage or scenario.zone_lost, scenario.slo_s)
        self.schedulers: list[Scheduler] = []
        """All that ever were."""
        self.fleet: dict[str, dict[str, int]] = {}
        """Epoch by replica, by endpoint."""
        self._tenants = {t.name: t for t in (*map(unlimited, TENANTS), *scenario.tenants)}
        self._runs = itertools.count(1)
        self._versions = itertools.count(1)
        tokens = itertools.count(1)
        self.routers = [
            Router(
                self.clock, n, ROUTERS, random.Random(f"{seed}/{n}"), tokens,
                attempts_max=scenario.attempts_max,
                queue_s=scenario.queue_s,
                ttft_s=scenario.ttft_s,
                choose=POLICIES[scenario.policy]() if scenario.policy in POLICIES else None,
            )
            for n in range(ROUTERS)
        ]  # fmt: skip
        for n in range(len(ZONES) * SCHEDULERS_PER_ZONE):
            first = n * scenario.per_scheduler
            names = [f"replicas/r{first + i:02}" for i in range(scenario.per_scheduler)]
            self.fleet[f"s{n}:1"] = dict.fromkeys(names, 1)
            self._start(f"s{n}:1")
        self._publish()
        for router in self.routers:
            self.clock.after(router.number * 0.01, router.tend)
        if scenario.zone_lost:
            lost_at, back_at = scenario.zone_lost
            self.clock.at(lost_at, self._lose_zone)
            self.clock.at(back_at, self._bring_back)
        for call in calls:
            caller = Caller(self, call, self._tenants[call.tenant], scenario.resends, self.tally)
            self.clock.at(call.at, caller.send)

    def run(self) -> None:
        """To the end, and until nothing runs any more."""
        self.clock.run(self.scenario.seconds)
        self.tally.finish()
        until = self.scenario.seconds + DRAIN_S
        while self.tally.open and self.clock.now < until:
            self.clock.run(self.clock.now + 5.0)
        self.clock.run(self.clock.now + 1.0)

    # The fleet

    def _start(self, endpoint: str) -> None:
        scenario, replicas = self.scenario, self.fleet[endpoint]
        number = int(endpoint[1:-2])
        scheduler = Scheduler(
            self.clock, endpoint, ZONES[number // SCHEDULERS_PER_ZONE], replicas, 1 + 100 * next(self._runs)
        )
        self.schedulers.append(scheduler)
        for name, engine in scheduler.engines.items():
            engine.slowness = scenario.slow.get(int(name[-2:]), 1.0)
            if scenario.outage:
                engine.is_failing = self._is_failing
        for router in self.routers:
            far = 0.0 if router.number % len(ZONES) == ZONES.index(scheduler.zone) else 0.001
            router.connect(scheduler, 0.0005 + far)
        offset = 0.001 * number + (scenario.report_s * number / len(ZONES) / SCHEDULERS_PER_ZONE)
        self.clock.after(offset, self._report, scheduler)

    def _is_failing(self) -> bool:
        assert self.scenario.outage is not None
        begin, end = self.scenario.outage
        return begin <= self.clock.now < end

    def _publish(self) -> None:
        replicas = tuple(
            Replica(
                name, REVISION.name, f"schedulers/{endpoint}", endpoint,
                failure_domain=FailureDomain(f"h{endpoint}", "", ZONES[int(endpoint[1:-2]) // SCHEDULERS_PER_ZONE]),
                state=ReplicaState.READY, epoch=epoch, slots=SLOTS, kv_cells=KV_CELLS,
            )
            for endpoint, found in self.fleet.items()
            for name, epoch in found.items()
        )  # fmt: skip
        snapshot = RoutingSnapshot("i", next(self._versions), revisions=(REVISION,), replicas=replicas)
        for router in self.routers:
            router.apply(snapshot)

    def _report(self, scheduler: Scheduler) -> None:
        if scheduler.is_dead:
            return
        report = scheduler.report()
        for router in self.routers:
            late_s = self.scenario.late_s + scheduler.delay_s[router.session]
            self.clock.after(late_s, self._deliver, router, scheduler, report)
        self.clock.after(self.scenario.report_s, self._report, scheduler)

    def _deliver(self, router: Router, scheduler: Scheduler, report: Report) -> None:
        if not scheduler.is_dead:
            router.on_load(scheduler.endpoint, report, 0.0)

    def _lose_zone(self) -> None:
        for scheduler in self.schedulers:
            if scheduler.zone == ZONES[-1]:
                scheduler.kill()
                for router in self.routers:
                    self.clock.after(NOTICED_S + 0.01 * router.number, router.lose, scheduler.endpoint)

    def _bring_back(self) -> None:
        for endpoint in [s.endpoint for s in self.schedulers if s.zone == ZONES[-1]]:
            self.fleet[endpoint] = {name: epoch + 1 for name, epoch in self.fleet[endpoint].items()}
            self._start(endpoint)
        self._publish()

    # The books

    def broken(self) -> list[str]:
        """What is lost, left over or counted twice now that nothing runs."""
        found = list(self.tally.broken)
        if self.tally.open:
            found.append(f"{len(self.tally.open)} calls never heard their end")
        for router in self.routers:
            left = {
                "requests": len(router.running),
                "attempts": len(router.owners),
                "in flight by routing": len(router.routing.loads.tokens),
                "silent": len(router.routing.silent),
                "admitted requests": router.admission.requests,
                "admitted tokens": router.admission.tokens,
                "admitted bytes": router.admission.input_bytes,
                "running by quota": sum(router.quotas.running(t) for t in TENANTS),
                "references": router.resources.references,
            }
            found += [f"Router {router.number}: {count} {what} left" for what, count in left.items() if count]
        for scheduler in self.schedulers:
            if not scheduler.is_dead:
                found += _left_in(scheduler)
        return found

    @property
    def drift(self) -> int:
        """How far what Routers count in flight is from what Schedulers have, by attempts; at rest it is 0."""
        counted = {token for router in self.routers for token in router.routing.loads.tokens}
        truth = {token for s in self.schedulers if not s.is_dead for token in s.ledger.attempts}
        return len(counted ^ truth)


def _left_in(scheduler: Scheduler) -> list[str]:
    ledger = scheduler.ledger
    left = {
        "attempts": len(ledger.attempts),
        "outputs": len(ledger.outputs),
        "waiting bytes": ledger.waiting_bytes,
        "attempts without an end": scheduler.dispatched - scheduler.told_ends,
    }
    for name, book in ledger.workers.items():
        left |= {
            f"active of {name}": book.active, f"waiting of {name}": book.waiting, f"staged of {name}": book.staged,
            f"shorts of {name}": book.shorts, f"KV cells of {name}": book.kv_cells_reserved,
            f"staged cells of {name}": book.staged_cells, f"queued of {name}": len(ledger.queues[name].waiting),
            f"tokens queued of {name}": ledger.queues[name].waiting.tokens,
            f"cells of the engine of {name}": scheduler.engines[name].cells,
        }  # fmt: skip
    return [f"Scheduler {scheduler.endpoint}: {count} {what} left" for what, count in left.items() if count]


class _Listener:
    """Counts what one engine alone ends, and keeps it busy."""

    def __init__(self) -> None:
        self.ended = 0

    def finished(self, engine: Engine, sequence: object) -> None:
        self.ended += 1

    def ignore(self, *_: object) -> None:
        return

    admitted = first_token = failed = responded = settled = ignore


@functools.cache
def capacity(kinds: tuple[Kind, ...]) -> float:
    """Requests a second that one engine can do of this mix, measured where it always has enough to do."""
    clock, listener = Clock(), _Listener()
    engine = Engine(clock, "replicas/alone", 1, listener)  # type: ignore[arg-type]
    traffic = Traffic(1, kinds)
    for number in range(1, 2_001):
        call = traffic.call(number, 0.0, TENANTS[number % len(TENANTS)])
        cells = min(call.prompt + call.max_tokens, CONTEXT)
        engine.submit(Sequence(number, call.prompt, call.output, cells))
    clock.run(100.0)
    before = listener.ended
    clock.run(400.0)
    assert not engine.is_empty
    return (listener.ended - before) / 300.0
