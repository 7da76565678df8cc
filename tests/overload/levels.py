"""Offered load from half of the capacity to ten times it, from polite and from naive callers: what each gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.contract_slow import percentile
from rich.console import Group
from rich.table import Table

from headrace.control.priority import Priority
from overload import truth
from overload.floor import FLOOR
from overload.generator import Job
from overload.rig import ALIAS, SERVICE_S, SLO_S, SLOTS, TENANT_KEY, TOKENS, WORKERS, OverloadRig

NOMINAL = WORKERS * SLOTS / SERVICE_S
"""Requests a second by the engines' pace: offered load is in multiples of it, so that runs can be compared."""
LOADS = (0.5, 1.0, 3.0, 10.0)
SECONDS = 12.0
LONG = 2
"""So many times as long is what the aims are about: a 99th percentile is none of the one or two slowest."""
RAMP_S = 3.0
"""From a level's beginning, not counted: queues fill."""
CLOSED_S = 7.0
DEADLINE_S = 10.0
PROBES = 20.0
"""A second."""
REFUSE_MS = 5.0
IN_VAIN_MS = 250.0
"""A refusal that takes longer is one after a wait in vain, whatever its reason; `make sim-load` counts the same."""
GOODPUT_SHARE = 0.95
LATE = ("shed", "QUEUE_TIMEOUT", "DEADLINE_EXCEEDED")
"""Ends of a wait in a queue: these were taken in first."""
ORDINARY = "once, ordinary"
"""Callers that do not try again, with Routers and Schedulers that wait for cores like everybody."""
Row = tuple[str, str, str, bool | None]
STANDARD = 3


async def spawn(program: str, job: dict[str, Any]) -> Any:
    """Run a program of this folder with a job; returns what it printed, as JSON."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name(program)),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, _ = await process.communicate(json.dumps(job).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{program} ended with {process.returncode}"
    return json.loads(output)


def job_for(rig: OverloadRig, seconds: float, **fields: Any) -> Job:
    """A job for the generator."""
    return Job(routers=rig.routers, model=ALIAS, tokens=TOKENS, deadline_s=DEADLINE_S, seconds=seconds, **fields)


async def capacity(rig: OverloadRig) -> float:
    """Requests a second that the workers do when all slots are busy all the time, by a closed loop."""
    job = job_for(rig, CLOSED_S, callers=WORKERS * SLOTS + WORKERS)
    told = await spawn("generator.py", asdict(job))
    ends = [r["at"] + r["took_s"] for r in told["requests"] if r["end"] == "LENGTH"]
    return sum(RAMP_S / 2 <= at < CLOSED_S for at in ends) / (CLOSED_S - RAMP_S / 2)


@contextlib.asynccontextmanager
async def floor(*, first: bool) -> AsyncIterator[str]:
    """A server that refuses everything, in a process of its own; gives its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("floor.py")), *(["first"] if first else []),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def level(rig: OverloadRig, rate: float, *, kind: str, seconds: float, seed: int) -> dict[str, Any]:
    """One load for a while, and figures of it."""
    job = job_for(rig, seconds, rate=rate, kind=kind, seed=seed)
    probing = {
        "routers": rig.routers, "model": ALIAS, "tokens": TOKENS, "tenant_key": TENANT_KEY, "seed": seed,
        "rate": 1.5 * PROBES, "seconds": seconds - RAMP_S, "realtime": rig.first,
    }  # fmt: skip

    async def probes() -> Any:
        async with floor(first=rig.first) as address:
            await asyncio.sleep(max(0.0, RAMP_S - (time.monotonic() - began)))
            return await spawn("prober.py", {**probing, "floor": address})

    before, refused, began = rig.cpu_s(), await _refusals(rig), time.monotonic()
    told, probed = await asyncio.gather(spawn("generator.py", asdict(job)), probes())
    took_s = time.monotonic() - began
    cpu = {name: (used - before[name]) / took_s for name, used in rig.cpu_s().items()}
    found = figures(told, probed, seconds)
    spent = Counter({bound: count - refused[bound] for bound, count in (await _refusals(rig)).items()})
    found["router_refuse_ms"] = {
        "count": max(spent.values(), default=0.0),
        "p50": 1000 * truth.quantile(spent, 0.5),
        "p99": 1000 * truth.quantile(spent, 0.99),
    }
    routers = sum(cpu[name] for name in ("r1", "r2")) * took_s
    asked = sum(said != FLOOR for _, said in probed)
    return {**found, "cpu": cpu, "router_ms_a_call": 1000 * routers / (found["calls"] + asked)}


