"""The fleet under load, simulated: the production's classes, seeded, on a virtual clock.

    make sim-load            or: python tests/sim_load/run.py [--seed N] [--only TEXT ...] [--quick] [--list]

4 Routers, 64 replicas behind 8 Schedulers in 4 zones, 10 tenants. Admission, quotas, routing, retries and requests, the
Schedulers' ledgers, queues and control of overload are the production's; engines, network and callers are models. The
figures go to build/reports/sim_load.json too. Exit code 1: an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from sim_load.outcome import Aim, Outcome, aims, simulate  # noqa: E402
from sim_load.scenarios import GROUPS, compared, quick  # noqa: E402
from sim_load.world import Scenario  # noqa: E402

REPORT = ROOT / "build" / "reports" / "sim_load.json"
console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)


def table_of(title: str, outcomes: list[Outcome], best: float) -> Table:
    """One group."""
    made = Table(
        "scenario", "offered", "accepted", "refused", "in vain", "resent", "good/s", "tok/s", "of best", "TTFT p50",
        "p99, s", "Jain", "least kept", "longest wait", "starved", "low", "attempts", "drift", title=title,
        title_justify="left",
    )  # fmt: skip
    for column in made.columns[1:]:
        column.justify = "right"
    for one in outcomes:
        made.add_row(
            one.scenario, str(one.offered), str(one.accepted), str(one.refused), str(one.vain), str(one.resends),
            f"{one.goodput:.1f}", f"{one.goodput_tokens:.0f}", f"{one.goodput / best:.0%}" if best else "",
            f"{one.ttft_p50_s:.2f}", f"{one.ttft_p99_s:.2f}", f"{one.jain:.3f}", f"{one.least_kept:.0%}",
            f"{one.longest_wait_s:.1f}", f"{one.starved_s:.1f}", f"{one.starved_low_s:.1f}",
            f"{one.attempts_per_request:.3f}", str(one.drift),
        )  # fmt: skip
    return made


def compared_table(title: str, outcomes: list[Outcome]) -> Table:
    """One scenario under all policies of routing."""
    made = Table(
        "routing", "good/s", "tok/s", "refused", "in vain", "TTFT p50", "p99, s", "longest wait", "prompt kept",
        "attempts", title=title, title_justify="left",
    )  # fmt: skip
    for column in made.columns[1:]:
        column.justify = "right"
    for one in outcomes:
        made.add_row(
            one.policy, f"{one.goodput:.1f}", f"{one.goodput_tokens:.0f}", str(one.refused), str(one.vain),
            f"{one.ttft_p50_s:.2f}", f"{one.ttft_p99_s:.2f}", f"{one.longest_wait_s:.1f}", f"{one.cached:.0%}",
            f"{one.attempts_per_request:.3f}",
        )  # fmt: skip
    return made


def aims_table(found: list[Aim]) -> Table:
    """What had to come out."""
    made = Table("aim", "found", "")
    for aim in found:
        made.add_row(aim.name, aim.found, "[green]met[/]" if aim.is_met else "[bold red]MISSED[/]")
    return made


def run(seed: int, wanted: list[str], *, is_quick: bool) -> list[Outcome]:
    """All scenarios that are wanted, printed group by group."""
    everything: list[Outcome] = []

    def simulated(title: str, scenarios: list[Scenario]) -> list[Outcome]:
        chosen = [s for s in scenarios if not wanted or any(text in f"{title}: {s.name}" for text in wanted)]
        found = []
        for scenario in chosen:
            with console.status(f"{title}: {scenario.name}, {scenario.policy}"):
                found.append(simulate(quick(scenario) if is_quick else scenario, seed))
        everything.extend(found)
        return found

    for title, scenarios in GROUPS.items():
        outcomes = simulated(title, scenarios)
        if outcomes:
            best = max(one.goodput for one in outcomes) if title == "load" else 0.0
            console.print(table_of(title, outcomes, best))
    for title, scenarios in compared().items():
        outcomes = simulated(f"routing: {title}", scenarios)
        if outcomes:
            console.print(compared_table(f"routing compared: {title}, {outcomes[0].load:g}x", outcomes))
    return everything


def main() -> int:
    """Run, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="runs with one of these in the name")
    parser.add_argument("--quick", action="store_true", help="a quarter of the replicas, and no documents")
    parser.add_argument("--list", action="store_true", help="print the names")
    arguments = parser.parse_args()
    if arguments.list:
        for title, scenarios in (*GROUPS.items(), *((f"routing: {t}", s[:1]) for t, s in compared().items())):
            for scenario in scenarios:
                console.print(f"{title}: {scenario.name}")
        return 0
    outcomes = run(arguments.seed, arguments.only, is_quick=arguments.quick)
    found = aims(outcomes)
    console.print(aims_table(found))
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "seed": arguments.seed,
        "runs": [one.as_json() for one in outcomes],
        "aims": [{"aim": a.name, "found": a.found, "met": a.is_met} for a in found],
    }
    REPORT.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"{len(outcomes)} runs, {sum(one.cpu_s for one in outcomes):.0f} s of one core; figures in {REPORT}")
    return 0 if all(aim.is_met for aim in found) else 1


if __name__ == "__main__":
    sys.exit(main())
