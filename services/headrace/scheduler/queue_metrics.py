"""Metrics of what waits in a Scheduler: each bound with its use, each refusal by its stage, waits by priority.

Labels are bounded: revisions that run here, four priorities, stages of the queue. Read in the metrics server's thread:
copies only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from headrace.control.priority import Priority
from headrace.control.worker_queue import WorkerQueue
from headrace.scheduler.relay import Relay
from headrace.scheduler.session import WAITING_BYTES_MAX, WAITING_TOKENS_MAX

_PREFIX = "headrace_scheduler_"


def collect_queues(relay: Relay) -> Iterable[Any]:
    """All metrics of the queues, as of now."""
    queues = tuple(relay.ledger.queues.values())
    yield from _by_priority(relay, queues)
    gauges: tuple[tuple[str, str, Callable[[WorkerQueue], int]], ...] = (
        ("queue_attempts_max", "Attempts that may wait.", lambda q: q.requests_max),
        ("queue_tokens", "KV cells that the attempts waiting in the Scheduler will need.", lambda q: q.waiting.tokens),
        ("queue_tokens_max", "KV cells that they may need.", lambda q: q.tokens_max),
        ("attempts_staged", "Attempts that an engine has and has not begun with.", lambda q: q.book.staged),
        ("concurrency_limit", "Attempts that the engines may run at a time.", lambda q: q.limit),
        ("slots", "Slots of the engines.", lambda q: q.book.slots),
        ("kv_cells_reserved", "KV cells that active attempts hold.", lambda q: q.book.kv_cells_reserved),
        ("kv_cells", "KV cells of the engines.", lambda q: q.book.kv_cells),
    )
    for name, text, read in gauges:
        gauge = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["revision"])
        totals: Counter[str] = Counter()
        for queue in queues:
            totals[queue.book.revision] += read(queue)
        for revision, value in totals.items():
            gauge.add_metric([revision], value)
        yield gauge
    ledger = relay.ledger
    text = "Input in bytes of the attempts that no engine has begun with."
    yield GaugeMetricFamily(f"{_PREFIX}queue_bytes", text, value=ledger.waiting_bytes)
    text = "Input in bytes that may wait."
    yield GaugeMetricFamily(f"{_PREFIX}queue_bytes_max", text, value=ledger.settings.bytes_max)
    refused = CounterMetricFamily(
        f"{_PREFIX}attempts_refused",
        "Attempts refused on arrival or ended in the queue, by reason and by the stage that the refusal names.",
        labels=["reason", "stage"],
    )
    for names, value in tuple(ledger.counts.refused.items()):
        refused.add_metric(names, value)
    yield refused
    yield from _send_buffers(relay)


def _send_buffers(relay: Relay) -> Iterable[Any]:
    """Output that waits for Routers; a session that has more than may wait is ended, SLOW_CONSUMER."""
    sessions = tuple(relay.sessions.values())
    for name, text, value in (
        (
            "send_buffer_tokens",
            "Most output tokens that wait for one Router.",
            _most(s.waiting_tokens for s in sessions),
        ),
        ("send_buffer_tokens_max", "Output tokens that may wait for one Router.", WAITING_TOKENS_MAX),
        ("send_buffer_bytes", "Most bytes of text that wait for one Router.", _most(s.waiting_bytes for s in sessions)),
        ("send_buffer_bytes_max", "Bytes of text that may wait for one Router.", WAITING_BYTES_MAX),
    ):
        yield GaugeMetricFamily(f"{_PREFIX}{name}", text, value=value)
    text = "Sessions ended because more output waited for them than may."
    yield CounterMetricFamily(f"{_PREFIX}send_buffer_overflows", text, value=relay.counts.overflows)


def _most(values: Iterable[int]) -> int:
    return max(values, default=0)


def _by_priority(relay: Relay, queues: Iterable[WorkerQueue]) -> Iterable[Any]:
    waiting = GaugeMetricFamily(
        f"{_PREFIX}queue_attempts", "Attempts that wait in the Scheduler, by priority.", labels=["priority"]
    )
    wait = HistogramMetricFamily(
        f"{_PREFIX}queue_wait_seconds",
        "From a dispatch's arrival to the engine's admission, by priority.",
        labels=["priority"],
    )
    lowest = GaugeMetricFamily(
        f"{_PREFIX}refusing_workers", "Workers that refuse this priority at present.", labels=["priority"]
    )
    found: Counter[Priority] = Counter()
    for queue in queues:
        found.update(queue.waiting.waiting)
    for priority in Priority:
        name = priority.name.lower()
        waiting.add_metric([name], found[priority])
        lowest.add_metric([name], sum(queue.book.admits_from > priority for queue in queues))
        kept = relay.counts.queue_wait[priority]
        wait.add_metric([name], buckets=kept.buckets(), sum_value=kept.sum_s)
    yield waiting
    yield lowest
    yield wait
