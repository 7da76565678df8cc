"""What the control plane does when its store, its network, its leader or its clock fails.

    make faults              or: python tests/faults/run.py [--only TEXT ...] [--keep] [--list]

Real etcd (one member, then a cluster of three), real Registries, Scheduler with Triton and the synthetic engine, and
Router; requests run all the time. The figures go to build/reports/faults.json too. Exit code 1: a law is broken, or a
fault did not really happen.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from faults import clock, rolling  # noqa: E402
from faults.cluster import CLUSTER  # noqa: E402
from faults.examine import Breaking, Outcome, examine  # noqa: E402
from faults.leaders import LEADERS  # noqa: E402
from faults.rig import rig  # noqa: E402
from faults.single import SINGLE  # noqa: E402
from headrace.runtime.telemetry import configure_logging  # noqa: E402

console = Console(width=None if sys.stdout.isatty() else 170)


async def suite(directory: Path, wanted: list[str]) -> tuple[list[Outcome], list[str]]:
    """All faults that are wanted; returns what they did, and what could not be run and why."""
    outcomes: list[Outcome] = []
    not_run: list[str] = []

    def chosen(faults: dict[str, Breaking]) -> dict[str, Breaking]:
        return {name: fault for name, fault in faults.items() if not wanted or any(w in name for w in wanted)}

    for title, faults, options in (
        ("one etcd", {**SINGLE, **LEADERS}, {}),
        ("a cluster of three", CLUSTER, {"cluster": 3}),
    ):
        await group(directory / title.replace(" ", "-"), title, chosen(faults), outcomes, **options)
    library = clock.find_library()
    if library is None:
        not_run += [f"{name}: libfaketime is not installed" for name in chosen(clock.CLOCK)]
    elif chosen(clock.CLOCK):
        place = directory / "clock"
        place.mkdir()
        environ = clock.environ(library, place / "faketime")
        await group(place, "a clock that jumps", chosen(clock.CLOCK), outcomes, environ=environ)
    await group(directory / "two-of-each", "two of each", chosen(rolling.ROLLING), outcomes, **rolling.OPTIONS)
    return outcomes, not_run


async def group(
    directory: Path, title: str, faults: dict[str, Breaking], outcomes: list[Outcome], **options: Any
) -> None:
    """Faults that share a rig."""
    if not faults:
        return
    with console.status(title) as status:
        async with rig(directory, note=lambda text: status.update(f"{title}: {text}"), **options) as made:
            for name, breaking in faults.items():
                status.update(name)
                outcome = await examine(made, name, breaking)
                outcomes.append(outcome)
                show_one(outcome)


def show_one(outcome: Outcome) -> None:
    """Tell a fault's story in a few lines."""
    colour = {"holds": "green", "BROKEN": "bold red", "INVALID": "bold yellow"}[outcome.verdict]
    console.print(f"[{colour}]{outcome.verdict}[/] {outcome.fault}", highlight=False)
    for text, holds in outcome.proofs:
        console.print(f"    {'' if holds else '[bold yellow]not true:[/] '}{text}", highlight=False)
    for text in outcome.broken[:10]:
        console.print(f"    [bold red]broken:[/] {text}", highlight=False, markup=True)


def table(outcomes: list[Outcome]) -> Table:
    """All of them."""
    made = Table(
        "fault", "for, s", "in flight", "completed", "failed", "versions", "events", "lost", "listed anew",
        "converged, s", "verdict",
    )  # fmt: skip
    for one in outcomes:
        made.add_row(
            one.fault, f"{one.seconds:.1f}", str(one.in_flight), str(one.completed), str(len(one.failures)),
            str(one.versions), str(one.promised), str(one.lost), one.relisted, f"{one.converged_s:.1f}", one.verdict,
        )  # fmt: skip
    return made


def main() -> int:
    """Run, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="faults with one of these in the name")
    parser.add_argument("--keep", action="store_true", help="keep data and logs")
    parser.add_argument("--list", action="store_true", help="print the names")
    arguments = parser.parse_args()
    names = [*SINGLE, *LEADERS, *CLUSTER, *clock.CLOCK, *rolling.ROLLING]
    if arguments.list:
        console.print("\n".join(names), highlight=False)
        return 0
    configure_logging("faults", level="critical")
    directory = Path(tempfile.mkdtemp(prefix="headrace-faults-"))
    outcomes: list[Outcome] = []
    try:
        outcomes, not_run = asyncio.run(suite(directory, arguments.only))
    finally:
        if arguments.keep:
            console.print(f"data and logs: {directory}")
        else:
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)
    console.print(table(outcomes))
    for text in not_run:
        console.print(f"[bold yellow]NOT RUN[/] {text}", highlight=False)
    out = ROOT / "build/reports/faults.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"faults": [outcome.to_json() for outcome in outcomes], "not_run": not_run}
    out.write_text(json.dumps(report, indent=1))
    console.print(f"written to {out.relative_to(ROOT)}")
    return 0 if outcomes and all(outcome.verdict == "holds" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
