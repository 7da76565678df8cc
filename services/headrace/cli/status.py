"""`headrace status`: what runs, and how it is."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.places import find
from headrace.cli.problems import EXIT_DEGRADED
from headrace.cli.survey import Report, survey

_SETTLE_S = 1.5
_GOOD = {"serving", "ready"}
_PASSING = {"loading", "warming", "created", "draining", "starting"}


@click.command(short_help="Show services, replicas, revisions and snapshot versions.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")
def status(as_json: bool) -> None:
    """Show the services that run, the replicas they offer, and the snapshot version that each of them runs.

    Exit code 0 when all is well, 3 when something is not (each is named), 1 when the Registry does not answer.
    Finds the stack that `headrace up` started, or the Registry at HEADRACE_REGISTRY.
    """
    address = find().registry
    report = survey(address)
    deadline = time.monotonic() + _SETTLE_S
    # A service that is one version behind for a moment is no news.
    while report.is_settling and time.monotonic() < deadline:
        time.sleep(0.2)
        report = survey(address)
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(report.document(), indent=2))
    else:
        _print(report, Console(highlight=False))
    raise click.exceptions.Exit(EXIT_DEGRADED if report.problems else 0)


def _print(report: Report, console: Console) -> None:
    document = report.document()
    snapshot = document["snapshot"]
    console.print(f"Snapshot {snapshot['version']} ({snapshot['digest'][:12] or 'none'}), {snapshot['age']}")
    console.print(
        table("service", document["services"], ("name", "endpoint", "state", "snapshot", "metrics", "version"))
    )
    console.print(
        table("replica", document["replicas"], ("name", "revision", "state", "health", "slots", "restarts", "detail"))
    )
    console.print(table("alias", document["aliases"], ("name", "targets")))
    console.print(table("revision", document["revisions"], ("name", "engine", "context", "slots", "artifact")))
    for problem in report.problems:
        console.print(Text(f"! {problem}", "yellow"))
    if not report.problems:
        console.print(Text("All is well.", "green"))


def table(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Table:
    """A table of `rows`; the column "name" is called `title`."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(title if column == "name" else column, overflow="fold")
    for row in rows:
        made.add_row(*(_cell(column, row.get(column, "")) for column in columns))
    if not rows:
        made.add_row(Text("none", "dim"))
    return made


def _cell(column: str, value: Any) -> Text:
    if isinstance(value, list):
        return Text("\n".join(f"{target['revision']} ({target['share']})" for target in value))
    if column in {"revision", "artifact"}:
        return Text(str(value).replace("models/", "").replace("/revisions/", " ").replace("artifacts/", ""))
    if column == "state":
        return Text(str(value), "green" if value in _GOOD else "yellow" if value in _PASSING else "red")
    return Text("" if value is None else str(value))
