"""Many seeded runs: `python -m sim --runs 100000`. A failing seed is shrunk and told; the exit code says so."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sim.scenario import generate
from sim.shrink import as_code, broken_law, shrink
from sim.trace import Tracer
from sim.violation import Violation
from sim.world import World

CHUNK = 250
FAILURES_MAX = 5
"""Told in full; the others are only counted."""
NEEDED = (
    # what clients do
    "cancel_frame", "cancel_request", "disconnect", "resume", "resume_live", "resume_repeats", "takeover",
    "resume_expired", "resume_not_found", "resume_not_resumable", "resume_unknown_sequence", "old_ack", "repeat_ack",
    # what befalls the service
    "kill", "hang", "told_unconfirmed", "restart", "restart_late", "link_loss", "blink", "drain",
    "drain_scheduler", "drain_router",
    "worker_lost_before_output", "worker_lost_after_output", "link_lost_before_output", "link_lost_after_output",
    # messages that come late or twice
    "late_admitted", "late_output", "late_ended", "late_incarnation", "old_version", "repeated_lost_answer",
    "repeated_dispatch", "repeated_credit", "repeated_cancel", "repeated_operation", "repeated_admit",
    "repeated_finish",
    # what follows
    "retry", "retry_paused", "push_back_obeyed", "refused_budget",
    "continue", "continued_whole", "refused_stale_epoch", "refused_draining", "refused_overloaded",
    "preempted", "resumed_after_preemption", "ran_ahead",
    "cached_prompt", "granted", "paused", "log_full", "broken_off",
    "engine_refused_queue_timeout", "engine_refused_deadline_exceeded", "refused",
    # how requests end
    "finish_stop", "finish_length", "finish_cancelled", "finish_deadline_exceeded", "finish_slow_consumer",
    "finish_interrupted", "finish_drained", "finish_rejected", "finish_failed", "reason_execution_timeout",
    "reason_queue_timeout", "reason_client_disconnected",
)  # fmt: skip
"""What has to have happened in a few thousand runs, or they prove nothing about it."""


@dataclass
class Report:
    """What many runs have shown."""

    runs: int = 0
    events: int = 0
    virtual_s: float = 0.0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(seed, law, sentence)"""

    def add(self, other: Report) -> None:
        self.runs += other.runs
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.counts += other.counts
        self.failures += other.failures

    @property
    def missing(self) -> list[str]:
        """What never happened."""
        return [name for name in NEEDED if not self.counts[name]]


def run_seeds(first: int, count: int) -> Report:
    """Runs with the seeds first, first + 1, ..."""
    report = Report(runs=count)
    for seed in range(first, first + count):
        world = World(generate(seed))
        try:
            world.run()
        except Violation as violation:
            report.failures.append((seed, violation.law, str(violation)))
        report.events += world.time.events
        report.virtual_s += world.time.now
        report.counts += world.counts
    return report


def _run_chunk(chunk: tuple[int, int]) -> Report:
    return run_seeds(*chunk)


def run_many(first: int, count: int, jobs: int, *, progress: bool = False) -> Report:
    """The same, on several cores."""
    began = time.monotonic()
    chunks = [(at, min(CHUNK, first + count - at)) for at in range(first, first + count, CHUNK)]
    report = Report()
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:
        for part in pool.imap_unordered(_run_chunk, chunks):
            report.add(part)
            if progress:
                rate = report.runs / (time.monotonic() - began)
                sys.stderr.write(f"\r{report.runs} of {count} runs, {rate:.0f}/s, {len(report.failures)} failures ")
                sys.stderr.flush()
    if progress:
        sys.stderr.write("\n")
    report.failures.sort()
    report.seconds = time.monotonic() - began
    return report


def explain(seed: int) -> str:
    """A failing seed: the law, a small scenario that breaks it, and its trace."""
    violation = broken_law(generate(seed))
    if violation is None:
        return f"seed {seed}: all laws hold"
    small = shrink(generate(seed), violation.law)
    lines: list[str] = []
    try:
        World(small).run(Tracer(lines.append).watch)
    except Violation as again:
        lines.append(f"          {again}")
    told = "\n".join(lines[-60:])
    again = f"make sim ARGS='--seed {seed} --trace'"
    return f"seed {seed}: {violation}\nAgain: {again}\nSmallest scenario found:\n{as_code(small)}\n{told}\n"


def table(report: Report) -> str:
    """For people."""
    rows = [
        ("runs", f"{report.runs}"),
        ("steps, each checked", f"{report.events}"),
        ("virtual time", f"{report.virtual_s / 3600:.1f} h"),
        ("seconds", f"{report.seconds:.1f}"),
        ("failures", f"{len(report.failures)}"),
        ("never happened", ", ".join(report.missing) or "nothing"),
    ]
    rows += [(name, str(report.counts[name])) for name in NEEDED]
    return "\n".join(f"{name:32} {value}" for name, value in rows)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; with --trace the only one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trace", action="store_true", help="tell one run step by step")
    parser.add_argument("--report", type=Path, default=Path("build/reports/sim.json"))
    options = parser.parse_args()
    if options.trace:
        return _trace(options.seed)
    report = run_many(options.seed, options.runs, options.jobs, progress=sys.stderr.isatty())
    print(table(report))
    for seed, _, _ in report.failures[:FAILURES_MAX]:
        print(explain(seed))
    options.report.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "first_seed": options.seed,
        "runs": report.runs,
        "steps": report.events,
        "virtual_s": round(report.virtual_s, 1),
        "seconds": round(report.seconds, 1),
        "failures": [{"seed": seed, "law": law, "what": what} for seed, law, what in report.failures],
        "never_happened": report.missing,
        "counts": dict(sorted(report.counts.items())),
    }
    options.report.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if report.failures or report.missing else 0


def _trace(seed: int) -> int:
    scenario = generate(seed)
    print(as_code(scenario))
    try:
        World(scenario).run(Tracer().watch)
    except Violation as violation:
        print(violation)
        return 1
    print("all laws hold")
    return 0
