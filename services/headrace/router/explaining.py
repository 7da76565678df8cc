"""Explains where a request would go, and why not elsewhere: the decision itself, asked without starting anything."""

from __future__ import annotations

import random
import time

from headrace.api.router.v1 import router_service_pb2 as pb
from headrace.control import names
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.placement import no_replica
from headrace.control.resources import FailureDomain
from headrace.control.routing import Candidate
from headrace.control.tenants import ANONYMOUS, unlimited
from headrace.router.identity import Caller
from headrace.router.plan import Planner
from headrace.router.routes import Routes
from headrace.router.settings import RouterSettings

CANDIDATES_MAX = 100
DEADLINE_S = 60.0


class Explainer:
    """Answers ExplainRoute.

    Args:
        settings: the Router's.
        routes: whose decisions are explained.
    """

    def __init__(self, settings: RouterSettings, routes: Routes) -> None:
        self._planner = Planner(settings, routes)
        self._routes = routes

    def explain(self, request: pb.ExplainRouteRequest) -> pb.ExplainRouteResponse:
        """Tell what the decision would be now. Equals are told apart by chance, as for a request.

        Raises:
            Failure: why the request would be refused before a replica is looked for.
        """
        now = time.monotonic()
        plan = self._planner.plan(request.generate, now, now + DEADLINE_S, self._caller(request.tenant))
        routing, snapshot = self._routes.routing, plan.snapshot
        chosen, candidates = routing.explain(
            snapshot,
            plan.revision,
            plan.demand,
            reachable=self._routes.is_reachable,
            random=random.random,
            now=now,
            most=CANDIDATES_MAX,
        )
        return pb.ExplainRouteResponse(
            revision=plan.revision.name,
            snapshot_version=snapshot.version,
            chosen=chosen.name if chosen is not None else "",
            candidates=map(_candidate, candidates),
            candidates_total=len(snapshot.replicas_of[plan.revision.name]),
            refusal=no_replica(snapshot, plan.revision).message if chosen is None else "",
        )

    def _caller(self, name: str) -> Caller:
        if name and not (name.startswith("tenants/") and names.is_id(name.removeprefix("tenants/"))):
            raise InvalidRequest((Violation("tenant", 'must be the name of a tenant, "tenants/{t}"'),))
        name = name or ANONYMOUS
        snapshot = self._routes.snapshot
        found = snapshot.tenant_by_name.get(name) if snapshot is not None else None
        if found is None and name != ANONYMOUS:
            raise Failure(
                Reason.NOT_FOUND, "No such tenant is registered.", field="tenant", metadata={"resourceName": name}
            )
        return Caller(found or unlimited(name), "nothing")


def _candidate(found: Candidate) -> pb.Candidate:
    replica = found.replica
    told = pb.Candidate(
        replica=replica.name,
        excluded_by=found.excluded_by,
        in_flight=found.in_flight,
        failure_domain=_domain(replica.failure_domain),
    )
    if found.score is not None:
        told.score = found.score.total
        for name, seconds in zip(found.score._fields, found.score, strict=True):
            told.parts.add(name=name, seconds=seconds)
    if found.load_age_s is not None:
        told.load_age.FromMicroseconds(int(found.load_age_s * 1e6))
    return told


def _domain(domain: FailureDomain) -> str:
    """Zone, rack and host; "-" for what is not known."""
    return "/".join(part or "-" for part in (domain.zone, domain.rack, domain.host))
