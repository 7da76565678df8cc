"""What operators size a fleet by; and the worked example "label cardinality" of the design."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import prometheus_client as prom

from headrace.control.errors import Reason
from headrace.control.filters import Demand
from headrace.control.outliers import EjectionRules
from headrace.control.resources import Engine, Execution, FailureDomain, Replica, ReplicaState, Revision
from headrace.control.routing import Routing, RoutingRules
from headrace.control.snapshot import RoutingSnapshot
from headrace.router.fleet_metrics import FleetMetrics
from headrace.router.routes import Routes
from router.harness import REVISION, collect, failure, running, until

MODELS = [Revision(f"model-{n}", "", "", Execution(Engine.SYNTHETIC, 64, 4, 256)) for n in range(20)]
ZONES = ("east", "north", "west")
NEEDED = "headrace_router_replicas_needed"


def fleet(of_each: int) -> RoutingSnapshot:
    """So many replicas of each model in each zone and state, and as many ready ones to be ejected or half open."""
    states = [*ReplicaState, ReplicaState.READY, ReplicaState.READY]
    kinds = itertools.product(MODELS, ZONES, enumerate(states), range(of_each))
    replicas = tuple(
        Replica(f"replicas/r{of_each}-{at}", revision.name, "schedulers/s", "s:1", state, 1, 4, 256,
                FailureDomain(zone=zone), detail=str(kind))
        for at, (revision, zone, (kind, state), _) in enumerate(kinds)
    )  # fmt: skip
    return RoutingSnapshot("i", 1, revisions=tuple(MODELS), replicas=replicas)


def series(registry: prom.CollectorRegistry) -> dict[tuple[str, ...], float]:
    (family,) = registry.collect()
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


async def test_20_models_3_zones_and_6_states_are_360_series_whatever_the_number_of_requests() -> None:
    routing = Routing(RoutingRules(ejection=EjectionRules(share_max=1.0)))
    routes, registry = Routes(router="routers/r", incarnation="i", routing=routing), prom.CollectorRegistry()
    FleetMetrics(registry, routes)
    assert series(registry) == {}
    for of_each in (1, 5):
        snapshot = routes.snapshot = fleet(of_each)
        routing.apply(snapshot, 0.0)
        outliers = routing.outliers
        for replica in snapshot.replicas:
            if replica.detail in ("4", "5"):
                # Long ago: by now its time is over. Or as late as can be: it is out.
                for at in range(3):
                    outliers.faulted(replica.revision, replica.name, 0, at if replica.detail == "4" else 1e15 + at)
        found = series(registry)
        assert len(found) == 20 * 3 * 6 == 360
        assert set(found.values()) == {of_each}
        assert {state for _, _, state in found} == {"loading", "ready", "draining", "failed", "ejected", "half-open"}
        for number in range(2000):
            chosen = routing.choose(
                snapshot, MODELS[number % 20], Demand(affinity=number), reachable=lambda endpoint: True,
                random=lambda: 0.5, now=1e6,
            )  # fmt: skip
            routing.dispatched(number, chosen.name, 1, chosen.revision, Demand(), 1e6)
            routing.ended(number, Reason.OVERLOADED, 1e6)
        assert series(registry).keys() == found.keys()


async def test_what_comes_says_how_many_replicas_it_needs_refused_or_not() -> None:
    async with running(requests_max=1) as h:

        def needed(**labels: str) -> Any:
            return h.metrics.registry.get_sample_value(NEEDED, labels or {"model": REVISION.model})

        await until(lambda: needed() == 0)
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.dispatched()
        for _ in range(5):
            assert failure((await collect(h.generate()))[1]).reason is Reason.OVERLOADED
        # 4 slots of 2 s each, until something was measured: 120 requests a minute, to be used at three quarters.
        before = h.routes.routing.loads.habits(REVISION.name).service_s
        assert before == 2.0
        await until(lambda: needed() > 0)
        assert needed() * 90 in (1, 2, 3, 4, 5, 6)
        await h.scheduler.end(dispatch.attempt)
        await answer
        snapshot = h.routes.snapshot
        assert snapshot is not None
        other = replace(REVISION, model="other")
        h.routes.apply(replace(snapshot, version=snapshot.version + 1, revisions=(other,), replicas=(), aliases=()))
        await until(lambda: needed() is None and needed(model="other") == 0)
