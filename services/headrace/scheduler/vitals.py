"""How a Scheduler is: its three signals as services of grpc.health.v1, and how it stands with the store.

"startup", "liveness" and "readiness" are for the three probes of Kubernetes; "lease" is NOT_SERVING while the store
has not renewed this process's lease in time. A partition from the store is no failure of the other three: what runs is
served on, and new attempts are taken.
"""

from __future__ import annotations

import time
from typing import Protocol

from headrace.control.worker_health import Signals, scheduler_signals
from headrace.runtime.membership import LeaseState
from headrace.scheduler.fleet import Fleet


class Lease(Protocol):
    """What is needed of `headrace.runtime.membership.Membership`."""

    @property
    def state(self) -> LeaseState:
        """What may be assumed of it now."""

    @property
    def age_s(self) -> float:
        """Seconds since the store last renewed it."""


class HealthServer(Protocol):
    """What is needed of `headrace.rpc.server.Server`."""

    async def set_health(self, name: str, serving: bool) -> None:
        """Set the health that a name answers."""


class Vitals:
    """Reads the live objects of one Scheduler."""

    def __init__(self, fleet: Fleet, lease: Lease) -> None:
        self.lease = lease
        self._fleet = fleet
        self._since = time.monotonic()
        self._started = False
        self._told: dict[str, bool] = {}

    @property
    def signals(self) -> Signals:
        """The three signals, as of now."""
        found = scheduler_signals(
            [worker.signals for worker in self._fleet.workers.values()],
            had_started=self._started,
            has_snapshot=self._fleet.has_snapshot,
            up_s=time.monotonic() - self._since,
            is_draining=self._fleet.is_draining,
        )
        self._started = found.started
        return found

    async def tell(self, server: HealthServer) -> None:
        """Bring the health services up to date."""
        signals = self.signals
        now = {
            "startup": signals.started,
            "liveness": signals.alive,
            "readiness": signals.ready,
            "lease": self.lease.state is LeaseState.HELD,
        }
        for name, serving in now.items():
            if self._told.get(name) is not serving:
                await server.set_health(name, serving)
        self._told = now