async def _refusals(rig: OverloadRig) -> Counter[float]:
    """The Routers' own times to refuse, since they started."""
    found: Counter[float] = Counter()
    for service in rig.of("router"):
        found += await asyncio.to_thread(
            truth.buckets,
            service.metrics,
            "headrace_router_refusal_seconds",
            "reason",
            ("OVERLOADED", "QUOTA_EXCEEDED"),
        )
    return found


def figures(told: dict[str, Any], probed: list[tuple[float, str]], seconds: float) -> dict[str, Any]:
    """What a level comes to."""
    requests = told["requests"]
    calls = [call for request in requests for call in request["calls"]]
    refused = Counter(call["said"] for call in calls if not call["events"] and call["said"] not in ("OK", "hung"))
    taken = [(r, c) for r in requests for c in r["calls"] if c["events"]]
    ttft = {
        name: [c["ttft_ms"] / 1000 for r, c in taken if c["ttft_ms"] is not None and r["priority"] >= lowest]
        for name, lowest in (("all", 0), ("interactive", STANDARD))
    }
    good = sum(
        RAMP_S <= request["at"] + request["took_s"] < seconds
        and request["end"] == "LENGTH"
        and request["took_s"] <= DEADLINE_S
        and (request["calls"][-1]["ttft_ms"] / 1000 <= SLO_S or request["priority"] < STANDARD)
        for request in requests
    )
    at_once = [c["took_ms"] for c in calls if not c["events"] and _is_at_once(c["said"])]
    late = sum(c["took_ms"] > IN_VAIN_MS for c in calls if not c["events"] and c["said"] not in ("OK", "hung"))
    probes = [took for took, said in probed if said != "accepted" and _is_at_once(said)]
    return {
        "requests": len(requests),
        "calls": len(calls),
        "accepted": len(taken),
        "refused": dict(refused.most_common()),
        "late": late,
        "by_priority": _by_priority(requests),
        "ends": dict(Counter(request["end"] for request in requests).most_common()),
        "goodput": good / (seconds - RAMP_S),
        "ttft_s": {name: spread(values) for name, values in ttft.items()},
        "refuse_ms": spread(at_once),
        "probed_refuse_ms": spread(probes),
        "floor_ms": spread([took for took, said in probed if said == FLOOR]),
        "refuse_ms_by": {
            said: spread([c["took_ms"] for c in calls if not c["events"] and c["said"] == said]) for said in refused
        },
        "generator_lag_ms": spread(told["lags_ms"]),
        "generator_cpu": told["cpu"],
        "broken": [request["broken"] for request in requests if request["broken"]],
        "loadavg": os.getloadavg()[0],
    }


