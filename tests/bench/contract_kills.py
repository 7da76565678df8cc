"""Clients are killed, with all their streams, at random points: what is left of them in the services."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from stack.engine_stats import engine_stats

from bench.contract_slow import FAST
from support import stack as stacks

STREAMS = 500
A_CLIENT = 25
TOGETHER = 2
WARM_CLIENTS = 6
SETTLE_S = 20.0
MEMORY_MIB = 16.0
FDS = 4

Snapshot = dict[str, float]


def metrics(endpoint: str, prefix: str) -> dict[str, float]:
    """Sums of a service's metrics over their labels."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(prefix):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix(prefix)
            found[name] = found.get(name, 0.0) + float(value)
    return found


def look(stack: stacks.RunningStack, endpoints: dict[str, str]) -> Snapshot:
    """What is held now, by whom."""
    engine = engine_stats(stack, FAST)
    router = metrics(endpoints["routers"], "headrace_router_")
    scheduler = metrics(endpoints["schedulers"], "headrace_scheduler_")
    seen: Snapshot = {
        "engine: slots": engine["active"],
        "engine: waiting": engine["waiting"],
        "engine: paused": engine["paused"],
        "engine: KV cells": engine["kv_reserved"],
        "Scheduler: attempts": scheduler["attempts_active"] + scheduler["attempts_waiting"],
        "Router: requests": router["requests_active"],
        "Router: attempts": router["attempts_in_flight"],
        "Router: references": router["resources_held"],
        "Router: tasks": router["tasks"],
    }
    for part in ("router", "scheduler"):
        process = psutil.Process(stack.pid(part))
        seen[f"{part.capitalize()}: file descriptors"] = process.num_fds()
        seen[f"{part.capitalize()}: memory, MiB"] = process.memory_info().rss / 2**20
    return seen


def kill_clients(stack: stacks.RunningStack, clients: int, chance: random.Random) -> int:
    """Start clients, kill each at a random moment; returns how many streams they had opened."""
    program = Path(__file__).with_name("killed_client.py")
    opened = 0
    running: list[tuple[subprocess.Popen[bytes], float]] = []
    left = clients
    while left or running:
        while left and len(running) < TOGETHER:
            command = [sys.executable, str(program), stack.router, FAST, str(A_CLIENT), str(chance.randrange(10**6))]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert process.stdout is not None
            process.stdout.read(1)  # the first stream is open: now the clock runs
            opened += 1
            running.append((process, time.monotonic() + chance.uniform(0.05, 1.5)))
            left -= 1
        for entry in list(running):
            process, at = entry
            if time.monotonic() >= at:
                process.kill()
                process.wait(10)
                assert process.stdout is not None
                opened += len(process.stdout.read())
                process.stdout.close()
                running.remove(entry)
        time.sleep(0.01)
    return opened


def settled(stack: stacks.RunningStack, endpoints: dict[str, str]) -> tuple[Snapshot, float]:
    """What is held once nothing is held in the engine and no request runs, and after how many seconds."""
    began = time.monotonic()
    while True:
        seen = look(stack, endpoints)
        held = sum(value for name, value in seen.items() if name.startswith("engine") or name == "Router: requests")
        if not held or time.monotonic() - began > SETTLE_S:
            return seen, time.monotonic() - began
        time.sleep(0.1)


async def measure(stack: stacks.RunningStack, scale: float) -> tuple[dict[str, Any], list[Any]]:
    """In a thread: it waits for processes."""
    return await asyncio.to_thread(_measure, stack, scale)


def _measure(stack: stacks.RunningStack, scale: float) -> tuple[dict[str, Any], list[Any]]:
    """A round to warm up, the baseline, the killed streams, and what is left."""
    chance = random.Random(7)
    endpoints = stack.metrics()
    kill_clients(stack, WARM_CLIENTS, chance)
    before, _ = settled(stack, endpoints)
    time.sleep(1.0)
    before = look(stack, endpoints)
    opened, wanted = 0, max(A_CLIENT, round(STREAMS * scale))
    clients = 0
    while opened < wanted:
        batch = -(-(wanted - opened) // A_CLIENT)
        opened += kill_clients(stack, batch, chance)
        clients += batch
    _, settle_s = settled(stack, endpoints)
    time.sleep(1.0)
    after = look(stack, endpoints)
    figures = {"streams": opened, "clients": clients, "settled_s": settle_s, "before": before, "after": after}
    return figures, _rows(figures, wanted)


def _rows(figures: dict[str, Any], wanted: int) -> list[Any]:
    before, after = figures["before"], figures["after"]
    rows: list[Any] = [
        (f"streams opened by {figures['clients']} killed clients", str(figures["streams"]), f">= {wanted}",
         figures["streams"] >= wanted),
        ("until nothing was held, s", f"{figures['settled_s']:.1f}", f"< {SETTLE_S:.0f}",
         figures["settled_s"] < SETTLE_S),
    ]  # fmt: skip
    for name, value in after.items():
        slack = MEMORY_MIB if "memory" in name else FDS if "descriptors" in name else 0
        exact = "memory" not in name
        text = f"{before[name]:.0f} -> {value:.0f}" if exact else f"{before[name]:.1f} -> {value:.1f}"
        rows.append((name, text, f"<= +{slack:.0f}", value <= before[name] + slack))
    return rows
