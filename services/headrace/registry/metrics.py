"""What the Registry counts. Labels are bounded: methods and outcomes of the contract, reasons of relisting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import prometheus_client as prom
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.registry.publisher import Publisher
from headrace.runtime.membership import LeaseState, Membership

_PREFIX = "headrace_registry"


class RegistryMetrics:
    """Metrics of one Registry, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = prom.CollectorRegistry()
        prom.ProcessCollector(registry=self.registry)
        self._calls = prom.Counter(
            "calls_total",
            "Calls by method and outcome (OK or a reason).",
            ["method", "outcome"],
            namespace="headrace",
            subsystem="registry",
            registry=self.registry,
        )

    def observe_call(self, method: str, outcome: str) -> None:
        """Count a finished call."""
        self._calls.labels(method, outcome).inc()

    def follow(self, publisher: Publisher, membership: Membership) -> None:
        """Show the state of these at each scrape."""
        self.registry.register(_State(publisher, membership))


class _State(Collector):
    """Reads plain attributes; a scrape comes from another thread and must not touch the loop."""

    def __init__(
        self, publisher: Publisher, membership: Membership, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._publisher = publisher
        self._membership = membership
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        publisher, watch, now = self._publisher, self._publisher.state, self._clock()
        silence_s = now - watch.heard_at if watch.heard_at is not None else float("inf")
        held = self._membership.state is LeaseState.HELD
        gauges = (
            ("snapshot_version", "Version of the snapshot last seen as published.", publisher.version),
            ("is_leader", "1 while this Registry publishes.", publisher.is_leader),
            ("left_out", "Records that the snapshot leaves out; the log says why.", len(publisher.problems)),
            ("suspect_replicas", "Replicas kept though their records vanished together.", publisher.suspects),
            ("content_lost", "1 after the store was wiped, until something is registered.", publisher.content_lost),
            ("lease_held", "1 while this process can trust its lease.", held),
            ("store_fresh", "1 while the store was heard lately.", watch.is_fresh(now)),
            ("store_silence_seconds", "Time since the store was last heard.", silence_s),
            ("store_revision", "Revision of the store that was applied.", watch.revision),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=float(value))
        counters = (
            ("publishes", "Snapshots published.", publisher.published),
            ("publish_conflicts", "Publications refused because another one was first.", publisher.conflicts),
            ("publish_failures", "Publications that the store did not take.", publisher.failures),
            ("store_relists", "Listings after the first.", watch.relists),
            ("store_duplicates", "Events dropped because they were known.", watch.duplicates),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=float(value))
