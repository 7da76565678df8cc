"""What is counted of routing. Labels are bounded: outcomes of decisions, states of health."""

from __future__ import annotations

import time
from collections.abc import Iterator

import prometheus_client as prom
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.control.routing import Routing

_AGE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class RoutingMetrics(Collector):
    """Observes the decisions of a Routing, and reads the rest of it when metrics are scraped."""

    def __init__(self, registry: prom.CollectorRegistry, routing: Routing) -> None:
        self._routing = routing
        self._decisions = prom.Counter(
            "headrace_router_route_decisions_total",
            "Choices of a replica, by what made them: load, prefix, affinity, last_resort; or refused.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("load", "prefix", "affinity", "last_resort", "refused"):
            self._decisions.labels(outcome)
        self._ages = prom.Histogram(
            "headrace_router_load_age_seconds",
            "Age of the chosen replica's load report; choices without any are not in it.",
            buckets=_AGE_S,
            registry=registry,
        )
        routing.observe = self._observe
        registry.register(self)

    def _observe(self, outcome: str, age_s: float | None) -> None:
        self._decisions.labels(outcome).inc()
        if age_s is not None:
            self._ages.observe(age_s)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""
        routing = self._routing
        out = GaugeMetricFamily(
            "headrace_router_replicas_out", "Replicas left out because they fail, by what they are.", labels=["health"]
        )
        for health, count in routing.outliers.out(time.monotonic()).items():
            out.add_metric([health.value], count)
        yield out
        ejections = CounterMetricFamily(
            "headrace_router_ejections", "Ejections, and those spared because too many were out.", labels=["outcome"]
        )
        ejections.add_metric(["ejected"], routing.outliers.ejections)
        ejections.add_metric(["spared"], routing.outliers.spared)
        yield ejections
        tokens = CounterMetricFamily(
            "headrace_router_prefix_tokens",
            "Prompt tokens of admitted attempts, and those that were kept.",
            labels=["count"],
        )
        tokens.add_metric(["prompt"], routing.prompt_tokens)
        tokens.add_metric(["kept"], routing.cached_tokens)
        yield tokens
        yield GaugeMetricFamily(
            "headrace_router_route_in_flight",
            "Attempts that the choice of a replica counts as in flight.",
            value=float(len(routing.loads.tokens)),
        )
        yield GaugeMetricFamily(
            "headrace_router_prefix_blocks", "Blocks of prompts remembered.", value=float(len(routing.prefixes))
        )
