"""What the Router counts by tenant: for the busiest ones by name, for all others together. Labels are bounded."""

from __future__ import annotations

import contextlib
from typing import Any

import prometheus_client as prom

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.quota import Quota
from headrace.control.top_labels import TopLabels

_TOKENS = ("prompt", "generated")


class TenantMetrics:
    """In the registry of a Router.

    Args:
        registry: of the Router.
        labels_max: tenants with series of their own.
    """

    def __init__(self, registry: prom.CollectorRegistry, labels_max: int) -> None:
        make: Any = {"namespace": "headrace", "subsystem": "router", "registry": registry}
        self._labels = TopLabels(labels_max)
        self._finished = prom.Counter("tenant_requests_total", "Requests that are over, by tenant.", ["tenant"], **make)
        self._tokens = prom.Counter(
            "tenant_tokens_total",
            "Tokens of requests that are over, by tenant and which count.",
            ["tenant", "count"],
            **make,
        )
        self._running = prom.Gauge(
            "tenant_requests_running", "Requests that count towards their tenants' limits of concurrency.", **make
        )
        self._refused = prom.Counter(
            "tenant_refused_total", "Requests refused by a tenant's own limit, by which.", ["tenant", "quota"], **make
        )

    def finished(self, tenant: str, usage: pb.Usage) -> None:
        """Count a request that is over."""
        label = self._labels.label(tenant)
        self._finished.labels(label).inc()
        for count, tokens in zip(_TOKENS, (usage.prompt_tokens, usage.generated_tokens), strict=True):
            self._tokens.labels(label, count).inc(tokens)

    def running(self, requests: int) -> None:
        """Tell how many run, of all tenants."""
        self._running.set(requests)

    def refused(self, tenant: str, quota: str) -> None:
        """Count a refusal."""
        self._refused.labels(self._labels.label(tenant), quota).inc()

    def rotate(self) -> None:
        """Choose anew who is busiest, and drop the series of those who are not any more."""
        for tenant in self._labels.rotate():
            series: list[tuple[prom.Counter, tuple[str, ...]]] = [(self._finished, (tenant,))]
            series += [(self._tokens, (tenant, count)) for count in _TOKENS]
            series += [(self._refused, (tenant, quota.value)) for quota in Quota]
            for counter, labels in series:
                with contextlib.suppress(KeyError):
                    counter.remove(*labels)
