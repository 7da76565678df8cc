"""What the Router counts. Labels are bounded: revisions of the snapshot, finish reasons, reasons of refusal."""

from __future__ import annotations

from typing import Any

import prometheus_client as prom

from headrace.control.errors import Reason
from headrace.control.holdings import Resource, ResourceLedger
from headrace.control.lifecycle import Finish
from headrace.router.links import SchedulerLink
from headrace.router.session import Session

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REFUSAL_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CANCEL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class RouterMetrics:
    """Metrics of one Router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = prom.CollectorRegistry()
        prom.ProcessCollector(registry=self.registry)
        make: Any = {"namespace": "headrace", "subsystem": "router", "registry": self.registry}
        self._finished = prom.Counter(
            "requests_finished_total",
            "Requests that were dispatched, by their end and its cause.",
            ["model", "finish_reason", "reason"],
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
        self._stopped = prom.Histogram(
            "cancel_to_stopped_seconds", "From asking for an end to the engine's stop.", buckets=_CANCEL_S, **make
        )
        self._freed = prom.Histogram(
            "cancel_to_freed_seconds", "From asking for an end to free slot and KV.", buckets=_CANCEL_S, **make
        )
        self._refusal = prom.Histogram(
            "refusal_seconds",
            "From a request's receipt to a status without any event, by reason.",
            ["reason"],
            buckets=_REFUSAL_S,
            **make,
        )
        self._held = prom.Gauge("resources_held", "References that requests hold, by resource.", ["resource"], **make)
        self._idempotency = prom.Counter(
            "idempotency_claims_total", "Calls with an idempotency key, by what was decided.", ["decision"], **make
        )
        self._elsewhere = prom.Counter(
            "elsewhere_total", "Calls about requests of other Routers, by their end.", ["call", "outcome"], **make
        )
        self.followers = prom.Gauge("followers", "Calls that write what another call has asked for.", **make)
        self.idempotency_keys = prom.Gauge(
            "idempotency_keys", "Keys that the store holds for this Router, by its own count.", **make
        )
        self.idempotency_writes_pending = prom.Gauge(
            "idempotency_writes_pending", "Records of keys that are still to be closed or deleted.", **make
        )
        self.detached = prom.Gauge("requests_detached", "Requests that run without a reader.", **make)
        self.kept_bytes = prom.Gauge("kept_event_bytes", "Events kept of requests that are over, bytes.", **make)
        self.tasks = prom.Gauge("tasks", "Tasks of the event loop.", **make)
        self.active = prom.Gauge("requests_active", "Requests that run now.", **make)
        self.snapshot_version = prom.Gauge("snapshot_version", "Version of the routing snapshot in use.", **make)
        self.snapshot_age = prom.Gauge("snapshot_age_seconds", "Time since the store was last heard.", **make)
        self.writes = 0
        self.wakeups = 0
        self.foreknown = 0
        self.late_messages = 0
        self.acknowledgements = 0
        self.resumes = 0
        self.overruns = 0
        self.relays_out = 0
        self.idempotency_writes_lost = 0
        self.frames_in = 0
        self.frames_out = 0
        self.inventory_lost = 0
        self.inventory_unknown = 0
        for name, text in (
            ("writes", "Events written to clients."),
            ("foreknown", "Requests refused without asking: all replicas had just said that such ones wait too long."),
            ("wakeups", "Wake-ups of request tasks."),
            ("relays_out", "Streams to other Routers, for calls with a key that is used here."),
            ("idempotency_writes_lost", "Records of keys that could not be closed or deleted; they expire."),
            ("frames_in", "Frames received from Schedulers."),
            ("frames_out", "Frames sent to Schedulers."),
            ("inventory_lost", "Attempts that were counted here and that their Scheduler did not have."),
            ("inventory_unknown", "Attempts that a Scheduler had and nobody here knew, cancelled."),
            ("acknowledgements", "Acknowledgements received from clients."),
            ("resumes", "Calls that resumed a request."),
            ("overruns", "Attempts that generated more than their credit."),
            ("late_messages", "Messages dropped because their attempt no longer counts."),
        ):
            gauge = prom.Gauge(f"{name}_count", text, **make)
            gauge.set_function(lambda name=name: float(getattr(self, name)))  # type: ignore[misc]

    def observe(self, method: str, outcome: str) -> None:
        """Count a finished call."""
        self._calls.labels(method, outcome).inc()

    def refused(self, reason: Reason, took_s: float) -> None:
        """Count a request that ends without any event."""
        self._refusal.labels(reason.value).observe(took_s)

    def idempotency(self, decision: str) -> None:
        """Count what a call with a key was told."""
        self._idempotency.labels(decision).inc()

    def elsewhere(self, call: str, outcome: str) -> None:
        """Count a call that another Router had to answer; outcome is OK or a Reason."""
        self._elsewhere.labels(call, outcome).inc()

    def take_links(self, links: list[SchedulerLink]) -> None:
        """Read the links' own counts."""
        self.frames_in = sum(link.frames_in for link in links)
        self.frames_out = sum(link.frames_out for link in links)
        self.inventory_lost = sum(link.inventory.lost for link in links)
        self.inventory_unknown = sum(link.inventory.unknown for link in links)
        self._attempts.set(sum(link.attempts for link in links))

    def take_resources(self, ledger: ResourceLedger) -> None:
        """Read what requests hold."""
        for resource in Resource:
            self._held.labels(resource.name.lower()).set(ledger.held[resource])

    def finished(self, session: Session) -> None:
        """Count a request that is over; once."""
        machine, model = session.machine, session.model
        record, usage = machine.record, session.usage()
        self.late_messages += machine.late
        self.overruns += machine.window.overrun > 0
        reason = record.reason.value if record.reason is not None else "NONE"
        self._finished.labels(model, (record.finish or Finish.FAILED).value, reason).inc()
        for count, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached_prompt", usage.cached_prompt_tokens),
            ("proposed", usage.proposed_tokens),
            ("generated", usage.generated_tokens),
            ("reasoning", usage.reasoning_tokens),
            ("sent", usage.sent_tokens),
            ("acknowledged", usage.acknowledged_tokens),
            ("dropped", machine.dropped),
        ):
            self._tokens.labels(model, count).inc(tokens)
        ttft_s, tpot_s = record.time_to_first_token_s(), record.time_per_output_token_s()
        if ttft_s is not None:
            self._ttft.labels(model).observe(ttft_s)
        if tpot_s is not None:
            self._tpot.labels(model).observe(tpot_s)
        if record.asked_at is not None and record.freed_at is not None:
            self._freed.observe(record.freed_at - record.asked_at)
            if record.stopped_at is not None:
                self._stopped.observe(max(0.0, record.stopped_at - record.asked_at))
