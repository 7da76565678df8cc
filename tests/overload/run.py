"""What two Routers and two Schedulers do with more than they can: refusals, goodput, storms of kills, duplicates.

    make overload            or: python tests/overload/run.py [--only levels storm keys] [--quick] [--ordinary] [--keep]

levels   offered load of half, one, three and ten times the capacity, measured first; callers that take a refusal, and
         naive ones that send again at once, up to five times
storm    at three times the capacity a worker's Triton, a Scheduler and a Router are killed: what callers are told, and
         what everyone counts afterwards, against the truth
keys     200 calls with one idempotency key through two Routers, and with the Router that has it killed

Real etcd, Registry, Schedulers with Triton and the synthetic engine, Routers; callers are a process of their own. The
figures go to build/reports/overload.json too. Exit code 1: some aim is missed.

Where this user may, Routers, Schedulers and who measures them go before ordinary threads (their setting `realtime`): a
time to refuse would else be a wait for a core that callers, engines and etcd share with them. What it is then is told
beside it. `--ordinary` measures all of it so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from headrace.runtime.telemetry import configure_logging  # noqa: E402
from overload import keys, levels, realtime, storm  # noqa: E402
from overload.levels import Row  # noqa: E402
from overload.rig import OverloadRig, overload_rig  # noqa: E402

PARTS = ("levels", "storm", "keys")
console = Console(width=None if sys.stdout.isatty() else 170)


async def suite(directory: Path, parts: list[str], *, is_quick: bool, first: bool, report: dict[str, Any]) -> bool:
    """All parts that are wanted, on one rig; returns whether every aim is met."""
    is_met = True
    with console.status("starting") as status:
        async with overload_rig(directory, status.update, first=first) as rig:
            status.update("measuring the capacity")
            report["capacity"] = capacity = await levels.capacity(rig)
            told = f"capacity {capacity:.1f} requests/s in a closed loop; {levels.NOMINAL:.1f} by the engines' pace"
            console.print(told, highlight=False)
            for part in parts:
                status.update(part)
                report[part], rows = await _measure(rig, part, is_quick=is_quick)
                is_met &= show(part, rows)
    return is_met


async def _measure(rig: OverloadRig, part: str, *, is_quick: bool) -> tuple[dict[str, Any], list[Row]]:
    if part == "levels":
        figures, rows, table = await levels.measure(rig, seconds=levels.SECONDS / (2 if is_quick else 1))
        console.print(table)
        return figures, rows
    if part == "storm":
        return await storm.measure(rig, 3 * levels.NOMINAL, seconds=storm.SECONDS)
    return await keys.measure(rig, keys.CALLS // (4 if is_quick else 1))


def show(title: str, rows: list[Row]) -> bool:
    """Print one table; returns whether every aim is met."""
    table = Table(title, "figure", "aim", "")
    for what, figure, aim, met in rows:
        table.add_row(what, figure, aim, {True: "met", False: "[bold red]MISSED[/]", None: ""}[met])
    console.print(table)
    return all(met is not False for *_, met in rows)


def main() -> int:
    """Run, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="shorter levels, fewer duplicates")
    parser.add_argument("--ordinary", action="store_true", help="Routers and Schedulers wait for cores like everybody")
    parser.add_argument("--keep", action="store_true", help="keep data and logs")
    arguments = parser.parse_args()
    configure_logging("overload", level="critical")
    directory = Path(tempfile.mkdtemp(prefix="headrace-overload-"))
    report: dict[str, Any] = {"loadavg_before": os.getloadavg(), "cores": os.cpu_count()}
    report["first"] = first = not arguments.ordinary and realtime.is_allowed()
    console.print(f"Routers and Schedulers go before ordinary threads: {'yes' if first else 'no'}", highlight=False)
    began = time.monotonic()
    try:
        is_met = asyncio.run(suite(directory, arguments.only, is_quick=arguments.quick, first=first, report=report))
    finally:
        if arguments.keep:
            console.print(f"data and logs: {directory}")
        else:
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)
    report |= {"loadavg_after": os.getloadavg(), "took_s": time.monotonic() - began, "is_met": is_met}
    out = ROOT / "build/reports/overload.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1))
    load = f"{report['loadavg_before'][0]:.1f} before, {report['loadavg_after'][0]:.1f} after, {report['cores']} cores"
    console.print(f"load average {load}; took {report['took_s']:.0f} s; written to {out.relative_to(ROOT)}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
