"""A Router: the production's quotas, admission, routing, retries and requests, and the shell around them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.control.attempt_book import Cause, Dispatched
from headrace.control.backoff import Retries, has_time_for
from headrace.control.errors import Failure, Reason
from headrace.control.filters import Demand as RoutingDemand
from headrace.control.holdings import ResourceLedger
from headrace.control.known_waits import KnownWaits
from headrace.control.lifecycle import Finish
from headrace.control.load_view import ReplicaReport
from headrace.control.outliers import Health
from headrace.control.placement import no_replica
from headrace.control.priority import Priority
from headrace.control.quota import Quotas
from headrace.control.resources import Replica
from headrace.control.retry_budget import Report as BudgetReport
from headrace.control.retry_budget import RetryBudget
from headrace.control.router_admission import RouterAdmission
from headrace.control.routing import Routing
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.steps import AttemptEnd
from headrace.control.tenants import Tenant
from sim_load.clock import Clock
from sim_load.engine import REVISION
from sim_load.policies import Choose
from sim_load.request import Request
from sim_load.scheduler import Report, Scheduler
from sim_load.traffic import Call

if TYPE_CHECKING:
    from sim_load.clients import Caller

TEND_S = 0.2
REQUESTS_MAX = 1_024
"""The setting's default."""
BYTES_MAX = 512 * 1024 * 1024


@dataclass(slots=True)
class Link:
    """To one Scheduler."""

    scheduler: Scheduler
    delay_s: float
    is_up: bool = True


