"""A worker, a Scheduler and a Router are killed, one after the other, at three times what the workers can do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from overload import truth
from overload.levels import Row, job_for, level, spawn
from overload.rig import MODELS, WORKERS, OverloadRig
from support.etcd import eventually

SECONDS = 30.0
KILLS_S = (4.0, 11.0, 20.0)
"""After the beginning, or as soon as what was killed before is back."""
AWAY_S = 1.0
BACK_S = 30.0
KNOWN = 6
"""Requests of the known load: fewer than each revision has slots."""


async def measure(rig: OverloadRig, rate: float, *, seconds: float) -> tuple[dict[str, Any], list[Row]]:
    """The storm, and what is left after it."""
    await level(rig, rate, kind="once", seconds=4.0, seed=31)
    await truth.settled(rig)
    await asyncio.sleep(1.0)
    before = await truth.look(rig)
    job = job_for(rig, seconds, rate=rate, kind="polite", seed=32)
    storming = asyncio.create_task(spawn("generator.py", asdict(job)))
    try:
        kills = await _kill(rig, seconds / SECONDS)
        told = await storming
    finally:
        storming.cancel()
    after, settle_s = await truth.settled(rig)
    await asyncio.sleep(10.0)  # the window of the retry budget
    after = await truth.look(rig)
    known = await _known(rig)
    figures = {
        "kills": kills,
        "requests": len(told["requests"]),
        "ends": dict(Counter(request["end"] or "nothing" for request in told["requests"]).most_common()),
        "attempts": Counter(len(request["calls"]) for request in told["requests"]),
        "slowest_s": max(request["took_s"] for request in told["requests"]),
        "broken": [request["broken"] for request in told["requests"] if request["broken"]],
        "lost": [
            [request["at"], request["took_s"], [(call["said"], call["events"]) for call in request["calls"]]]
            for request in told["requests"]
            if request["end"].startswith("lost")
        ],
        "hung": sum(request["end"] in ("", "hung") for request in told["requests"]),
        "settled_s": settle_s,
        "left": after.left,
        "levels": {name: (before.levels.get(name), value) for name, value in after.levels.items()},
        "known": known,
    }
    return figures, [*_rows(figures), *truth.rows(before, after, settle_s)]


async def _kill(rig: OverloadRig, pace: float) -> list[dict[str, Any]]:
    """Kill one after the other; returns what was killed, what ran then, and how long it took to be back."""
    began = time.monotonic()
    scheduler, other = (rig.services[name] for name in ("s1", "s2"))
    router = rig.services["r1"]
    kills: list[dict[str, Any]] = []

    async def worker() -> None:
        pid = await rig.kill_worker(scheduler, MODELS[0])
        await eventually(lambda: _is_replaced(rig, pid), BACK_S, "the worker is back")

    async def restart(service: Any) -> None:
        await rig.kill(service)
        await asyncio.sleep(AWAY_S)
        await rig.start(service)
        await rig.serving(service)
        await rig.replicas_ready(BACK_S)

    for at, what, strike in (
        (KILLS_S[0], "a worker's Triton", worker()),
        (KILLS_S[1], "a Scheduler", restart(other)),
        (KILLS_S[2], "a Router", restart(router)),
    ):
        await asyncio.sleep(max(0.0, began + at * pace - time.monotonic()))
        held = (await truth.look(rig)).counts
        running = sum(value for name, value in held.items() if name.endswith("requests_active"))
        struck = time.monotonic()
        await strike
        kills.append({"what": what, "running": running, "back_s": time.monotonic() - struck})
    return kills


async def _is_replaced(rig: OverloadRig, pid: int) -> bool:
    """Whether every worker is ready, and none of them is the process that was killed."""
    with contextlib.suppress(AssertionError, grpc.RpcError, KeyError, OSError, StopIteration):
        await rig.replicas_ready(0.1)
        return pid not in await rig.worker_pids() and len(await rig.engines()) == WORKERS
    return False


async def _known(rig: OverloadRig) -> dict[str, list[float]]:
    """A load that is known: how many requests each counts while just so many run, and once they were cancelled."""
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for number in range(KNOWN):
            channel = grpc.aio.insecure_channel(rig.routers[number % 2])
            await stack.enter_async_context(channel)
            model = rig.revisions[MODELS[number // 2 % 2]]
            request = pb.GenerateRequest(
                model=model, prompt=f"known {number}", max_tokens=1500, stop={"ignore_eos": True}
            )
            calls.append(InferenceServiceStub(channel).Generate(request, timeout=60.0))
        for call in calls:
            await call.read()
        await asyncio.sleep(1.0)  # gauges are set a few times a second
        during = _sums((await truth.look(rig)).counts)
        for call in calls:
            call.cancel()
    await truth.settled(rig)
    after = _sums((await truth.look(rig)).counts)
    return {name: [during[name], after[name]] for name in during}


def _sums(counts: dict[str, float]) -> dict[str, float]:
    """Those that count requests, over the services of a kind."""
    found: dict[str, float] = {}
    for name in ("requests_active", "attempts_in_flight", "route_in_flight", "tenant_requests_running"):
        found[f"Routers' {name}"] = sum(value for key, value in counts.items() if key.endswith(f" {name}"))
    found["Schedulers' attempts"] = sum(
        value for key, value in counts.items() if key.endswith((" attempts_active", " attempts_waiting"))
    )
    found["engines' sequences"] = counts["engines active"] + counts["engines waiting"] + counts["engines paused"]
    return found


def _rows(figures: dict[str, Any]) -> list[Row]:
    found: list[Row] = [
        (
            f"killed: {kill['what']}; requests that ran then, and back after, s",
            f"{kill['running']:.0f}, {kill['back_s']:.1f}",
            "> 0",
            kill["running"] > 0,
        )
        for kill in figures["kills"]
    ]
    found.append(("requests of polite callers", str(figures["requests"]), "", None))
    found += [(f"    {end}", str(count), "", None) for end, count in figures["ends"].items()]
    broken = len(figures["broken"])
    found += [
        ("with no end, with two, or with a hole", str(broken + figures["hung"]), "0", not broken + figures["hung"]),
        ("slowest to end, s", f"{figures['slowest_s']:.1f}", "< 11", figures["slowest_s"] < 11.0),
    ]
    for name, (during, after) in figures["known"].items():
        is_true = (during, after) == (KNOWN, 0)
        found.append((f"{name} while {KNOWN} requests run, and then", f"{during:g}, {after:g}", f"{KNOWN}, 0", is_true))
    return found
