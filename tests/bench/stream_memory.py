"""What Triton's front end keeps of the event stream: its memory over time, with one request for all and with many.

    .venv/bin/python tests/bench/stream_memory.py [--seconds 60]

A real Triton with the synthetic engine: eight sequences at 230 steps a second. The figures go to
build/reports/stream_memory.json too. Exit code 1: with many requests it grows in
the second half by more than a tenth of what it grows by with one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from headrace.engine.contract import StepBatch
from headrace.runtime.tasks import cancel_and_wait
from headrace.triton import event_stream
from headrace.triton.engine_client import EngineClient
from headrace.triton.process import TritonPlan, start_triton
from headrace.triton.workspace import DEFAULT_CACHE_DIR, find_model_repository, prepare_triton

SEQUENCES = 8
STEPS_PER_S = 230.0
WARM_S = 5.0
SHARE_MAX = 0.1
ROOT = Path(__file__).resolve().parents[2]


class Asking:
    """Asks for another sequence whenever one has ended."""

    def __init__(self) -> None:
        self.client: EngineClient | None = None
        self.responses = 0
        self._asked = 0

    def ask(self) -> None:
        """One more."""
        assert self.client is not None
        self._asked += 1
        self.client.generate(
            {"seq": self._asked, "prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "credit": -1}
        )

    def on_batch(self, batch: StepBatch) -> None:
        self.responses += 1
        for event in batch.events:
            if event["type"] == "finished":
                self.ask()

    def on_refused(self, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        raise AssertionError(f"refused: {error}")


async def grown(directory: Path, responses_max: int, seconds: float) -> dict[str, float]:
    """MiB that tritonserver grows by in each half of a time, and the responses in all of it."""
    event_stream.REQUEST_RESPONSES_MAX = responses_max
    plan = TritonPlan(
        files=prepare_triton(DEFAULT_CACHE_DIR),
        model_repository=find_model_repository(None),
        engine_config={
            "engine": "synthetic", "revision": "models/bench/revisions/000000000000", "incarnation": "bench",
            "context_tokens": 8192, "slots": SEQUENCES, "max_waiting": SEQUENCES, "decode_tokens_per_s": STEPS_PER_S,
        },
        directory=directory,
        threads=1,
    )  # fmt: skip
    process, asking = start_triton(plan), Asking()
    client = asking.client = EngineClient(process.target, owner="schedulers/bench", sink=asking)
    running: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(60):
            await client.wait_loaded()
        await client.open(10)
        running = asyncio.create_task(client.run())
        for _ in range(SEQUENCES):
            asking.ask()
        server = psutil.Process(process.pid)
        await asyncio.sleep(WARM_S)
        responses, sizes = asking.responses, [server.memory_info().rss / 2**20]
        for _ in range(2):
            await asyncio.sleep(seconds / 2)
            sizes.append(server.memory_info().rss / 2**20)
        assert not running.done(), "the engine is gone"
        return {
            "responses": asking.responses - responses,
            "first_half_mib": sizes[1] - sizes[0],
            "second_half_mib": sizes[2] - sizes[1],
        }
    finally:
        if running is not None:
            await cancel_and_wait(running)
        await client.close()
        await process.stop(10)


def main() -> int:
    """Measure both, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each; default 60")
    arguments = parser.parse_args()
    own = event_stream.REQUEST_RESPONSES_MAX
    single, many = "one request for all", f"a request for {own} responses"
    table = Table("event stream", "responses", "tritonserver grew by, MiB: first half, second", "then, KiB a response")
    found = {}
    for name, responses_max in {single: 1 << 60, many: own}.items():
        with tempfile.TemporaryDirectory() as directory:
            one = found[name] = asyncio.run(grown(Path(directory), responses_max, arguments.seconds))
        halves = f"{one['first_half_mib']:.1f}, {one['second_half_mib']:.1f}"
        each = 1024 * one["second_half_mib"] / (one["responses"] / 2)
        table.add_row(name, f"{one['responses']:.0f}", halves, f"{each:.2f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    out = ROOT / "build/reports/stream_memory.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1))
    return int(found[many]["second_half_mib"] > SHARE_MAX * found[single]["second_half_mib"])


if __name__ == "__main__":
    sys.exit(main())
