"""What engines say of their prefix caches: counted for metrics over restarts, and told to Routers; once for real."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from headrace.api.registry.v1 import resources_pb2
from headrace.control.resources import ReplicaState
from headrace.router.demands import report_of
from support.relaying import REVISION, Bench
from support.scheduling import RawRouter, cluster, synthetic


def alive(stored: int, removed: int, lost: int = 0) -> dict[str, Any]:
    return {"type": "alive", "stats": {"kv_stored": stored, "kv_removed": removed, "kv_events_lost": lost}}


def loads(router: RawRouter) -> list[Any]:
    return [load for report in router.loads for load in report.replicas]


def counted(bench: Bench) -> tuple[Any, ...]:
    names = ("kv_tokens_stored_total", "kv_tokens_removed_total", "kv_events_lost_total")
    return tuple(bench.metric(name, revision=REVISION) for name in names)


def told(bench: Bench) -> tuple[int, int]:
    (load,) = bench.relay.load_report().replicas
    report = report_of(load)
    assert (report.kv_stored, report.kv_removed) == (load.kv_tokens_stored, load.kv_tokens_removed)
    return report.kv_stored, report.kv_removed


@pytest.mark.asyncio
async def test_counts_go_on_over_restarts_and_routers_are_told_of_this_engine_alone() -> None:
    bench = Bench()
    assert (counted(bench), told(bench)) == ((None, None, None), (0, 0))
    bench.tell(alive(100, 0), alive(300, 50, 2))
    assert (counted(bench), told(bench)) == ((300, 50, 2), (300, 50))
    bench.tell(alive(300, 50, 2))
    assert counted(bench) == (300, 50, 2)
    bench.relay.close_engine("replicas/a", drained=False)
    bench.open()
    assert told(bench) == (0, 0)
    bench.tell(alive(40, 10))
    assert (counted(bench), told(bench)) == ((340, 60, 2), (40, 10))
    bench.tell(alive(999, 999), run=bench.run - 1)  # of the run that is over
    assert counted(bench) == (340, 60, 2)


@pytest.mark.asyncio
@pytest.mark.parametrize("event", [alive(-1, -1, -1), {"type": "alive", "stats": {}}, {"type": "alive"}])
async def test_an_engine_that_says_nothing_of_it_is_not_counted(event: dict[str, Any]) -> None:
    bench = Bench()
    bench.tell(event)
    assert (counted(bench), told(bench)) == ((None, None, None), (0, 0))


@pytest.mark.stack
@pytest.mark.asyncio
async def test_a_real_engine_s_evictions_are_seen_by_an_operator_and_by_a_router(tmp_path: Path) -> None:
    revision = synthetic("evicts", slots=1, context=256)  # room for one full context
    async with cluster(tmp_path) as running:
        await running.publish(revision)
        replica = await running.replica(revision, ReplicaState.READY)
        async with RawRouter.attach(await running.endpoint()) as router:
            for word in ("the ", "of ", "in "):
                await router.end_of(await router.dispatch(replica, prompt=word * 60, max_tokens=80))
            await router.until(lambda: any(load.kv_tokens_removed for load in loads(router)))
        load = loads(router)[-1]
        assert load.kv_tokens_stored > load.kv_tokens_removed > 0
        record = await running.store.get(f"services/schedulers/{running.settings.name}")
        assert record is not None
        address = resources_pb2.ServiceRecord.FromString(record.value).metrics_endpoint
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics").read().decode())
        (line,) = [one for one in text.splitlines() if one.startswith("headrace_scheduler_kv_tokens_removed_total{")]
        assert f'revision="{revision.name}"' in line
        assert float(line.split()[-1]) >= load.kv_tokens_removed
