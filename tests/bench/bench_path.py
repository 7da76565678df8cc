"""What the path costs: the whole of Headrace beside a bare llama.cpp loop, in one run on this machine.

    make bench-path            or: python tests/bench/bench_path.py [--rounds 3] [--only model cpu stream]

model    tokens/s of client -> Router -> Scheduler -> Triton -> llama.cpp over those of a bare batch loop
cpu      64 synthetic streams at 50 tokens/s each: CPU-seconds of Router + Scheduler for 1,000 tokens, and what was
         counted on the way (messages, wake-ups, writes for each token)
stream   64 sequences of the synthetic engine at full speed: tokens/s on the stream from engine to Scheduler

Ratios come from pairs measured in turn. The figures go to build/reports/bench-path.json too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from bench.bare_llamacpp import PROMPTS  # noqa: E402
from bench.full_speed import measure_stream  # noqa: E402
from headrace.client import AsyncClient  # noqa: E402
from support import stack as stacks  # noqa: E402

CONCURRENCY = (1, 8, 16)
TOKENS = 96
STREAMS = 64
STREAM_TOKENS = 400
PERIOD_S = 0.02
WARM_S = 1.0

console = Console()


def bare(model: Path, concurrency: int, threads: int) -> float:
    """Tokens/s of the bare loop, prompts included."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/bench/bare_llamacpp.py"), str(model), "--tokens", str(TOKENS),
         "--concurrency", str(concurrency), "--threads", str(threads)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    line = json.loads(done.stdout.splitlines()[-1])
    return float(line["tokens"] / line["seconds"])


async def path(router: str, concurrency: int) -> float:
    """Tokens/s of the whole path, from the first request's start to the last one's end."""
    async with AsyncClient(router) as client:

        async def one(prompt: str) -> int:
            stream = client.generate(
                prompt, model=stacks.MODEL, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, timeout_s=120.0
            )
            return (await stream.read()).usage.generated_tokens

        await one("A first request opens the connection.")
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt) for prompt in PROMPTS[:concurrency]))
        seconds = time.perf_counter() - started
    assert set(counts) == {TOKENS}, counts
    return sum(counts) / seconds


def measure_model(stack: stacks.RunningStack, model: Path, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Pairs of bare loop and whole path, in turn."""
    rows = []
    for concurrency in CONCURRENCY:
        pairs = []
        for _ in range(rounds):
            alone = bare(model, concurrency, threads)
            whole = asyncio.run(path(stack.router, concurrency))
            pairs.append((alone, whole))
        rows.append(
            {
                "concurrency": concurrency,
                "bare_tokens_per_s": statistics.median(a for a, _ in pairs),
                "path_tokens_per_s": statistics.median(w for _, w in pairs),
                "ratio": statistics.median(w / a for a, w in pairs),
                "ratios": [round(w / a, 3) for a, w in pairs],
            }
        )
    return rows


def scrape(endpoint: str) -> dict[str, float]:
    """Read the metrics of a service that have no labels."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {
        n: float(v)
        for n, _, v in (line.partition(" ") for line in lines if not line.startswith("#") and "{" not in line)
    }


