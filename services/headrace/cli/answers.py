"""How an answer is shown: the table of what it cost, events as JSON, and failures as one sentence."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from rich.table import Table

from headrace.cli.problems import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, Problem
from headrace.client import Answer, Cancelled, DeadlineExceeded, Event, HeadraceError, RequestError, Unavailable
from headrace.control.errors import RULES


def usage_table(answer: Answer) -> Table:
    """What ran it, how it ended, what it cost. One row a fact: a revision's name fills half a terminal's width."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    usage, timing = answer.usage, answer.timing
    cells = {
        "revision": answer.revision or "-",
        "replica": answer.replica or "-",
        "finish reason": answer.finish_reason.value if answer.finish_reason else "-",
        "prompt tokens": f"{usage.prompt_tokens} ({usage.cached_prompt_tokens} from cache)" if usage else "-",
        "generated tokens": str(usage.generated_tokens) if usage else "-",
        "sent tokens": str(usage.sent_tokens) if usage else "-",
        "time to first token": _milliseconds(timing.time_to_first_token_s if timing else None),
        "time per output token": _milliseconds(timing.time_per_output_token_s if timing else None),
    }
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in cells.items():
        table.add_row(name, value)
    return table


def event_line(event: Event) -> str:
    """One event as one line of JSON."""
    document = {"event": type(event).__name__.lower(), **_plain(event)}
    return json.dumps(document, ensure_ascii=False)


def problem_of(error: HeadraceError, address: str) -> Problem:
    """A request that did not complete, with the table's advice."""
    code = EXIT_FAILURE
    if isinstance(error, RequestError):
        code = EXIT_USAGE
    elif isinstance(error, Cancelled):
        code = EXIT_INTERRUPTED
    if error.reason is None and isinstance(error, Unavailable):
        return Problem(
            f"the router at {address} does not answer",
            hint="start a stack with `headrace up`, or set HEADRACE_ROUTER to the address of yours",
        )
    if error.reason is None and isinstance(error, DeadlineExceeded):
        return Problem("the request took longer than its deadline", hint="allow more with --timeout, or ask for less")
    hint = RULES[error.reason].advice if error.reason else ""
    name = f"{error.reason.value}: " if error.reason else ""
    return Problem(f"{name}{error.message}", hint=hint, code=code)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Exception):
        return {"reason": _plain(getattr(value, "reason", None)), "message": str(value)}
    return value
