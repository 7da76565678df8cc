"""Metrics of the control of overload, by revision. Read in the metrics server's thread: copies only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headrace.scheduler.relay import Relay

_PREFIX = "headrace_scheduler_"


def collect_overload(relay: Relay) -> Iterable[Any]:
    """All of them, as of now."""
    standing: Counter[str] = Counter()
    shed: Counter[str] = Counter()
    decreases: Counter[str] = Counter()
    for replica, worker in tuple(relay.overload.workers.items()):
        book = relay.ledger.workers.get(replica)
        if book is not None:
            standing[book.revision] += worker.age.is_standing
            shed[book.revision] += worker.shed
            decreases[book.revision] += worker.concurrency.decreases
    gauge = GaugeMetricFamily(
        f"{_PREFIX}queues_standing", "Workers whose queue stands: no wait is short.", labels=["revision"]
    )
    for revision, value in standing.items():
        gauge.add_metric([revision], value)
    yield gauge
    for name, text, counts in (
        ("attempts_shed", "Attempts of low priority shed from a queue that stands, by workers that serve.", shed),
        ("slow_windows", "Seconds in which steps of a worker took longer than their target.", decreases),
    ):
        counter = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["revision"])
        for revision, value in counts.items():
            counter.add_metric([revision], value)
        yield counter
