"""Test x engine: what passed, what passed on a fake, what could not run. `make conformance`, and its report as JSON.

    python tests/conformance/table.py                  every engine that this machine can run
    python tests/conformance/table.py synthetic ...    these ones

An engine whose library is a fake counts as `faked`, never as passed; one that cannot be had here is `not run`, with the
reason.
Exit code: 0 when nothing failed, 1 otherwise.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "build" / "reports" / "conformance.json"
sys.path[:0] = [str(ROOT / "tests")]

from conformance.conftest import RESULTS  # noqa: E402
from conformance.providers import PROVIDERS, SELECTION, Provider  # noqa: E402

_NODE = re.compile(r"tests/conformance/test_(\w+)\.py::test_(\w+)\[(.*)\]", re.DOTALL)
PASSED, FAKED, FAILED, LACKS, NOT_RUN = "passed", "faked", "FAILED", "not declared", "not run"
_STYLES = {PASSED: "green", FAKED: "cyan", FAILED: "bold red", LACKS: "dim", NOT_RUN: "yellow"}


def run_suite(names: list[str]) -> list[dict[str, Any]]:
    """pytest in a process of its own; each test's nodeid, outcome and seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.json"
        environment = {**os.environ, SELECTION: ",".join(names), RESULTS: str(results)}
        command = [sys.executable, "-m", "pytest", "tests/conformance", "-q", "--no-header", "-p", "no:cacheprovider"]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if not results.exists():
            raise SystemExit("table: pytest wrote no results")
        found: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
        return found


def engine_of(case: str, names: list[str]) -> tuple[str, str]:
    """An engine's name may have a hyphen, as the border between two parameters has."""
    name = max((name for name in names if case == name or case.startswith(f"{name}-")), key=len)
    return name, case[len(name) + 1 :]


def _is_of(name: str, test: str, names: list[str]) -> bool:
    match = _NODE.fullmatch(test)
    return match is not None and engine_of(match[3], names)[0] == name


def judged(result: dict[str, Any], provider: Provider) -> str:
    if result["outcome"] == "failed":
        return FAILED
    if result["outcome"] == "skipped":
        return LACKS if "does not declare" in result["reason"] else NOT_RUN
    return FAKED if provider.is_faked else PASSED


def tabulate(results: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, list[str]]]:
    """Test -> engine -> verdict of each case."""
    table: dict[str, dict[str, list[str]]] = {}
    for result in results:
        match = _NODE.fullmatch(result["test"])
        if match is None:
            continue
        name, _ = engine_of(match[3], names)
        cell = table.setdefault(f"{match[1]}: {match[2].replace('_', ' ')}", {}).setdefault(name, [])
        cell.append(judged(result, PROVIDERS[name]))
    return table


def worst(verdicts: list[str]) -> str:
    """One word for all cases of a test."""
    order = (FAILED, NOT_RUN, LACKS, FAKED, PASSED)
    return min(set(verdicts), key=order.index) if verdicts else NOT_RUN


def show(table: dict[str, dict[str, list[str]]], names: list[str], console: Console) -> None:
    shown = Table("test", *names, title="Conformance: test x engine")
    for test, row in table.items():
        words = [worst(row.get(name, [])) for name in names]
        shown.add_row(test, *(f"[{_STYLES[word]}]{word}[/]" for word in words))
    console.print(shown)


def report(table: dict[str, dict[str, list[str]]], results: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The figures: counts and seconds of each engine, and the table."""
    engines = {}
    for name in names:
        counts = Counter(verdict for row in table.values() for verdict in row.get(name, []))
        seconds = sum(result["s"] for result in results if _is_of(name, result["test"], names))
        engines[name] = {
            "faked": PROVIDERS[name].is_faked,
            "not_run_because": PROVIDERS[name].missing(),
            "counts": dict(counts),
            "seconds": round(seconds, 1),
        }
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "engines": engines,
        "tests": {test: {name: worst(row.get(name, [])) for name in names} for test, row in table.items()},
    }


def failures(table: dict[str, dict[str, list[str]]]) -> int:
    """How many cases failed."""
    return sum(cell.count(FAILED) for row in table.values() for cell in row.values())


def main(arguments: list[str]) -> int:
    names = arguments or list(PROVIDERS)
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown:
        raise SystemExit(f"table: there is no engine {', '.join(unknown)}; there are {', '.join(PROVIDERS)}")
    results = run_suite([name for name in names if not PROVIDERS[name].missing()])
    table = tabulate(results, names)
    figures = report(table, results, names)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console = Console(width=max(120, 70 + 16 * len(names)))
    show(table, names, console)
    for name in names:
        one = figures["engines"][name]
        why = f"  ({one['not_run_because']})" if one["not_run_because"] else ""
        console.print(f"{name}: {one['counts']} in {one['seconds']} s{why}")
    console.print(f"written: {REPORT.relative_to(ROOT)}")
    return 1 if failures(table) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
