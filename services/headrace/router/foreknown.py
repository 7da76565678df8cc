"""Refusals that are known without asking a Scheduler: the shell around `headrace.control.known_waits`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator

from headrace.control.errors import Failure, Reason
from headrace.control.known_waits import Asked, KnownWaits
from headrace.control.resources import Replica
from headrace.router.admission import demand_of
from headrace.router.plan import Plan
from headrace.router.session import Session
from headrace.rpc import status


class Foreknown:
    """Of one Router.

    Args:
        retry_s: spreads the time to come back.
    """

    def __init__(self, retry_s: Callable[[float], float]) -> None:
        self.core = KnownWaits()
        self._retry_s = retry_s

    def check(self, plan: Plan) -> None:
        """Refuse what every replica has just refused.

        Raises:
            Failure: OVERLOADED.
        """
        if not len(self.core):
            return
        ready = _Names(plan.snapshot.ready_of.get(plan.revision.name, ()))
        wait_s = self.core.refuses(_asked(plan), ready, time.monotonic())
        if wait_s is not None:
            raise Failure(
                Reason.OVERLOADED,
                "It would wait longer than it may, as each replica has just said.",
                metadata={
                    "stage": "router",
                    "bound": "wait",
                    "limit": str(len(ready)),
                    "current": str(len(ready)),
                    "priority": plan.priority.name,
                    "revision": plan.revision.name,
                },
                retry_after_s=self._retry_s(wait_s),
            )

    def learn(self, session: Session) -> None:
        """A request is over: remember which replicas would not let it wait."""
        if session.machine.sequence:
            return
        for replica, ended in session.ends():
            failure = status.from_proto(ended.error)
            is_deadline = failure.reason is Reason.DEADLINE_UNMEETABLE
            if not is_deadline and failure.metadata.get("stage") != "wait":
                continue
            with contextlib.suppress(KeyError, ValueError):
                self.core.learn(
                    _asked(session.plan),
                    replica,
                    expected_s=float(failure.metadata["expectedMs"]) / 1000,
                    limit_s=float(failure.metadata["remainingMs" if is_deadline else "limitMs"]) / 1000,
                    retry_after_s=failure.retry_after_s or 0.0,
                    now=time.monotonic(),
                    is_deadline=is_deadline,
                )


class _Names(Collection[str]):
    """Names of replicas, of which there may be thousands: nothing is made of them before it is asked for."""

    def __init__(self, replicas: tuple[Replica, ...]) -> None:
        self._replicas = replicas

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[str]:
        return (replica.name for replica in self._replicas)

    def __contains__(self, name: object) -> bool:
        return any(replica.name == name for replica in self._replicas)


def _asked(plan: Plan) -> Asked:
    budget = plan.budget
    return Asked(
        plan.revision.name,
        plan.caller.tenant.name,
        plan.priority,
        demand_of(plan).tokens,
        budget.deadline_at,
        math.inf if budget.queue_s is None else budget.queue_s,
    )
