"""What the Router counts of its admission. Labels are bounded: bounds, priorities, models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import prometheus_client as prom

from headrace.control.priority import Priority
from headrace.control.router_admission import RouterAdmission


class AdmissionMetrics:
    """In the registry of a Router."""

    def __init__(self, registry: prom.CollectorRegistry) -> None:
        make: Any = {"namespace": "headrace", "subsystem": "router", "registry": registry}
        self._held = prom.Gauge("admission_held", "What requests that run have taken, by bound.", ["bound"], **make)
        self._limit = prom.Gauge(
            "admission_limit", "What they may take in all: the settings' limits.", ["bound"], **make
        )
        self._allowed = prom.Gauge(
            "admission_allowed", "What the usable replicas can hold now, over all revisions.", ["bound"], **make
        )
        self._refused = prom.Counter(
            "admission_refused_total", "Requests refused at once, by bound and priority.", ["bound", "priority"], **make
        )
        self._needed = prom.Gauge(
            "replicas_needed",
            "Replicas that the demand of the last minute needs at three quarters of what they serve; sum it over"
            " Routers, and round up.",
            ["model"],
            **make,
        )
        self._models: set[str] = set()
        self._lost = prom.Gauge(
            "failure_domains_lost_count", "Failure domains that went whole, over revisions.", **make
        )

    def refused(self, bound: str, priority: Priority) -> None:
        """A request was refused."""
        self._refused.labels(bound, priority.name.lower()).inc()

    def needed(self, replicas: Mapping[str, float]) -> None:
        """So many replicas are needed, by model."""
        for gone in self._models - replicas.keys():
            self._needed.remove(gone)
        self._models = set(replicas)
        for model, count in replicas.items():
            self._needed.labels(model).set(count)

    def take(self, core: RouterAdmission, now: float) -> None:
        """Read what is held and allowed."""
        requests, tokens = core.held()
        allowed_requests, allowed_tokens = core.allowed(now)
        for bound, held, limit in (
            ("requests", requests, core.requests_max),
            ("tokens", tokens, core.tokens_max),
            ("bytes", core.input_bytes + core.buffered_bytes, core.bytes_max),
        ):
            self._held.labels(bound).set(held)
            self._limit.labels(bound).set(limit)
        self._allowed.labels("requests").set(allowed_requests)
        self._allowed.labels("tokens").set(allowed_tokens)
        self._lost.set(core.shocks)
