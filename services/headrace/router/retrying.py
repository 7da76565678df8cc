"""What the requests of one Router share for attempts beyond the first: budget, pauses, expectations, counts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import prometheus_client as prom
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempt_log import AttemptCause
from headrace.control.backoff import Retries, has_time_for
from headrace.control.request import RequestMachine
from headrace.control.retry_budget import WINDOW_S, Report, RetryBudget
from headrace.router.settings import RouterSettings


class Retrying:
    """See the module."""

    def __init__(self, settings: RouterSettings) -> None:
        self.budget = RetryBudget(settings.retry_share, settings.retry_floor)
        self.policy = Retries(self.budget, random.random)
        self.hedge_after_s = settings.hedge_after_s
        self.attempts: Counter[AttemptCause] = Counter()
        """Attempts made, by cause."""
        self.given_up: Counter[str] = Counter()
        """Attempts that were due and not made: "time" or "nobody"."""
        self.hedges: Counter[str] = Counter()
        """Requests with a hedge, by what became of it: "won" or "lost"."""
        self._waits: dict[str, tuple[float, float]] = {}
        """By replica: seconds that a request would wait for its slot, and when that was told."""
        self._pruned_at = 0.0
        self.balance = 0.0
        """Attempts beyond the first that may be made, when last looked at: metrics are read in another thread."""

    def on_load(self, endpoint: str, report: pb.LoadReport) -> None:
        """A Scheduler tells how busy its workers are, and how attempts go."""
        now = time.monotonic()
        if now - self._pruned_at > WINDOW_S:
            self._waits = {replica: told for replica, told in self._waits.items() if now - told[1] <= WINDOW_S}
            self._pruned_at = now
        self.budget.report(endpoint, Report(report.successes, report.extra_attempts, report.routers, now))
        for load in report.replicas:
            if load.HasField("queue_wait"):
                self._waits[load.replica] = load.queue_wait.ToMicroseconds() / 1e6, now
            else:
                self._waits.pop(load.replica, None)

    def tend(self) -> None:
        """Look at the budget; now and then."""
        self.balance = self.budget.balance(time.monotonic())

    def has_time(self, replica: str, remaining_s: float, now: float) -> bool:
        """Whether another attempt on `replica` may answer in the time that is left; counted where not."""
        wait_s, told_at = self._waits.get(replica, (0.0, now))
        has_time = has_time_for(remaining_s, wait_s if now - told_at <= WINDOW_S else None)
        self.given_up["time"] += not has_time
        return has_time

    def finished(self, machine: RequestMachine, now: float) -> None:
        """A request is over."""
        if not machine.attempted:
            return
        finish, last = machine.record.finish, machine.current
        is_ok = finish is not None and finish.is_ok
        if is_ok and last.cause is AttemptCause.FIRST:
            self.budget.succeeded(now)
        if any(one.cause is AttemptCause.HEDGE for one in machine.attempted):
            has_won = last.cause is AttemptCause.HEDGE and (is_ok or last.is_delivered)
            self.hedges["won" if has_won else "lost"] += 1


class RetryMetrics(Collector):
    """Reads a Retrying when metrics are scraped. Labels are bounded: causes and outcomes."""

    def __init__(self, registry: prom.CollectorRegistry, retrying: Retrying) -> None:
        self._retrying = retrying
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""
        retrying = self._retrying
        attempts = CounterMetricFamily("headrace_router_attempts", "Attempts made, by cause.", labels=["cause"])
        for cause in AttemptCause:
            attempts.add_metric([cause.name.lower()], retrying.attempts[cause])
        refused = CounterMetricFamily(
            "headrace_router_attempts_refused", "Attempts that were due and not made, by why.", labels=["why"]
        )
        refused.add_metric(["budget"], retrying.budget.refused)
        for why in ("time", "nobody"):
            refused.add_metric([why], retrying.given_up[why])
        hedges = CounterMetricFamily(
            "headrace_router_hedges", "Requests with a hedge, by what became of it.", labels=["outcome"]
        )
        for outcome in ("won", "lost"):
            hedges.add_metric([outcome], retrying.hedges[outcome])
        yield from (attempts, refused, hedges)
        yield GaugeMetricFamily(
            "headrace_router_retry_budget", "Attempts beyond the first that this Router may make now.", retrying.balance
        )
