"""A zone goes: the Router takes in what remains, and not all that it took before."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.attempt_book import waiting_max
from headrace.control.errors import Reason
from headrace.control.resources import FailureDomain, Replica, ReplicaState
from headrace.control.router_capacity import HEADROOM, SHOCK
from headrace.rpc.server import Server

from .harness import REVISION, ScriptedScheduler, collect, failure, running, until

HOLDS = HEADROOM * (4 + waiting_max(4))


def replica(name: str, zone: str, endpoint: str) -> Replica:
    domain = FailureDomain(host=f"host-{name}", zone=zone)
    return Replica(
        f"replicas/{name}", REVISION.name, f"schedulers/{zone}", endpoint, ReplicaState.READY, 40, 4, 256, domain
    )


async def test_when_a_zone_goes_admission_shrinks_to_what_remains() -> None:
    other, peer = ScriptedScheduler(), Server("127.0.0.1:0")
    peer.add(sp.DESCRIPTOR.services_by_name["SchedulerService"], other)
    await peer.start()
    async with running() as h:
        before = h.routes.snapshot
        assert before is not None
        here = before.replicas[0].endpoint
        zones = [replica(f"a{n}", "a", here) for n in range(2)] + [
            replica(f"b{n}", "b", peer.endpoint) for n in range(2)
        ]
        h.routes.apply(replace(before, version=6, replicas=tuple(zones)))
        core = h.service.admission.core
        await until(lambda: core.allowed(1e9)[0] == 4 * HOLDS)
        assert core.shocks == 0
        other.cut()
        await peer.stop(0)
        await until(lambda: core.allowed(1e9)[0] == 2 * HOLDS)
        assert core.shocks == 1
        assert core.allowed(time.monotonic())[0] >= SHOCK * 2 * HOLDS

        answers = [asyncio.create_task(collect(h.generate(max_tokens=8))) for _ in range(int(4 * HOLDS))]
        await until(lambda: sum(answer.done() for answer in answers) + core.requests == len(answers))
        refused = [failure(answer.result()[1]) for answer in answers if answer.done()]
        assert {told.reason for told in refused} == {Reason.OVERLOADED}
        assert {told.metadata["bound"] for told in refused} == {"requests"}
        assert core.requests <= 2 * HOLDS, "not all is poured on the survivors"
        while not h.scheduler.dispatches.empty():
            await h.scheduler.end(h.scheduler.dispatches.get_nowait().attempt)
        await asyncio.wait(answers, timeout=5.0)
        await until(lambda: core.held() == (0, 0))
