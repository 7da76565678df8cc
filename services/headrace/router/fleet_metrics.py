"""How many replicas a Router sees, by model, zone and state: read from its snapshot when metrics are scraped.

At most models x zones x 6 series, however many replicas, requests and tenants there are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import prometheus_client as prom
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.control.outliers import Health
from headrace.control.resources import ReplicaState
from headrace.router.routes import Routes


class FleetMetrics(Collector):
    """In the registry of a Router."""

    def __init__(self, registry: prom.CollectorRegistry, routes: Routes) -> None:
        self._routes = routes
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        snapshot, outliers, now = self._routes.snapshot, self._routes.routing.outliers, time.monotonic()
        counts: Counter[tuple[str, str, str]] = Counter()
        for revision in snapshot.revisions if snapshot is not None else ():
            assert snapshot is not None
            for replica in snapshot.replicas_of[revision.name]:
                state = replica.state.value
                if replica.state is ReplicaState.READY and outliers.is_any_out:
                    health = outliers.health(replica.name, now)
                    state = state if health is Health.CLOSED else health.value
                counts[revision.model, replica.failure_domain.zone, state] += 1
        found = GaugeMetricFamily(
            "headrace_router_replicas",
            "Replicas of the snapshot, by state; those that are ready may be ejected or half-open here.",
            labels=["model", "zone", "state"],
        )
        for labels, count in counts.items():
            found.add_metric(labels, count)
        yield found
