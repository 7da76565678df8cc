"""What is fixed for a request before its first attempt, and the choice of a replica for each."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.adapters.tenant_codec import PRIORITIES
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.credit import WINDOW_MIN
from headrace.control.deadlines import Budget, longest_wait_s
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.event_log import Retention
from headrace.control.filters import NO_DEMAND, Demand
from headrace.control.guided import check_guided
from headrace.control.placement import check_not_revoked, resolve_revision
from headrace.control.priority import Priority
from headrace.control.request import Terms
from headrace.control.resources import Replica, Revision
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.tenants import check_model, check_output
from headrace.control.validation import RequestLimits
from headrace.router.codec import (
    Efforts,
    check_request,
    complete_request,
    guided_kind,
    output_tokens_allowed,
    priority_asked,
    resolve_efforts,
)
from headrace.router.demands import demand_of
from headrace.router.identity import NOBODY, Caller
from headrace.router.links import SchedulerLink
from headrace.router.routes import Routes
from headrace.router.settings import RouterSettings


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, checked, completed and pinned."""

    snapshot: RoutingSnapshot
    revision: Revision
    efforts: Efforts
    generate: pb.GenerateRequest
    output_tokens_max: int
    budget: Budget
    terms: Terms
    window_tokens: int
    retention: Retention | None
    """How long its events can be resumed; None: they cannot."""
    is_shared: bool = False
    """Whether it has an idempotency key: other calls may come to read it, so no reader's slowness ends it."""
    make_demand: Callable[[], Demand] = lambda: NO_DEMAND
    """See `demand`: for a long prompt it costs more than all else, so a request that is refused goes without."""
    caller: Caller = NOBODY
    """Whose it is."""

    @property
    def demand(self) -> Demand:
        """What it asks of a replica; made when it is first needed."""
        return self.make_demand()

    @property
    def priority(self) -> Priority:
        """The priority in force, at most the tenant's ceiling."""
        return Priority(self.generate.priority)


class Planner:
    """Turns requests into plans, and plans into attempts.

    Raises:
        Failure: from both methods: why a request cannot be served.
    """

    def __init__(self, settings: RouterSettings, routes: Routes) -> None:
        self._settings = settings
        self._routes = routes
        self._limits = RequestLimits(
            prompt_bytes_max=settings.prompt_bytes_max, output_tokens_max=settings.output_tokens_max
        )
        self._retention = Retention(settings.resume_events_max, settings.resume_bytes_max, settings.resume_window_s)

    def plan(
        self, request: pb.GenerateRequest, received_at: float, deadline_at: float, caller: Caller = NOBODY
    ) -> Plan:
        """Check a request and fix what stays the same for all its attempts."""
        settings, tenant = self._settings, caller.tenant
        check_request(request, self._limits)
        snapshot = self._snapshot()
        self._refuse_if_too_old(snapshot)
        revision = resolve_revision(snapshot, request.model, random.random)
        check_model(tenant, request.model, revision)
        check_guided(snapshot, revision, guided_kind(request))
        check_output(tenant, request.max_tokens if request.HasField("max_tokens") else None)
        generate = complete_request(request, revision, self._limits)
        generate.priority = PRIORITIES[tenant.priority(priority_asked(request))]
        allowed = output_tokens_allowed(revision, self._limits)
        allowed = min(allowed, tenant.max_output_tokens or allowed)
        is_shared = bool(request.idempotency_key)
        resumable = is_shared or request.on_disconnect == pb.ON_DISCONNECT_CONTINUE
        budget = Budget(
            received_at,
            deadline_at,
            queue_s=longest_wait_s(
                Priority(generate.priority),
                queue_timeout_s=settings.queue_timeout_s,
                ttft_target_s=settings.ttft_target_s,
            ),
            execution_s=settings.execution_timeout_s or None,
        )
        return Plan(
            snapshot=snapshot,
            revision=revision,
            efforts=resolve_efforts(request, revision),
            generate=generate,
            output_tokens_max=allowed,
            budget=budget,
            terms=Terms(
                attempts_max=settings.attempts_max,
                slow_consumer_s=settings.slow_consumer_s,
                resume_s=settings.resume_window_s if resumable else None,
                known_max=settings.continue_tokens_max if request.recovery == pb.RECOVERY_CONTINUE else 0,
            ),
            window_tokens=self._window(request),
            retention=self._retention if resumable else None,
            is_shared=is_shared,
            caller=caller,
            make_demand=functools.cache(lambda: demand_of(generate, revision, tenant, allowed, budget)),
        )

    def place(self, plan: Plan, tried: list[str]) -> tuple[SchedulerLink, Replica]:
        """Choose a replica that was not tried yet, and the link to it."""
        if plan.budget.remaining_s(time.monotonic()) <= 0:
            raise Failure(Reason.DEADLINE_EXCEEDED, "The deadline passed before the request could be started.")
        snapshot = self._snapshot()
        check_not_revoked(snapshot, plan.revision)
        if plan.revision.name not in snapshot.replicas_of:
            snapshot = plan.snapshot
        routing = self._routes.routing
        replica = routing.choose(
            snapshot,
            plan.revision,
            plan.demand,
            tried=tried,
            failed=routing.loads.domains(tried) if tried else (),
            reachable=self._routes.is_reachable,
            random=random.random,
            now=time.monotonic(),
        )
        return self._routes.link(replica.endpoint), replica

    def _refuse_if_too_old(self, snapshot: RoutingSnapshot) -> None:
        """Past the hard age a revocation may have been missed: nothing new is started, what runs goes on."""
        if self._settings.past_hard_age == "refuse" and self._routes.is_too_old():
            raise Failure(
                Reason.SNAPSHOT_TOO_OLD,
                f"This Router has not heard the store for more than {snapshot.hard_age_s:g} s; use another Router.",
                metadata={"snapshotVersion": str(snapshot.version), "hardAgeSeconds": f"{snapshot.hard_age_s:g}"},
            )

    def _snapshot(self) -> RoutingSnapshot:
        snapshot = self._routes.snapshot
        if snapshot is None:
            raise Failure(
                Reason.NO_SNAPSHOT, "This Router has no routing snapshot yet; try again shortly, or another Router."
            )
        return snapshot

    def _window(self, request: pb.GenerateRequest) -> int:
        window = self._settings.credit_window_tokens
        if request.HasField("window_tokens"):
            window, largest = request.window_tokens, self._settings.credit_window_tokens_max
            if not WINDOW_MIN <= window <= largest:
                raise InvalidRequest((Violation("window_tokens", f"must be between {WINDOW_MIN} and {largest}"),))
        # What the engine holds back because a stop string may begin there cannot be read. If that filled more than
        # half of a window, no credit would ever come.
        longest = max((len(string.encode()) for string in request.stop.strings), default=0)
        return max(window, 2 * longest + WINDOW_MIN)
