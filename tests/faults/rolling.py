"""Two of every service: each is restarted in turn, and one Scheduler is cut off from etcd for longer than its lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from faults.examine import HEALED, Breaking, Proof
from faults.rig import LEASE_TTL_S, Rig, Service
from headrace.control.client_retry import RetryPolicy
from support.etcd import eventually

STREAMS = 16
GRACE_S = 40.0
OPTIONS: dict[str, Any] = {
    "serving": (("scheduler", "s1"), ("scheduler", "s2"), ("router", "r1"), ("router", "r2")),
    "streams": STREAMS,
    "retry": RetryPolicy(),
}
ORDER = ("router", "scheduler", "registry")


async def rolling_restart(rig: Rig) -> AsyncIterator[Proof]:
    """SIGTERM, drain, end, start, ready, then the next one."""
    for kind in ORDER:
        for service in list(rig.of(kind)):
            began = time.monotonic()
            before = service.pid
            assert service.part is not None
            code = await service.part.stop(GRACE_S)
            stopped_s = time.monotonic() - began
            await rig.start(service)
            await rig.serving(service)
            await eventually(lambda service=service: _is_back(rig, service), 60, f"{service.name} is back")
            took = f"drained in {stopped_s:.1f} s, back after {time.monotonic() - began:.1f} s"
            yield f"{service.name}: {took}, exit code {code}", code == 0 and service.pid != before
    yield HEALED


async def scheduler_cut_off(rig: Rig) -> AsyncIterator[Proof]:
    """A Scheduler does not reach etcd for longer than its lease lives; Routers reach it all the time."""
    service = rig.of("scheduler")[0]
    for proxy in service.proxies:
        proxy.lose()
    began = time.monotonic()
    await eventually(lambda: _is_gone(rig, service), LEASE_TTL_S + 10, "its records are gone")
    yield f"its records were gone after {time.monotonic() - began:.1f} s", True
    await asyncio.sleep(4.0)
    for proxy in service.proxies:
        proxy.heal()
    yield HEALED


async def _is_back(rig: Rig, service: Service) -> bool:
    """It reports the snapshot that everyone runs, and a Scheduler's replica is ready."""
    snapshot = rig.readers[0].follower.current
    record = (await rig.reports()).get(service.name)
    if record is None or snapshot is None or not record.snapshot_version:
        return False
    if service.kind != "scheduler":
        return True
    ready = [r for r in snapshot.replicas if r.endpoint == service.address and r.state.value == "ready"]
    return bool(ready)


async def _is_gone(rig: Rig, service: Service) -> bool:
    return service.name not in await rig.reports()


ROLLING: dict[str, Breaking] = {
    "rolling restart of every service": rolling_restart,
    "a Scheduler cut off from etcd": scheduler_cut_off,
}
