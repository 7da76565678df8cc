"""What a Generate costs the Router from its request to its dispatch, without gRPC, over a fleet of one revision.

CPU time of the thread, so that what else runs on the machine counts as little as it can.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from itertools import pairwise
from typing import Any, cast
from unittest.mock import patch

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.idempotency import Origin
from headrace.control.load_view import ReplicaReport
from headrace.control.resources import Alias, AliasTarget, Replica, Revision
from headrace.control.snapshot import RoutingSnapshot
from headrace.router.links import SchedulerLink
from headrace.router.metrics import RouterMetrics
from headrace.router.routes import Routes
from headrace.router.routing_metrics import RoutingMetrics
from headrace.router.service import InferenceService
from headrace.router.session import Session
from headrace.router.settings import RouterSettings
from headrace.rpc.calls import Context

SIZES = (100, 2_000, 8_700, 60_000)
"""Bytes of the prompt."""
USERS = 50
PARTS = ("identify", "plan", "hash", "choose", "rest")
"""rest: quota, admission, the session, the Dispatch."""


class _Caller:
    """A call's context, as far as the Router looks at it."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("user-agent", "bench"),)

    def time_remaining(self) -> float:
        return 60.0


def _up(link: SchedulerLink) -> None:
    link.is_up = True


class Path:
    """A Router whose links take dispatches and send nothing."""

    def __init__(self, revision: Revision, made: list[Replica]) -> None:
        replicas = tuple(dataclasses.replace(replica, epoch=1 + n) for n, replica in enumerate(made))
        alias = Alias("aliases/chat", (AliasTarget(revision.name, 1),))
        self.routes = Routes(router="routers/bench", incarnation="1")
        with patch.object(SchedulerLink, "open", _up):
            self.routes.apply(RoutingSnapshot("bench", 1, revisions=(revision,), aliases=(alias,), replicas=replicas))
        metrics = RouterMetrics()
        RoutingMetrics(metrics.registry, self.routes.routing)
        settings = RouterSettings(listen="127.0.0.1:0", usage_log=False)
        self.service = InferenceService(settings, self.routes, metrics, Origin("routers/bench", "1"))
        now = time.monotonic()
        for n, replica in enumerate(replicas):
            report = ReplicaReport(n % 7, n % 3, 64, queue_wait_s=n % 3 / 4)
            self.routes.routing.report(replica.name, report, now - n / len(replicas))
        self.service.tend()
        self._choose, self._chose_ns = self.routes.routing.choose, 0
        self.routes.routing.choose = self._timed_choose  # type: ignore[method-assign]

    def _timed_choose(self, *args: Any, **facts: Any) -> Replica:
        began = time.thread_time_ns()
        try:
            return self._choose(*args, **facts)
        finally:
            self._chose_ns = time.thread_time_ns() - began

    def generate(self, request: pb.GenerateRequest) -> list[int]:
        """Nanoseconds of each of the parts."""
        context, service, clock = cast("Context", _Caller()), self.service, time.thread_time_ns
        at = [clock()]
        caller = service.identities.caller(context, starts=True)
        at.append(clock())
        now = time.monotonic()
        plan = service._planner.plan(request, now, now + context.time_remaining(), caller)
        at.append(clock())
        assert plan.demand.prompt_size
        at.append(clock())
        session = service.sessions.open(plan, caller.tenant.name)
        at.append(clock())
        self._end(session)
        identify, made, hashed, rest = (after - before for before, after in pairwise(at))
        return [identify, made, hashed, self._chose_ns, rest - self._chose_ns]

    def _end(self, session: Session) -> None:
        """The engine admits it, and its caller ends it."""
        ((attempt, sent),) = session._attempts.sent.items()
        version = sent.link._outgoing.dispatches[-1].record_version
        sent.link._outgoing.Clear()
        size = len(session.plan.generate.prompt)
        sent.link._take(sp.AttachResponse(
            admitted=[sp.Admitted(attempt=attempt, prompt_tokens=size // 4, record_version=version)]
        ))  # fmt: skip
        session.cancel()
        sent.link._take(sp.AttachResponse(
            ended=[sp.Ended(attempt=attempt, reason=pb.FINISH_REASON_CANCELLED, record_version=version)]
        ))  # fmt: skip
        assert not len(self.service.sessions)


def paths(revision: Revision, made: list[Replica], rounds: int) -> list[dict[str, float]]:
    """For each size of prompt: microseconds of the whole, p50 and p99, and p50 of each part."""
    return asyncio.run(_paths(revision, made, rounds))


async def _paths(revision: Revision, made: list[Replica], rounds: int) -> list[dict[str, float]]:
    path, rows = Path(revision, made), []
    for size in SIZES:
        gc.collect()
        took = []
        for n in range(rounds):
            text = f"{n % USERS:4} " + "You are a helpful assistant. " * (size // 29)
            request = pb.GenerateRequest(
                model="chat", prompt=text[:size], max_tokens=256, affinity_key=f"session-{n % USERS}"
            )
            took.append(path.generate(request))
            await asyncio.sleep(0)
        whole = sorted(map(sum, took))
        row = {"prompt_bytes": size, "p50_us": whole[rounds // 2] / 1000, "p99_us": whole[rounds * 99 // 100] / 1000}
        for name, values in zip(PARTS, zip(*took, strict=True), strict=True):
            row[f"{name}_p50_us"] = sorted(values)[rounds // 2] / 1000
        rows.append(row)
    return rows
