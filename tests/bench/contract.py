"""What the request contract is worth on the real stack: slow readers, cancels, killed clients, broken connections.

    make contract            or: python tests/bench/contract.py [--only slow cancel kills resume] [--scale 1.0]

slow     one of 16 readers of a fast engine (2,000 tokens/s) stops for 10 s: what is generated beyond what it read, and
         what the 15 others notice
cancel   from a client's asking for the end to the engine's stop, at 16 streams
kills    clients are killed with their streams: what is left of them in engine, Scheduler and Router
resume   connections break while requests run: the transcripts against those of undisturbed requests

Ratios come from pairs measured in turn. The figures go to build/reports/contract.json too. Exit code 1: some aim is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from bench import contract_kills, contract_resume, contract_slow  # noqa: E402
from bench.contract_slow import FAST, STEADY, percentile  # noqa: E402
from headrace.api.registry.v1 import resources_pb2  # noqa: E402
from headrace.cli.registration import Admin, Execution  # noqa: E402
from headrace.client import AsyncClient, Cancelled  # noqa: E402
from support import stack as stacks  # noqa: E402

CONFIG = """
[router]
output_tokens_max = 200000
credit_window_tokens_max = 4096
"""
CANCELS = 200
STREAMS = 16
STEP_MS = 20.0
Row = tuple[str, str, str, bool | None]
"""What, the figure, the aim, and whether it is met (None: there is none)."""

console = Console()


def add_engines(stack: stacks.RunningStack) -> None:
    """Serve two more synthetic engines beside the one at 50 tokens/s a sequence."""
    with Admin(stack.registry) as admin:
        for name, rate in ((FAST, 2000.0), (STEADY, 2000.0 / STREAMS)):
            execution = Execution(
                context_tokens=65_536, slots=STREAMS, kv_cells=STREAMS * 65_536, decode_tokens_per_s=rate
            )
            revision = admin.add(name=name, engine=resources_pb2.Execution.ENGINE_SYNTHETIC, execution=execution)
            admin.wait_ready(revision, 60.0, lambda text: None)


async def measure(stack: stacks.RunningStack, parts: list[str], scale: float, report: dict[str, Any]) -> bool:
    """All parts, in one event loop: grpc.aio copes badly with several. Returns whether every aim is met."""
    is_met = True
    for part in parts:
        with console.status(f"measuring: {part}"):
            report[part], rows = await MEASURES[part](stack, scale)
        is_met &= show(part, rows)
    return is_met


async def measure_cancels(stack: stacks.RunningStack, scale: float) -> tuple[dict[str, Any], list[Row]]:
    """The figures and their table."""
    figures = await cancels(stack.router, max(STREAMS, round(CANCELS * scale)))
    return figures, cancel_rows(figures)


async def cancels(router: str, samples: int) -> dict[str, Any]:
    """Cancel one of 16 streams after the other; each is replaced at once."""
    heard_ms: list[float] = []
    stopped_ms: list[float] = []
    freed_ms: list[float] = []
    loop = asyncio.get_running_loop()
    async with AsyncClient(router) as client:

        async def one(number: int, turns: int) -> None:
            for turn in range(turns):
                stream = client.generate(f"cancel {number} {turn}", model=stacks.SYNTHETIC, max_tokens=3000)
                asked = 0.0
                try:
                    async for event in stream:
                        # Each at another phase of the engine's step, and not all at once.
                        if event.sequence == 4 + number % 5 and not asked:
                            await asyncio.sleep(0.0013 * number)
                            asked = loop.time()
                            stream.cancel()
                except Cancelled:
                    heard_ms.append(1000 * (loop.time() - asked))
                timing = stream.answer.timing
                assert timing is not None, "no terminal event came"
                assert timing.cancel_to_stopped_s is not None, "the engine's stop is not known"
                assert timing.cancel_to_freed_s is not None
                stopped_ms.append(1000 * timing.cancel_to_stopped_s)
                freed_ms.append(1000 * timing.cancel_to_freed_s)

        turns = -(-samples // STREAMS)
        await asyncio.gather(*(one(number, turns) for number in range(STREAMS)))
    return {
        "samples": len(heard_ms),
        "step_ms": STEP_MS,
        "client_to_confirmed_ms": {"p50": statistics.median(heard_ms), "p99": percentile(heard_ms, 0.99)},
        "router_to_stopped_ms": {"p50": statistics.median(stopped_ms), "p99": percentile(stopped_ms, 0.99)},
        "router_to_freed_ms": {"p50": statistics.median(freed_ms), "p99": percentile(freed_ms, 0.99)},
    }


def cancel_rows(figures: dict[str, Any]) -> list[Row]:
    """The table of the cancels."""
    limit = 20.0 + STEP_MS
    rows: list[Row] = [("samples, at 16 streams", str(figures["samples"]), "200", figures["samples"] >= CANCELS)]
    for name, text in (
        ("client_to_confirmed_ms", "client asks -> client has the confirmation, ms"),
        ("router_to_stopped_ms", "Router asks -> engine has stopped, ms"),
        ("router_to_freed_ms", "Router asks -> slot and KV are free, ms"),
    ):
        figure = figures[name]
        rows.append((f"{text}, p50", f"{figure['p50']:.1f}", "", None))
        rows.append((f"{text}, p99", f"{figure['p99']:.1f}", f"< {limit:.0f}", figure["p99"] < limit))
    return rows


def show(title: str, rows: list[Row]) -> bool:
    """Print one table; returns whether every aim is met."""
    table = Table(title, "figure", "aim", "")
    for what, figure, aim, met in rows:
        table.add_row(what, figure, aim, {True: "met", False: "[bold red]missed[/]", None: ""}[met])
    console.print(table)
    return all(met is not False for *_, met in rows)


def main() -> int:
    """Measure what was asked for, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = list(MEASURES)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full samples, for a quick look")
    arguments = parser.parse_args()
    scale = arguments.scale
    directory = Path(tempfile.mkdtemp(prefix="headrace-contract-"))
    config = directory / "headrace.toml"
    config.write_text(CONFIG, encoding="utf-8")
    report: dict[str, Any] = {"scale": scale}
    is_met = True
    try:
        stack = stacks.start(directory / "stack", "--engine", "synthetic", "--config", str(config))
        try:
            add_engines(stack)
            is_met = asyncio.run(measure(stack, arguments.only, scale, report))
        finally:
            stacks.stop(stack)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    out = ROOT / "build/reports/contract.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1))
    console.print(f"written to {out.relative_to(ROOT)}")
    return 0 if is_met else 1


MEASURES: dict[str, Callable[..., Awaitable[tuple[dict[str, Any], list[Row]]]]] = {
    "slow": contract_slow.measure,
    "cancel": measure_cancels,
    "kills": contract_kills.measure,
    "resume": contract_resume.measure,
}


if __name__ == "__main__":
    sys.exit(main())
