"""A Router's admission with replicas of one revision, and what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.control.attempt_book import waiting_max
from headrace.control.errors import Failure, Reason
from headrace.control.priority import Priority
from headrace.control.resources import Engine, Execution, FailureDomain, Replica, ReplicaState, Revision
from headrace.control.router_admission import Demand, RouterAdmission
from headrace.control.router_capacity import HEADROOM

REVISION = Revision("m", "", "", Execution(Engine.SYNTHETIC, context_tokens=64, slots=4, kv_cells=256))
OTHER = Revision("other", "", "", Execution(Engine.SYNTHETIC, context_tokens=64, slots=4, kv_cells=256))
HOLDS = HEADROOM * (4 + waiting_max(4))
"""Requests that one replica of these holds."""


def replica(name: str, state: ReplicaState = ReplicaState.READY, zone: str = "") -> Replica:
    return Replica(name, REVISION.name, "schedulers/s", "s:1", state, 1, 4, 256, FailureDomain(zone=zone))


def admission(
    *replicas: Replica,
    requests_max: int = 10_000,
    bytes_max: int = 10**9,
    tokens_max: int = 0,
    random: float = 0.5,
    now: float = 0.0,
) -> RouterAdmission:
    made = RouterAdmission(requests_max=requests_max, bytes_max=bytes_max, tokens_max=tokens_max, random=lambda: random)
    apply(made, *(replicas or (replica("a"),)), now=now)
    return made


def apply(made: RouterAdmission, *replicas: Replica, now: float) -> None:
    made.apply(
        (REVISION, OTHER), {REVISION.name: replicas}, is_usable=lambda r: r.name != "unreachable", routers=1, now=now
    )


def tell(
    made: RouterAdmission,
    name: str,
    *,
    now: float,
    queue_wait_s: float | None = None,
    waiting_max: int = 0,
    **door: Any,
) -> None:
    """A report comes, as the Router takes it: first to the doors."""
    made.doors.report(name, now=now, **door)
    made.report(name, queue_wait_s=queue_wait_s, waiting_max=waiting_max)


def demand(
    priority: Priority = Priority.STANDARD,
    *,
    tokens: int = 1,
    size: int = 1,
    revision: Revision = REVISION,
    tenant: str = "",
    weight: float = 1.0,
) -> Demand:
    return Demand(revision.name, priority, tokens, size, tenant, weight)


def admitted(made: RouterAdmission, wanted: Demand, now: float = 0.0) -> int:
    """How many of these are taken in until one is refused."""
    for count in range(20_000):
        try:
            made.admit(wanted, now)
        except Failure:
            return count
    raise AssertionError("there is no bound")


def refusal(made: RouterAdmission, wanted: Demand, now: float = 0.0) -> Failure:
    with pytest.raises(Failure) as caught:
        made.admit(wanted, now)
    assert caught.value.reason is Reason.OVERLOADED
    return caught.value
