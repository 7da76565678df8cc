"""What the Router counts. Labels are bounded: revisions of the snapshot, finish reasons, reasons of refusal."""

from __future__ import annotations

from typing import Any

import prometheus_client as prom

from headrace.api.inference.v1.inference_service_pb2 import Usage
from headrace.control.lifecycle import Finish, RequestRecord
from headrace.router.links import SchedulerLink

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class RouterMetrics:
    """Metrics of one Router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = prom.CollectorRegistry()
        prom.ProcessCollector(registry=self.registry)
        make: Any = {"namespace": "headrace", "subsystem": "router", "registry": self.registry}
        self._finished = prom.Counter(
            "requests_finished_total",
            "Requests that were dispatched, by their end.",
            ["model", "finish_reason"],
            **make,
        )
        self._calls = prom.Counter("calls_total", "Finished calls, by their outcome.", ["method", "outcome"], **make)
        self._attempts = prom.Gauge("attempts_in_flight", "Attempts that have not ended.", **make)
        self._tokens = prom.Counter(
            "tokens_total", "Tokens of finished requests, by which count.", ["model", "count"], **make
        )
        self._ttft = prom.Histogram(
            "time_to_first_token_seconds", "From receipt to the first output.", ["model"], buckets=_TTFT_S, **make
        )
        self._tpot = prom.Histogram(
            "time_per_output_token_seconds", "Mean gap between tokens of a request.", ["model"], buckets=_TPOT_S, **make
        )
        self.active = prom.Gauge("requests_active", "Requests that run now.", **make)
        self.snapshot_version = prom.Gauge("snapshot_version", "Version of the routing snapshot in use.", **make)
        self.snapshot_age = prom.Gauge("snapshot_age_seconds", "Time since the store was last heard.", **make)
        self.writes = 0
        self.wakeups = 0
        self.late_messages = 0
        self.frames_in = 0
        self.frames_out = 0
        for name, text in (
            ("writes", "Events written to clients."),
            ("wakeups", "Wake-ups of request tasks."),
            ("frames_in", "Frames received from Schedulers."),
            ("frames_out", "Frames sent to Schedulers."),
            ("late_messages", "Messages dropped because their attempt no longer counts."),
        ):
            gauge = prom.Gauge(f"{name}_count", text, **make)
            gauge.set_function(lambda name=name: float(getattr(self, name)))  # type: ignore[misc]

    def observe(self, method: str, outcome: str) -> None:
        """Count a finished call."""
        self._calls.labels(method, outcome).inc()

    def take_links(self, links: list[SchedulerLink]) -> None:
        """Read the links' own counts."""
        self.frames_in = sum(link.frames_in for link in links)
        self.frames_out = sum(link.frames_out for link in links)
        self._attempts.set(sum(link.attempts for link in links))

    def finished(self, model: str, record: RequestRecord, usage: Usage) -> None:
        """Count a request that is over."""
        self._finished.labels(model, (record.finish or Finish.FAILED).value).inc()
        self._tokens.labels(model, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(model, "generated").inc(usage.generated_tokens)
        self._tokens.labels(model, "sent").inc(record.sent_tokens)
        ttft_s, tpot_s = record.time_to_first_token_s(), record.time_per_output_token_s()
        if ttft_s is not None:
            self._ttft.labels(model).observe(ttft_s)
        if tpot_s is not None:
            self._tpot.labels(model).observe(tpot_s)