def measure_cpu(stack: stacks.RunningStack, *, interactive: bool) -> dict[str, Any]:
    """CPU of Router and Scheduler while 64 synthetic streams run at 50 tokens/s each."""
    services = stack.metrics()
    endpoints = {"router": services["routers"], "scheduler": services["schedulers"]}
    processes = {part: psutil.Process(stack.pid(part)) for part in endpoints}

    def cpu() -> dict[str, float]:
        return {part: sum(process.cpu_times()[:2]) for part, process in processes.items()}

    async def run() -> tuple[int, float, dict[str, float], dict[str, Any]]:
        received = 0

        async def one(client: AsyncClient, number: int) -> None:
            nonlocal received
            stream = client.generate(
                f"stream number {number}", model=stacks.SYNTHETIC, max_tokens=STREAM_TOKENS, timeout_s=60.0
            )
            async for event in stream:
                received += len(getattr(event, "token_ids", ()))

        async with AsyncClient(stack.router, interactive=interactive) as client, asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(one(client, number))
            await asyncio.sleep(WARM_S)
            before, counted, tokens, at = (
                cpu(),
                {p: scrape(e) for p, e in endpoints.items()},
                received,
                time.perf_counter(),
            )
            await asyncio.sleep(STREAM_TOKENS * PERIOD_S - 2 * WARM_S)
            after, seconds = cpu(), time.perf_counter() - at
            tokens = received - tokens
            counts = {
                part: {k: v - counted[part].get(k, 0.0) for k, v in scrape(endpoint).items()}
                for part, endpoint in endpoints.items()
            }
        return tokens, seconds, {part: after[part] - before[part] for part in after}, counts

    tokens, seconds, used, counts = asyncio.run(run())
    router, scheduler = counts["router"], counts["scheduler"]
    per_token = {
        "engine responses": scheduler["headrace_scheduler_engine_messages_total"],
        "Scheduler frames written": scheduler["headrace_scheduler_frames_written_total"],
        "Scheduler wake-ups": scheduler["headrace_scheduler_writer_wakeups_total"],
        "Router frames read": router["headrace_router_frames_in_count"],
        "Router wake-ups": router["headrace_router_wakeups_count"],
        "Router writes": router["headrace_router_writes_count"],
        "Router frames written (credit)": router["headrace_router_frames_out_count"],
        "acknowledgements read": router["headrace_router_acknowledgements_count"],
    }
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "cpu_s_per_1000_tokens": {part: 1000 * value / tokens for part, value in used.items()},
        "cpu_s_per_1000_tokens_together": 1000 * sum(used.values()) / tokens,
        "per_token": {name: value / tokens for name, value in per_token.items()},
    }


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    if "model" in report:
        table = Table(
            "concurrency",
            "bare tokens/s",
            "path tokens/s",
            "path / bare",
            "aim",
            title="Whole path beside bare llama.cpp",
        )
        for row in report["model"]:
            table.add_row(
                str(row["concurrency"]), f"{row['bare_tokens_per_s']:.1f}", f"{row['path_tokens_per_s']:.1f}",
                f"{row['ratio']:.3f}", "0.900",
            )  # fmt: skip
        console.print(table)
    for key, form in (("cpu", "interactive"), ("cpu_plain", "plain")):
        if key not in report:
            continue
        cpu = report[key]
        table = Table(f"64 streams at 50 tokens/s, {form}", "figure", "aim", title="Cost of Router and Scheduler")
        table.add_row("tokens/s", f"{cpu['tokens_per_s']:.0f}", "3200")
        for part, value in cpu["cpu_s_per_1000_tokens"].items():
            table.add_row(f"CPU s per 1,000 tokens, {part}", f"{value:.4f}", "")
        table.add_row("CPU s per 1,000 tokens, together", f"{cpu['cpu_s_per_1000_tokens_together']:.4f}", "0.0600")
        for name, value in cpu["per_token"].items():
            table.add_row(f"{name} per token", f"{value:.4f}", "")
        console.print(table)
    if "stream" in report:
        stream = report["stream"]
        table = Table("engine -> Scheduler, 64 sequences, full speed", "figure", "aim", title="The event stream")
        table.add_row("tokens/s", f"{stream['tokens_per_s']:.0f}", "100000")
        table.add_row("tokens in a response", f"{stream['tokens_per_response']:.1f}", "")
        table.add_row("reader's CPU s per 1,000 tokens", f"{stream['cpu_s_per_1000_tokens']:.5f}", "")
        console.print(table)


def main() -> None:
    """Measure what was asked for, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="pairs for each concurrency")
    parser.add_argument("--only", nargs="+", choices=["model", "cpu", "stream"], default=["model", "cpu", "stream"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2, help="threads of the bare loop")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"cpus": os.cpu_count(), "threads_bare": arguments.threads}
    directory = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        if {"model", "cpu"} & set(arguments.only):
            engines = ["--engine", "llamacpp"] * ("model" in arguments.only) + ["--engine", "synthetic"]
            stack = stacks.start(directory / "stack", *engines)
            try:
                if "model" in arguments.only:
                    from headrace.cli.weights import default_model

                    report["model"] = measure_model(
                        stack, default_model(lambda text: None), arguments.rounds, arguments.threads
                    )
                if "cpu" in arguments.only:
                    report["cpu"] = measure_cpu(stack, interactive=True)
                    report["cpu_plain"] = measure_cpu(stack, interactive=False)
            finally:
                stacks.stop(stack)
        if "stream" in arguments.only:
            report["stream"] = asyncio.run(measure_stream(directory / "worker"))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(report)
    out = ROOT / "build/reports/bench-path.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1))
    console.print(f"written to {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
