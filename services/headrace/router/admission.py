"""The Router's admission: the shell around `headrace.control.router_admission`, which decides.

It reads what replicas there are from the routes, and how busy they are from the reports of load; it estimates what a
request takes, and remembers it until the request is over.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from typing import Any

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.control.capacity_plan import CapacityPlan
from headrace.control.errors import Failure, Reason
from headrace.control.outliers import Health
from headrace.control.priority import Priority
from headrace.control.router_admission import Demand, RouterAdmission
from headrace.router.admission_metrics import AdmissionMetrics
from headrace.router.demands import tokens_of
from headrace.router.plan import Plan
from headrace.router.routes import Routes
from headrace.router.session import Session
from headrace.router.settings import RouterSettings

BUFFER_BYTES_PER_TOKEN = 16
"""Of output that waits for its reader: text and id; as much again for each alternative with its logprob."""
NEEDED_S = 1.0
"""How often it is told how many replicas are needed."""
ROUTERS_S = 5.0
"""How often the number of Routers is taken over: the most that any Scheduler has told in this time."""


class Admission:
    """Of one Router. `tend` it a few times a second."""

    def __init__(self, settings: RouterSettings, routes: Routes, metrics: AdmissionMetrics) -> None:
        self.core = RouterAdmission(
            requests_max=settings.requests_max,
            tokens_max=settings.tokens_max,
            bytes_max=settings.held_bytes_max,
            random=random.random,
            doors=routes.routing.doors,
        )
        self._routes = routes
        self._metrics = metrics
        self._demands: dict[str, Demand] = {}
        """By request."""
        self._applied: tuple[Any, ...] = ()
        self._routers = 1
        self._routers_told = 1
        self._routers_at = 0.0
        self._needed_at = 0.0
        routes.load_listeners.append(self.on_load)

    def take(self, plan: Plan) -> Demand:
        """Take a request in, or refuse it.

        Raises:
            Failure: OVERLOADED.
        """
        demand = demand_of(plan)
        try:
            self.core.admit(demand, time.monotonic())
        except Failure as failure:
            self._metrics.refused(failure.metadata.get("bound", ""), demand.priority)
            raise
        return demand

    @property
    def routers(self) -> int:
        """Routers that share the fleet's limits, as Schedulers tell; 1 while that is not known."""
        return self._routers

    def keep(self, request: str, demand: Demand) -> None:
        """Remember what a request has taken."""
        self._demands[request] = demand

    def drop(self, demand: Demand) -> None:
        """Give back what `take` has taken for a request that is not started."""
        self.core.withdraw(demand, time.monotonic())

    def release(self, request: str) -> None:
        """A request is over: nothing of it is held in an engine. Again: nothing happens."""
        demand = self._demands.pop(request, None)
        if demand is not None:
            self.core.release(demand)

    def refuse_early(self, running: int, opening: int) -> None:
        """Refuse a call before anything of it is read, where as many run as ever may.

        Args:
            running: requests that run or are read.
            opening: calls that have not said yet what they want.

        Raises:
            Failure: OVERLOADED.
        """
        if running + opening >= self.core.requests_max:
            self._metrics.refused("requests", Priority.CRITICAL)
            raise Failure(
                Reason.OVERLOADED,
                f"This Router runs {running + opening} requests, its limit; try again shortly.",
                metadata={
                    "stage": "router",
                    "bound": "requests",
                    "limit": str(self.core.requests_max),
                    "current": str(running + opening),
                },
                retry_after_s=self.core.retry_s(),
            )

    def on_load(self, report: scheduler_pb2.LoadReport) -> None:
        """A Scheduler tells how busy its workers are."""
        self._routers_told = max(self._routers_told, report.routers)
        for load in report.replicas:
            self.core.report(
                load.replica,
                queue_wait_s=load.queue_wait.ToMicroseconds() / 1e6 if load.HasField("queue_wait") else None,
                waiting_max=load.waiting_max,
            )

    def tend(self, sessions: Iterable[Session]) -> None:
        """Look at what changed: replicas, links, Routers, bytes that are held for readers."""
        now = time.monotonic()
        if now - self._routers_at >= ROUTERS_S:
            self._routers, self._routers_told, self._routers_at = self._routers_told, 1, now
        self.refresh(now)
        self.core.buffered_bytes = sum(session.log.size for session in sessions if session.log is not None)
        self._metrics.take(self.core, now)
        if now - self._needed_at >= NEEDED_S:
            self._needed_at = now
            self._metrics.needed(self._needed(now))

    def _needed(self, now: float) -> dict[str, float]:
        """Replicas, by model, that what comes here needs."""
        snapshot, loads = self._routes.snapshot, self._routes.routing.loads
        needed: dict[str, float] = {}
        demands = self.core.demand(now)
        for revision in snapshot.revisions if snapshot is not None else ():
            habits = loads.habits(revision.name)
            slots = habits.slots / habits.replicas if habits.replicas else revision.execution.slots
            plan = CapacityPlan.of_slots(slots, habits.service_s)
            needed.setdefault(revision.model, 0.0)
            needed[revision.model] += plan.replicas(demands.get(revision.name, 0.0))
        return needed

    def refresh(self, now: float) -> None:
        """Take over which replicas can be used, if that has changed."""
        routes = self._routes
        snapshot = routes.snapshot
        if snapshot is None:
            return
        up = frozenset(link.endpoint for link in routes.links if link.is_up)
        outliers, excluded = routes.routing.outliers, routes.routing.rules.zones_excluded
        seen = (id(snapshot), snapshot.version, up, self._routers, outliers.ejections, *outliers.out(now).values())
        if seen == self._applied and not self.core.is_stale:
            return
        self._applied = seen
        revoked = snapshot.revocation_of
        self.core.apply(
            snapshot.revisions,
            snapshot.replicas_of,
            is_usable=lambda replica: (
                replica.endpoint in up
                and replica.name not in revoked
                and outliers.health(replica.name, now) is Health.CLOSED
                and replica.failure_domain.zone not in excluded
            ),
            routers=self._routers,
            now=now,
        )


def demand_of(plan: Plan) -> Demand:
    """What a request takes, as estimated: never more tokens than its revision's context holds."""
    generate = plan.generate
    size = generate.ByteSize()
    buffer = plan.window_tokens * BUFFER_BYTES_PER_TOKEN * (1 + generate.top_logprobs)
    budget = plan.budget
    return Demand(
        revision=plan.revision.name,
        priority=priority_of(generate),
        tokens=tokens_of(generate, plan.revision, plan.output_tokens_max),
        size=size + buffer,
        tenant=plan.caller.tenant.name,
        weight=plan.caller.tenant.weight,
        queue_s=math.inf if budget.queue_s is None else budget.queue_s,
        deadline_at=budget.deadline_at,
    )


def priority_of(generate: pb.GenerateRequest) -> Priority:
    """The priority in force."""
    return Priority(generate.priority) if generate.priority in _PRIORITIES else Priority.STANDARD


_PRIORITIES = frozenset(int(priority) for priority in Priority)
