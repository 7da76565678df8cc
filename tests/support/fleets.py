"""A fleet of replicas of one revision, as a snapshot, for tests of routing."""

from __future__ import annotations

from typing import Any

from headrace.control.filters import Demand
from headrace.control.resources import (
    Alias,
    AliasTarget,
    Engine,
    Execution,
    FailureDomain,
    Replica,
    ReplicaState,
    Revision,
)
from headrace.control.routing import Routing, RoutingRules
from headrace.control.snapshot import RoutingSnapshot

REVISION = Revision("m", "", "", Execution(Engine.SYNTHETIC, 4096, 4, 16384))


def replica(name: str, zone: str = "", rack: str = "", host: str = "", **fields: Any) -> Replica:
    """One of 4 slots that is ready."""
    given: dict[str, Any] = {"state": ReplicaState.READY, "epoch": 7, "slots": 4, **fields}
    return Replica(
        f"replicas/{name}",
        REVISION.name,
        "schedulers/s",
        f"{name}:1",
        failure_domain=FailureDomain(host, rack, zone),
        **given,
    )


def snapshot(*replicas: Replica, version: int = 1) -> RoutingSnapshot:
    alias = Alias("aliases/chat", (AliasTarget(REVISION.name, 1),))
    return RoutingSnapshot("i", version, revisions=(REVISION,), aliases=(alias,), replicas=replicas)


class Fleet:
    """A Routing that has applied its snapshot, asked in one line."""

    def __init__(self, *replicas: Replica, **rules: Any) -> None:
        self.routing = Routing(RoutingRules(**rules))
        self.replicas = replicas
        self.snapshot = snapshot(*replicas)
        self.routing.apply(self.snapshot, 0.0)
        self._token = 0

    def apply(self, *replicas: Replica, now: float = 0.0) -> None:
        self.replicas = replicas
        self.snapshot = snapshot(*replicas, version=self.snapshot.version + 1)
        self.routing.apply(self.snapshot, now)

    def choose(self, random: Any, demand: Demand | None = None, now: float = 0.0, **facts: Any) -> Replica:
        facts.setdefault("reachable", lambda endpoint: True)
        return self.routing.choose(self.snapshot, REVISION, demand or Demand(), random=random, now=now, **facts)

    def send(self, name: str, demand: Demand | None = None, now: float = 0.0) -> int:
        """Dispatch an attempt to a replica; its token."""
        self._token += 1
        self.routing.dispatched(self._token, f"replicas/{name}", 7, REVISION.name, demand or Demand(), now)
        return self._token
