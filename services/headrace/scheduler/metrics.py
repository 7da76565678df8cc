"""What the Scheduler counts, read when it is scraped: the hot path only adds to plain integers.

Labels are bounded: revisions that run here, states of a worker, finish reasons, reasons of errors. No id of a request,
attempt or replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headrace.control.worker_lifecycle import WorkerState
from headrace.runtime.membership import LeaseState
from headrace.scheduler.fleet import Fleet
from headrace.scheduler.overload_metrics import collect_overload
from headrace.scheduler.queue_metrics import collect_queues
from headrace.scheduler.relay import Relay
from headrace.scheduler.vitals import Vitals

_PREFIX = "headrace_scheduler_"


class SchedulerCollector(Collector):
    """Collects from the live objects of one Scheduler."""

    def __init__(self, relay: Relay, fleet: Fleet, vitals: Vitals) -> None:
        self._relay = relay
        self._fleet = fleet
        self._vitals = vitals

    def collect(self) -> Iterable[Any]:
        """All metrics, as of now. Runs in the metrics server's thread: it reads copies, and locks nothing."""
        yield from self._attempts()
        yield from collect_queues(self._relay)
        yield from collect_overload(self._relay)
        yield from self._traffic()
        yield from self._kv()
        yield from self._workers()
        yield from self._health()

    def _attempts(self) -> Iterable[Any]:
        ledger, counts = self._relay.ledger, self._relay.counts
        ended = CounterMetricFamily(
            f"{_PREFIX}attempts_ended",
            "Attempts that ended, by finish reason and by the reason of the error (NONE: no error).",
            labels=["finish_reason", "reason"],
        )
        for names, value in tuple(counts.outcomes.items()):
            ended.add_metric(names, value)
        yield ended
        books = tuple(ledger.workers.values())
        for name, text in (
            ("active", "Attempts that hold a slot."),
            ("waiting", "Attempts that wait for a slot."),
            ("preempted", "Attempts whose slot and KV the engine took back for a while."),
        ):
            gauge = GaugeMetricFamily(f"{_PREFIX}attempts_{name}", text, labels=["revision"])
            totals: Counter[str] = Counter()
            for book in books:
                totals[book.revision] += getattr(book, name)
            for revision, value in totals.items():
                gauge.add_metric([revision], value)
            yield gauge
        yield from self._cancels()
        yield from self._dropped()

    def _cancels(self) -> Iterable[Any]:
        counts, kept = self._relay.ledger.counts, self._relay.counts
        yield _counter("cancels", "Attempts that were told to end.", counts.cancels_asked)
        yield _counter("cancels_confirmed", "Of them, those whose end the engine confirmed.", counts.cancels_confirmed)
        yield HistogramMetricFamily(
            f"{_PREFIX}cancel_to_confirmed_seconds",
            "From the moment that an attempt was told to end to the engine's confirmation that slot and KV are free.",
            buckets=kept.cancel_to_confirmed.buckets(),
            sum_value=kept.cancel_to_confirmed.sum_s,
        )
        yield _counter("engines_hung", "Engines given up because they did not confirm a cancel.", kept.hung)
        yield _counter("preemptions", "Times that an engine took slot and KV back from an attempt.", counts.preemptions)
        yield _counter("resumptions", "Times that it gave them again.", counts.resumptions)

    def _dropped(self) -> Iterable[Any]:
        counts = self._relay.ledger.counts
        yield _counter("attempts_repeated", "Dispatches dropped as repetitions.", counts.duplicates)
        yield _counter("cancels_repeated", "Cancels dropped as repetitions.", counts.duplicate_cancels)
        yield _counter("stale_credits", "Credits dropped: not higher than the last one.", counts.stale_credits)
        yield _counter("stale_incarnation", "Messages of a run of an engine that is over.", counts.stale_incarnation)
        yield _counter("late_messages", "Messages about attempts that were over, dropped.", counts.late)

    def _traffic(self) -> Iterable[Any]:
        counts = self._relay.counts
        frames_out, wakeups = self._relay.totals()
        yield _counter("engine_messages", "Responses read from engines' event streams.", counts.messages)
        yield _counter("engine_steps", "Engine steps in them.", counts.steps)
        yield _counter("tokens", "Tokens in them.", counts.tokens)
        yield _counter("tokens_dropped", "Tokens whose attempt had no owner any more.", counts.dropped_tokens)
        yield _counter("frames_received", "Frames from Routers.", counts.frames_in)
        yield _counter("frames_written", "Frames to Routers.", frames_out)
        yield _counter("writer_wakeups", "Wake-ups of the sessions' writers.", wakeups)
        yield GaugeMetricFamily(f"{_PREFIX}sessions", "Router sessions.", value=len(self._relay.sessions))

    def _kv(self) -> Iterable[Any]:
        kv = self._relay.kv
        for name, text, totals in (
            ("kv_tokens_stored", "Tokens that the engines' prefix caches stored.", kv.stored),
            ("kv_tokens_removed", "Those of them that were removed again, to make room.", kv.removed),
            ("kv_events_lost", "Messages of the engines about their prefix caches that did not come.", kv.lost),
        ):
            counter = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["revision"])
            for revision, value in tuple(totals.items()):
                counter.add_metric([revision], value)
            yield counter

    def _workers(self) -> Iterable[Any]:
        workers = tuple(self._fleet.workers.values())
        states = GaugeMetricFamily(f"{_PREFIX}workers", "Workers, by state.", labels=["revision", "state"])
        restarts = CounterMetricFamily(f"{_PREFIX}worker_restarts", "Restarts of workers.", labels=["revision"])
        totals = Counter(self._fleet.restarts)
        for worker in workers:
            totals[worker.revision] += worker.life.restarts
            for state in WorkerState:
                states.add_metric([worker.revision, state.value], float(worker.life.state is state))
        for revision, value in totals.items():
            restarts.add_metric([revision], value)
        yield states
        yield restarts

    def _health(self) -> Iterable[Any]:
        workers = tuple(self._fleet.workers.values())
        counts, lease = self._relay.counts, self._vitals.lease
        for name, text in (
            ("started", "Workers whose first start is over."),
            ("alive", "Workers that no failure or silence of their engine speaks against."),
            ("ready", "Workers that take attempts."),
        ):
            value = sum(getattr(worker.signals, name) for worker in workers)
            yield GaugeMetricFamily(f"{_PREFIX}workers_{name}", text, value=value)
        looping = sum(w.life.is_crash_loop and not w.life.takes_attempts for w in workers)
        yield GaugeMetricFamily(f"{_PREFIX}workers_crash_loop", "Workers that keep failing.", value=looping)
        memory = sum(worker.memory_bytes() for worker in workers)
        yield GaugeMetricFamily(f"{_PREFIX}workers_memory_bytes", "Memory that workers hold for good.", value=memory)
        yield _counter("orphans_cancelled", "Sequences that ran in an engine for no attempt.", counts.orphans)
        yield _counter("attempts_unknown", "Attempts ended because their engine did not know them.", counts.unknown)
        yield GaugeMetricFamily(
            f"{_PREFIX}lease_age_seconds", "Time since the store renewed this process's lease.", value=lease.age_s
        )
        held = float(lease.state is LeaseState.HELD)
        yield GaugeMetricFamily(f"{_PREFIX}lease_held", "Whether that lease may be trusted.", value=held)


def make_registry(relay: Relay, fleet: Fleet, vitals: Vitals) -> prometheus_client.CollectorRegistry:
    """A registry with everything that a Scheduler exports."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    registry.register(SchedulerCollector(relay, fleet, vitals))
    return registry


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{_PREFIX}{name}", text, value=value)