class Router:
    """See the module.

    Args:
        clock: the time.
        number: which one it is, from 0.
        routers: how many there are.
        rng: its source of chance.
        tokens: numbers of attempts, of the whole world.
        attempts_max: attempts of one request.
        queue_s: `queue_timeout_s`.
        ttft_s: `ttft_target_s`.
        choose: a policy to compare with; None: the production's.
    """

    def __init__(
        self,
        clock: Clock,
        number: int,
        routers: int,
        rng: random.Random,
        tokens: Iterator[int],
        *,
        attempts_max: int,
        queue_s: float,
        ttft_s: float,
        choose: Choose | None,
    ) -> None:
        self.clock = clock
        self.number = number
        self.session = number + 1
        self.routers = routers
        self.rng = rng
        self.attempts_max = attempts_max
        self.queue_s = queue_s
        self.ttft_s = ttft_s
        self.routing = Routing()
        self.quotas = Quotas()
        self.admission = RouterAdmission(
            requests_max=REQUESTS_MAX, bytes_max=BYTES_MAX, random=rng.random, doors=self.routing.doors
        )
        self.known_waits = KnownWaits()
        self.budget = RetryBudget()
        self.retries = Retries(self.budget, rng.random)
        self.resources = ResourceLedger()
        self.snapshot: RoutingSnapshot | None = None
        self.links: dict[str, Link] = {}
        self.owners: dict[int, Request] = {}
        """By attempt in flight."""
        self.running: set[Request] = set()
        self.attempts = 0
        """Sent to Schedulers."""
        self.tokens = tokens
        self._choose = choose
        self._waits: dict[str, tuple[float, float]] = {}
        self._seen: tuple[object, ...] = ()

    # What there is

    def apply(self, snapshot: RoutingSnapshot) -> None:
        """Use it from now on."""
        self.snapshot = snapshot
        self.routing.apply(snapshot, self.clock.now)
        self.refresh()

    def connect(self, scheduler: Scheduler, delay_s: float) -> None:
        """A link is up."""
        scheduler.routers[self.session] = self
        scheduler.delay_s[self.session] = delay_s
        self.links[scheduler.endpoint] = Link(scheduler, delay_s)
        self.refresh()

    def lose(self, endpoint: str) -> None:
        """A link broke: what was sent there is lost."""
        link = self.links[endpoint]
        link.is_up = False
        lost = [t for t, owner in self.owners.items() if owner.where[t] is link.scheduler]
        for token in lost:
            owner = self.owners.pop(token)
            self.routing.ended(token, Reason.WORKER_LOST_BEFORE_OUTPUT, self.clock.now)
            owner.on_lost(token)
        self.refresh()

    def tend(self) -> None:
        """A few times a second."""
        self.refresh()
        self.clock.after(TEND_S, self.tend)

    def refresh(self) -> None:
        """Let admission know which replicas can be used, if that has changed; as headrace.router.admission does."""
        if self.snapshot is None:
            return
        now, outliers = self.clock.now, self.routing.outliers
        up = frozenset(endpoint for endpoint, link in self.links.items() if link.is_up)
        seen = (self.snapshot.version, up, outliers.ejections, *outliers.out(now).values())
        if seen == self._seen and not self.admission.is_stale:
            return
        self._seen = seen
        self.admission.apply(
            self.snapshot.revisions,
            self.snapshot.replicas_of,
            is_usable=lambda r: r.endpoint in up and outliers.health(r.name, now) is Health.CLOSED,
            routers=self.routers,
            now=now,
        )

    def on_load(self, endpoint: str, report: Report, age_s: float) -> None:
        """A Scheduler's report has come."""
        link = self.links.get(endpoint)
        if link is None or not link.is_up or link.scheduler.is_dead:
            return
        now = self.clock.now
        self.budget.report(endpoint, BudgetReport(report.successes, report.extra_attempts, report.routers, now))
        for name, load in report.loads.items():
            lowest = int(load.admits_from) if load.admits_from > Priority.SHEDDABLE else 0
            told = ReplicaReport(
                load.active,
                load.waiting,
                load.slots,
                load.kv_cells_reserved,
                load.kv_cells,
                load.queue_wait_s,
                load.concurrency_limit,
                lowest,
                float(load.prefill_tokens_per_s),
                load.room,
                load.closed,
            )
            self.routing.report(name, told, now, age_s)
            self.admission.report(name, queue_wait_s=load.queue_wait_s, waiting_max=load.waiting_max)
            self._waits[name] = load.queue_wait_s, now

    # Requests

    def ask(self, call: Call, tenant: Tenant, caller: Caller) -> None:
        """A call arrives; the caller hears what becomes of it."""
        request = Request(self, call, tenant, caller)
        try:
            request.open()
        except Failure as failure:
            caller.refused(request, failure)

    def place(self, request: Request, tried: list[str]) -> Replica:
        """Choose where the next attempt runs.

        Raises:
            Failure: nobody can take it.
        """
        snapshot, now = self.snapshot, self.clock.now
        assert snapshot is not None
        revision = snapshot.revision_by_name[REVISION.name]
        if self._choose is None:
            return self.routing.choose(
                snapshot,
                revision,
                request.demand,
                tried=tried,
                failed=self.routing.loads.domains(tried),
                reachable=self.is_reachable,
                random=self.rng.random,
                now=now,
            )
        found = [r for r in snapshot.ready_of[REVISION.name] if r.name not in tried and self.is_reachable(r.endpoint)]
        if not found:
            raise no_replica(snapshot, revision)
        return self._choose(found, self._in_flight, self.rng.random)

    def is_reachable(self, endpoint: str) -> bool:
        """Whether its link is up."""
        link = self.links.get(endpoint)
        return link is not None and link.is_up

    def _in_flight(self, replica: str) -> int:
        standing = self.routing.loads.standing(replica)
        return len(standing.tokens) if standing is not None else 0

    def has_time(self, replica: str, remaining_s: float) -> bool:
        """As headrace.router.retrying."""
        wait_s, _ = self._waits.get(replica, (0.0, 0.0))
        return has_time_for(remaining_s, wait_s)

    # Attempts

    def send(self, wanted: Dispatched, owner: Request, demand: RoutingDemand, put: Callable[[Scheduler], None]) -> None:
        """Send an attempt to its Scheduler."""
        now = self.clock.now
        replica = self._replica(wanted.replica)
        link = self.links[replica.endpoint]
        self.attempts += 1
        self.owners[wanted.token] = owner
        owner.where[wanted.token] = link.scheduler
        self.routing.dispatched(wanted.token, wanted.replica, wanted.epoch, wanted.revision, demand, now)
        self.clock.after(link.delay_s, put, link.scheduler)

    def cancel(self, token: int, finish: Finish) -> None:
        """Ask for the end of an attempt."""
        owner = self.owners.get(token)
        if owner is not None:
            scheduler = owner.where[token]
            cause = Cause.DEADLINE_EXCEEDED if finish is Finish.DEADLINE_EXCEEDED else Cause.CANCELLED
            delay_s = self.links[scheduler.endpoint].delay_s
            self.clock.after(delay_s, scheduler.cancel, token, self.session, cause)

    def _replica(self, name: str) -> Replica:
        """By name."""
        standing = self.routing.loads.standing(name)
        assert standing is not None
        assert standing.replica is not None
        return standing.replica

    def on_admitted(self, token: int, version: int, prompt: int, cached: int) -> None:
        owner = self.owners.get(token)
        if owner is not None:
            self.routing.admitted(token, prompt, cached, self.clock.now)
            owner.on_admitted(token, version, cached)

    def on_output(self, token: int, tokens: int) -> None:
        owner = self.owners.get(token)
        if owner is not None:
            self.routing.first_output(token, self.clock.now)
            owner.on_output(token, tokens)

    def on_ended(self, token: int, version: int, end: AttemptEnd, failure: Failure | None) -> None:
        owner = self.owners.pop(token, None)
        if owner is not None:
            if failure is not None and failure.metadata.get("stage") in ("wait", "firstToken", "end"):
                owner.too_long.append((token, failure))
            self.routing.ended(token, end.reason, self.clock.now)
            owner.on_ended(token, version, end)
