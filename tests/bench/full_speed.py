"""The event stream alone: a real Triton with the synthetic engine at full speed, read as the Scheduler reads it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.engine.contract import StepBatch
from headrace.runtime.tasks import cancel_and_wait
from headrace.triton.engine_client import EngineClient
from headrace.triton.process import TritonPlan, start_triton
from headrace.triton.workspace import find_model_repository, prepare_triton

SEQUENCES = 64
TOKENS = 20_000
CACHE = Path("~/.cache/headrace").expanduser()


class Counting:
    """Counts what comes."""

    def __init__(self) -> None:
        self.tokens = 0
        self.responses = 0
        self.first_at = 0.0
        self.last_at = 0.0
        self.finished = 0
        self.done = asyncio.Event()

    def on_batch(self, batch: StepBatch) -> None:
        now = time.perf_counter()
        if batch.token_ids:
            self.first_at = self.first_at or now
            self.last_at = now
            self.tokens += len(batch.token_ids)
            self.responses += 1
        self.finished += sum(event["type"] == "finished" for event in batch.events)
        if self.finished == SEQUENCES:
            self.done.set()

    def on_refused(self, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        raise AssertionError(f"refused: {error}")


async def measure_stream(directory: Path) -> dict[str, float]:
    """Run 64 sequences and return tokens/s and what the reader spent."""
    plan = TritonPlan(
        files=prepare_triton(CACHE),
        model_repository=find_model_repository(None),
        engine_config={
            "engine": "synthetic",
            "revision": "models/bench/revisions/000000000000",
            "incarnation": "bench",
            "context_tokens": TOKENS + 64,
            "slots": SEQUENCES,
            "kv_cells": SEQUENCES * (TOKENS + 64),
            "max_waiting": SEQUENCES,
            "threads": 1,
            "prefill_chunk": 512,
            "prefill_tokens_per_s": 0.0,
            "decode_tokens_per_s": 0.0,
        },
        directory=directory,
        threads=1,
    )
    counting = Counting()
    process = start_triton(plan)
    client = EngineClient(process.target, owner="bench", sink=counting)
    reading: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(60):
            await client.wait_loaded()
        await client.open(10.0)
        reading = asyncio.create_task(client.run())
        cpu = time.process_time()
        for seq in range(1, SEQUENCES + 1):
            client.generate({"seq": seq, "prompt": f"sequence {seq}", "max_tokens": TOKENS, "credit": -1})
        async with asyncio.timeout(120):
            await counting.done.wait()
        cpu = time.process_time() - cpu
    finally:
        if reading is not None:
            await cancel_and_wait(reading)
        await client.close()
        await process.stop(10.0)
    return {
        "tokens_per_s": counting.tokens / (counting.last_at - counting.first_at),
        "tokens_per_response": counting.tokens / counting.responses,
        "cpu_s_per_1000_tokens": 1000 * cpu / counting.tokens,
    }
