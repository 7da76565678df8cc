"""How many replicas a demand needs, and what happens until they are there. For whoever sizes a fleet.

    needed      demand / (what one replica serves x target)
    gap         requests that come, until new replicas are ready, beyond what the ready ones serve at that target
    to shed     what of the gap no queue holds

Sans-io. Rates are requests a minute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TARGET = 0.75
"""Of what a replica can serve: above it waits grow steeply with the least burst, and a replica may be lost."""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Of one revision."""

    per_replica: float
    """What one replica serves with all its slots busy, requests a minute; above 0."""
    target: float = TARGET
    """Share of that which it is to be used for."""

    @classmethod
    def of_slots(cls, slots: float, service_s: float, target: float = TARGET) -> CapacityPlan:
        """Of replicas with so many slots, each of which a request has for `service_s` seconds."""
        return cls(60.0 * max(slots, 1.0) / max(service_s, 1e-3), target)

    def replicas(self, demand: float) -> float:
        """What so many requests a minute need, not rounded: sum it over Routers, then round up."""
        return demand / (self.per_replica * self.target)

    def needed(self, demand: float) -> int:
        """The same in whole replicas."""
        return math.ceil(self.replicas(demand) - 1e-9)

    def gap(self, demand: float, ready: int, ready_in_s: float) -> float:
        """Requests that come and cannot be served in the time until more replicas are ready."""
        return max(0.0, demand - ready * self.per_replica * self.target) * ready_in_s / 60.0

    def to_shed(self, demand: float, ready: int, ready_in_s: float, queue: int) -> float:
        """Those of them that must be refused or shed, where queues hold `queue` requests."""
        return max(0.0, self.gap(demand, ready, ready_in_s) - queue)
