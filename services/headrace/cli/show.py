"""What a person sees while something takes long: one line a step, with its time.

On a terminal the lines stay up to date; elsewhere a line is printed when a step changes. All on standard error,
so that standard output stays the result.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

State = Literal["running", "done", "failed"]


@dataclass(slots=True)
class _Step:
    name: str
    detail: str
    state: State = "running"
    started: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    spinner: Spinner = field(default_factory=lambda: Spinner("dots"))


class Steps:
    """The steps of one command, in the order in which they began."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._steps: dict[str, _Step] = {}
        self._live: Live | None = None

    def __enter__(self) -> Steps:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for step in self._steps.values():
            if step.state == "running":
                self._end(step, "failed", step.detail)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def begin(self, name: str, detail: str = "") -> None:
        """A step has begun."""
        self._steps[name] = _Step(name, detail)

    def note(self, name: str, detail: str) -> None:
        """News of a step that runs."""
        step = self._steps[name]
        if detail != step.detail:
            step.detail = detail
            if self._live is None and step.state == "running":
                self._print(step)

    def percent(self, name: str, doing: str, done: int, total: int) -> None:
        """How far a step is; only shown where a line can change."""
        if self._live is not None:
            self.note(name, f"{doing} {100 * done // max(1, total)}%")

    def done(self, name: str, detail: str = "") -> None:
        """A step has ended well."""
        self._end(self._steps[name], "done", detail)

    def failed(self, name: str, detail: str = "") -> None:
        """A step has ended badly."""
        self._end(self._steps[name], "failed", detail)

    def _end(self, step: _Step, state: State, detail: str) -> None:
        step.state, step.detail = state, detail
        step.seconds = time.monotonic() - step.started
        if self._live is None:
            self._print(step)

    def _print(self, step: _Step) -> None:
        seconds = f" ({step.seconds:.1f} s)" if step.seconds is not None else ""
        mark = {"running": "...", "done": "ok", "failed": "failed"}[step.state]
        self.console.print(f"{step.name:<14} {mark:<6} {step.detail}{seconds}", markup=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for step in self._steps.values():
            mark: RenderableType = step.spinner
            if step.state != "running":
                mark = Text("✓", "green") if step.state == "done" else Text("✗", "red")
            seconds = time.monotonic() - step.started if step.seconds is None else step.seconds
            table.add_row(mark, step.name, Text(f"{seconds:5.1f} s", "dim"), Text(step.detail, overflow="ellipsis"))
        return Group(table)


def print_json(document: object) -> None:
    """The result as JSON, on standard output."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))
