"""What is counted of routing. Labels are bounded: outcomes of decisions, states of health."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

import prometheus_client as prom
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.control.routing import Routing

_AGE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, float("inf"))
_OUTCOMES = ("load", "prefix", "affinity", "last_resort", "refused")


class RoutingMetrics(Collector):
    """Observes the decisions of a Routing, and reads the rest of it when metrics are scraped.

    Decisions are counted in plain numbers: the library's own counters, with their labels and locks, would cost as much
    as the decision itself.
    """

    def __init__(self, registry: prom.CollectorRegistry, routing: Routing) -> None:
        self._routing = routing
        self._decisions = dict.fromkeys(_OUTCOMES, 0)
        self._ages = [0] * len(_AGE_S)
        self._age_sum_s = 0.0
        routing.observe = self._observe
        registry.register(self)

    def _observe(self, outcome: str, age_s: float | None) -> None:
        self._decisions[outcome] += 1
        if age_s is not None:
            self._ages[bisect_left(_AGE_S, age_s)] += 1
            self._age_sum_s += age_s

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """See prometheus_client."""
        decisions = CounterMetricFamily(
            "headrace_router_route_decisions",
            "Choices of a replica, by what made them: load, prefix, affinity, last_resort; or refused.",
            labels=["outcome"],
        )
        for outcome, count in self._decisions.items():
            decisions.add_metric([outcome], count)
        yield decisions
        ages = HistogramMetricFamily(
            "headrace_router_load_age_seconds",
            "Age of the chosen replica's load report; choices without any are not in it.",
        )
        buckets = zip(map(floatToGoString, _AGE_S), accumulate(self._ages), strict=True)
        ages.add_metric([], list(buckets), self._age_sum_s)
        yield ages
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
