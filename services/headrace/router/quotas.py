"""The tenants' limits in this Router: the shell around `headrace.control.quota`, which decides.

take ──> keep ──> release     once for each request that was taken in, whatever its end
  └────> drop                 it could not be started
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.control.errors import RULES, Blame, Failure
from headrace.control.quota import Charge, Quotas
from headrace.router.plan import Plan
from headrace.router.routes import Routes
from headrace.router.session import Session
from headrace.router.tenant_metrics import TenantMetrics

SWEEP_S = 60.0
"""How often tenants that have used nothing are forgotten, and the busiest chosen anew."""


class TenantQuotas:
    """Of one Router. `tend` it now and then.

    Args:
        routes: has the snapshot, with the tenants that are registered.
        metrics: counts.
        routers: how many Routers share the limits, as far as is known.
    """

    def __init__(self, routes: Routes, metrics: TenantMetrics, routers: Callable[[], int]) -> None:
        self.core = Quotas()
        self._routes = routes
        self._metrics = metrics
        self._routers = routers
        self._charges: dict[str, Charge] = {}
        """By request."""
        self._swept_at = time.monotonic()

    def take(self, plan: Plan, tokens: int) -> Charge:
        """Charge a request of so many tokens, as estimated, to its tenant.

        Raises:
            Failure: QUOTA_EXCEEDED.
        """
        tenant = plan.caller.tenant
        try:
            return self.core.admit(tenant, tokens, self._routers(), time.monotonic())
        except Failure as failure:
            self._metrics.refused(tenant.name, failure.metadata.get("quota", ""))
            raise

    def keep(self, request: str, charge: Charge) -> None:
        """Remember what a request has taken."""
        self._charges[request] = charge

    def drop(self, charge: Charge) -> None:
        """The request could not be started: it has taken nothing."""
        self.core.cancel(charge, time.monotonic())

    def release(self, session: Session) -> None:
        """A request is over: settle what it has used. Again: nothing happens."""
        charge = self._charges.pop(session.name, None)
        if charge is None:
            return
        if _never_began(session):
            self.drop(charge)
            return
        used = session.usage()
        self.core.settle(charge, used.prompt_tokens + used.generated_tokens, time.monotonic())
        self._metrics.finished(charge.tenant, used)

    def tend(self) -> None:
        """Set the gauge; forget, now and then, what nothing depends on."""
        self._metrics.running(self.core.in_flight)
        now = time.monotonic()
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        snapshot = self._routes.snapshot
        self.core.sweep(snapshot.tenant_by_name if snapshot is not None else (), now)
        self._metrics.rotate()


def _never_began(session: Session) -> bool:
    """Whether the service has refused or lost it before any engine began: not its tenant's doing, so not its use."""
    record = session.machine.record
    if not record.attempts:
        return True
    return record.admitted_at is None and record.reason is not None and RULES[record.reason].blame is Blame.SYSTEM
