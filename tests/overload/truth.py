"""What Routers, Schedulers and engines hold: counted by each for itself, and compared with the truth."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import psutil
from bench.contract_kills import metrics

from headrace.router.settings import RouterSettings
from overload.rig import WORKERS, OverloadRig, tritons

SETTLE_S = 20.0
MEMORY_MIB = 16.0
FDS = 6
TASKS = 2
BUDGET = RouterSettings().retry_floor / 2
"""What a Router of two may retry in 10 s without any success."""
ROUTER = (
    "requests_active", "attempts_in_flight", "route_in_flight", "resources_held", "admission_held",
    "tenant_requests_running", "followers", "requests_detached", "idempotency_writes_pending", "replicas_out",
)  # fmt: skip
SCHEDULER = (
    "attempts_active", "attempts_waiting", "attempts_staged", "queue_attempts", "queue_tokens", "queue_bytes",
    "kv_cells_reserved", "send_buffer_tokens", "send_buffer_bytes",
)  # fmt: skip
ENGINE = ("active", "waiting", "paused", "preempted", "kv_reserved", "buffered_tokens")


_BUCKET = re.compile(r"(?P<name>\w+)_bucket\{(?P<labels>[^}]*)\} (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass
class Held:
    """At one moment."""

    counts: dict[str, float]
    """All of them are 0 when nothing runs."""
    levels: dict[str, float]
    """They come back to what they were."""

    @property
    def left(self) -> dict[str, float]:
        """What is not 0."""
        return {name: value for name, value in self.counts.items() if value}


async def look(rig: OverloadRig) -> Held:
    """Ask everyone."""
    counts: dict[str, float] = {}
    levels: dict[str, float] = {}
    for kind, names in (("router", ROUTER), ("scheduler", SCHEDULER)):
        for service in rig.of(kind):
            seen = await asyncio.to_thread(metrics, service.metrics, f"headrace_{kind}_")
            counts |= {f"{service.name} {name}": seen[name] for name in names}
            if kind == "router":
                levels[f"{service.name} retry budget"] = seen["retry_budget"]
                levels[f"{service.name} tasks"] = seen["tasks"]
            else:
                levels[f"{service.name} sessions"] = seen["sessions"]
            process = psutil.Process(service.pid)
            levels[f"{service.name} file descriptors"] = process.num_fds()
            levels[f"{service.name} memory, MiB"] = process.memory_info().rss / 2**20
    engines = await rig.engines()
    for name in ENGINE:
        counts[f"engines {name}"] = sum(stats[name] for stats in engines.values())
    counts["tritonservers beside the workers"] = len(tritons()) - WORKERS
    return Held(counts, levels)


async def settled(rig: OverloadRig) -> tuple[Held, float]:
    """What is held once nothing is, or when the time is over; and after how many seconds."""
    began = time.monotonic()
    while True:
        held = await look(rig)
        took_s = time.monotonic() - began
        if not held.left or took_s > SETTLE_S:
            return held, took_s
        await asyncio.sleep(0.25)


def buckets(endpoint: str, name: str, label: str, wanted: Container[str]) -> Counter[float]:
    """A histogram of a service, over those series whose label is wanted: cumulated counts by upper bound."""
    found: Counter[float] = Counter()
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            match = _BUCKET.match(line)
            if match and match["name"] == name:
                labels = dict(_LABEL.findall(match["labels"]))
                if labels.get(label) in wanted:
                    found[float(labels["le"])] += float(match["value"])
    return found


def quantile(counts: Counter[float], share: float) -> float:
    """Upper bound of the bucket that it lies in; 0 where nothing was counted."""
    whole = max(counts.values(), default=0.0)
    return min((bound for bound, count in counts.items() if whole and count >= share * whole), default=0.0)


async def ended(rig: OverloadRig) -> int:
    """Attempts that have ended, over all Schedulers that run."""
    seen = [await asyncio.to_thread(metrics, service.metrics, "headrace_scheduler_") for service in rig.of("scheduler")]
    return round(sum(one.get("attempts_ended_total", 0.0) for one in seen))


def rows(before: Held, after: Held, settle_s: float) -> list[Any]:
    """What is left, and the levels against those before."""
    left = ", ".join(f"{name} {value:g}" for name, value in after.left.items())
    found: list[Any] = [
        (f"counts that are not 0, of {len(after.counts)}", left or "none", "none", not after.left),
        ("until then, s", f"{settle_s:.1f}", f"< {SETTLE_S:.0f}", settle_s < SETTLE_S),
    ]
    for name, value in after.levels.items():
        was = before.levels.get(name, 0.0)
        if "retry budget" in name:
            aim, met = f">= {BUDGET:g}, its floor", value >= BUDGET - 0.01
        else:
            more = MEMORY_MIB if "memory" in name else FDS if "descriptors" in name else TASKS if "tasks" in name else 0
            aim, met = f"<= +{more:g}", value <= was + more
        found.append((name, f"{was:.1f} -> {value:.1f}", aim, met))
    return found
