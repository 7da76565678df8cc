"""The GPU engines themselves, with one command on a machine that has a GPU: `make test-gpu`.

For every engine whose library is installed there (or in the Python that HEADRACE_VLLM_PYTHON and its like name): the
conformance suite, an answer of a real model where HEADRACE_TEST_MODEL names a checkpoint, and a benchmark. The figures
go to build/reports/gpu.json. Without a GPU, or without a library, it says so and exits with 77, the code for skipped:
that is not a pass. `--try NAME` goes through the same steps with any engine of the suite, as a test of this program.

Exit code: 0 passed, 1 something failed, 77 not run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from conformance import table  # noqa: E402
from conformance.providers import GREEDY, PROVIDERS, REAL, SLOTS, Provider, has_gpu, running  # noqa: E402
from conformance.session import Session, connected  # noqa: E402

SKIPPED = 77
REAL_MODEL = "HEADRACE_TEST_MODEL"
REPORTS = ROOT / "build" / "reports"
QUESTION = {"prompt": "The capital of France is", "max_tokens": 16, **GREEDY}
SEQUENCES = (1, SLOTS, 4 * SLOTS)
TOKENS = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tried", choices=list(PROVIDERS), help="any engine, on any machine")
    tried = parser.parse_args().tried
    if tried is None and not has_gpu():
        return skip("there is no NVIDIA GPU on this machine")
    providers = [PROVIDERS[tried]] if tried else [one for one in REAL if not one.missing()]
    if not providers:
        return skip("; ".join(one.missing() for one in REAL))
    names = [one.name for one in providers]
    results = table.run_suite(names)
    verdicts = table.tabulate(results, names)
    report = table.report(verdicts, results, names)
    report |= {"devices": devices(), "not_run": {one.name: one.missing() for one in REAL if one.missing()}}
    is_good = table.failures(verdicts) == 0
    for provider in providers:
        figures = asyncio.run(measured(provider))
        report["engines"][provider.name] |= figures
        is_good = is_good and not figures.get("error")
    path = REPORTS / ("gpu-try.json" if tried else "gpu.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({name: report["engines"][name] for name in names}, indent=1, ensure_ascii=False))
    print(f"test-gpu: {'passed' if is_good else 'FAILED'}; written: {path.relative_to(ROOT)}")
    return 0 if is_good else 1


def skip(why: str) -> int:
    print(f"test-gpu: NOT RUN, and not passed: {why}")
    return SKIPPED


def devices() -> list[str]:
    """What the driver's own tool says of the GPUs."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return []
    return found.stdout.splitlines()


async def measured(provider: Provider) -> dict[str, Any]:
    """The real model's answer, if there is one, and the benchmark; `error` where something went wrong."""
    model = os.environ.get(REAL_MODEL, "")
    if model:
        provider = dataclasses.replace(provider, prepare=lambda directory: {"model_path": model})
    with tempfile.TemporaryDirectory() as directory:
        try:
            async with running(provider, Path(directory)) as engine, connected(engine) as session:
                figures: dict[str, Any] = {"model": model or "tiny Llama with known answers"}
                if model:
                    figures["real_model"] = await real_answer(session)
                figures["benchmark"] = [await bench(session, count) for count in SEQUENCES]
                await session.assert_idle()
        except (Exception, BaseExceptionGroup) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return figures


async def real_answer(session: Session) -> dict[str, Any]:
    """Greedy, so that the second answer is the first; that it makes sense, a person reads."""
    first = await session.answer(QUESTION)
    second = await session.answer(QUESTION)
    assert first.text.strip(), "the model said nothing"
    assert first.ids == second.ids, "two greedy answers differ"
    return {"prompt": QUESTION["prompt"], "answer": first.text.decode(), "usage": first.finished["usage"]}


async def bench(session: Session, count: int) -> Mapping[str, float]:
    """`count` sequences at once: tokens a second of all, milliseconds from submission to the first token."""
    request = {**session.engine.provider.counting, "max_tokens": TOKENS, "ignore_eos": True}
    begun = time.monotonic()
    every = [session.submit(request) for _ in range(count)]
    await session.over(*every, timeout_s=300)
    took = time.monotonic() - begun
    waits = sorted((one.finished["timing_ns"]["first_token"] - one.finished["timing_ns"]["received"]) for one in every)
    tokens = sum(one.finished["usage"]["generated"] for one in every)
    assert tokens == count * TOKENS
    return {
        "sequences": count,
        "tokens_per_s": round(tokens / took, 1),
        "first_token_ms_median": round(waits[len(waits) // 2] / 1e6, 1),
        "first_token_ms_worst": round(waits[-1] / 1e6, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