def _by_priority(requests: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What was asked for, what ended well, and what waited in vain before it was refused."""
    found = {priority.name: Counter[str]() for priority in reversed(Priority)}
    for request in requests:
        counts = found[Priority(request["priority"]).name]
        counts["asked"] += 1
        counts["well"] += request["end"] == "LENGTH"
        counts["late"] += request["end"].startswith("refused") and request["calls"][-1]["took_ms"] > IN_VAIN_MS
    return {name: {key: counts[key] for key in ("asked", "well", "late")} for name, counts in found.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """How they lie; nothing where there are none."""
    if not values:
        return {"count": 0}
    return {"count": len(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}


def _is_at_once(said: str) -> bool:
    return said not in ("OK", "hung", "UNAVAILABLE", FLOOR) and not any(word in said for word in LATE)


async def measure(rig: OverloadRig, *, seconds: float) -> tuple[dict[str, Any], list[Row], Group]:
    """All loads, each from both kinds of callers; the aims, and the table of all figures."""
    found: list[dict[str, Any]] = []
    for kind in ("once", "naive"):
        for number, load in enumerate(LOADS):
            long = LONG if _is_aimed_at(load, kind) else 1
            told = await level(rig, load * NOMINAL, kind=kind, seconds=long * seconds, seed=10 + number)
            found.append({"load": load, "callers": kind, **told})
    if rig.first:
        rig.put(first=False)
        for number, load in enumerate(LOADS):
            if _is_aimed_at(load, "once"):
                told = await level(rig, load * NOMINAL, kind="once", seconds=LONG * seconds, seed=10 + number)
                found.append({"load": load, "callers": ORDINARY, **told})
        rig.put(first=True)
    return {"levels": found}, _rows(found), _table(found)


def _is_aimed_at(load: float, kind: str) -> bool:
    return load >= 3 and kind == "once"


def _rows(found: list[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    best = max(one["goodput"] for one in found)
    for one in found:
        name = f"{one['load']:g}x, {one['callers']}"
        if one["load"] >= 3:
            share = one["goodput"] / best
            aim = GOODPUT_SHARE if one["load"] == 3 and one["callers"] == "once" else None
            rows.append(
                (f"{name}: goodput as a share of the best", f"{share:.3f}", f">= {aim}" if aim else "",
                 share >= aim if aim else None)
            )  # fmt: skip
            for where, text in (("refuse_ms", "among all callers"), ("probed_refuse_ms", "to a caller apart")):
                if one[where]["count"]:
                    p99 = one[where]["p99"]
                    aims = one["callers"] == "once" and where == "probed_refuse_ms"
                    rows.append(
                        (f"{name}: time to refuse {text}, p99 of {one[where]['count']}, ms", f"{p99:.1f}",
                         f"< {REFUSE_MS:g}" if aims else "", p99 < REFUSE_MS if aims else None)
                    )  # fmt: skip
            if one["floor_ms"]["count"] and one["probed_refuse_ms"]["count"]:
                ratios = [one["probed_refuse_ms"][at] / one["floor_ms"][at] for at in ("p50", "p99")]
                said = f"{ratios[0]:.1f} / {ratios[1]:.1f}"
                rows.append((f"{name}: that, in times of a server that only refuses, p50 / p99", said, "", None))
        p99 = one["ttft_s"]["interactive"].get("p99", 0.0)
        rows.append(
            (f"{name}: p99 TTFT of accepted, STANDARD and above, s", f"{p99:.2f}", f"<= {SLO_S:g}", p99 <= SLO_S)
        )
    broken = sum(len(one["broken"]) + one["ends"].get("hung", 0) for one in found)
    rows.append(("calls that broke the contract, or hung", str(broken), "0", not broken))
    return rows


def _table(found: list[dict[str, Any]]) -> Group:
    table = Table(
        "load", "callers", "requests", "calls", "accepted", "refused", "late", "refuse, ms", "apart, ms", "floor, ms",
        "Router, ms", "goodput/s", "TTFT, s", "CPU, ms", "load avg",
        caption="pairs are p50 / p99; floor: a server that only refuses; Router: bounds of its histogram; CPU: of both"
        " Routers, for a call",
    )  # fmt: skip
    reasons = Table("load", "callers", "refused, with p50 / p99 of the time to it in ms")
    for one in found:
        where = f"{one['load']:g}x", one["callers"]
        refused = sum(one["refused"].values())
        table.add_row(
            *where, str(one["requests"]), str(one["calls"]), str(one["accepted"]), str(refused - one["late"]),
            str(one["late"]), _pair(one["refuse_ms"], 1), _pair(one["probed_refuse_ms"], 1),
            _pair(one["floor_ms"], 1),
            _pair(one["router_refuse_ms"], 0),
            f"{one['goodput']:.1f}", _pair(one["ttft_s"]["interactive"], 2), f"{one['router_ms_a_call']:.2f}",
            f"{one['loadavg']:.1f}",
        )  # fmt: skip
        told = [f"{count} {said} ({_pair(one['refuse_ms_by'][said], 0)})" for said, count in one["refused"].items()]
        if told:
            reasons.add_row(*where, "; ".join(told))
    names = list(found[0]["by_priority"])
    priorities = Table("load", "callers", *(f"{name}: asked, well, in vain" for name in names))
    for one in found:
        cells = ["{asked}, {well}, {late}".format(**one["by_priority"][name]) for name in names]
        priorities.add_row(f"{one['load']:g}x", one["callers"], *cells)
    return Group(table, priorities, reasons)


def _pair(values: dict[str, float], digits: int) -> str:
    return f"{values['p50']:.{digits}f} / {values['p99']:.{digits}f}" if values["count"] else ""
