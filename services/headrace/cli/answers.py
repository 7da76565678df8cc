"""How an answer is shown: as it comes, the table of what it cost, events as JSON, and failures as one sentence."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.cli.problems import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, Problem
from headrace.client import (
    Accepted,
    Answer,
    Cancelled,
    DeadlineExceeded,
    Delta,
    Event,
    HeadraceError,
    Interrupted,
    Notice,
    NoticeKind,
    RequestError,
    ResumePoint,
    Stream,
    Timing,
    Unavailable,
    Usage,
)
from headrace.control.errors import RULES, Reason


def print_stream(stream: Stream, address: str, *, as_json: bool, quiet: bool) -> None:
    """Print an answer as it comes, and what it cost; ctrl-C cancels it.

    Args:
        stream: not read yet.
        address: of the Router, for the error text.
        as_json: one event a line instead of the text.
        quiet: no table, and nothing else on standard error unless it fails.

    Raises:
        Problem: it did not complete.
    """
    show: _Json | _Text = _Json() if as_json else _Text()
    try:
        with _interrupt_cancels(stream) as interrupted:
            try:
                with closing(iter(stream)) as events:
                    for event in events:
                        show.event(event)
                        if not quiet and (news := _news(event, is_replay=stream.is_replay)):
                            _console().print("\n".join(news), soft_wrap=True)
            finally:
                show.end()
    except HeadraceError as error:
        if error.answer is not None and error.answer.usage is not None and not quiet:
            _console().print(usage_table(error.answer))
        if isinstance(error, Cancelled) and interrupted.is_set():
            raise Problem("cancelled", code=EXIT_INTERRUPTED) from None
        raise problem_of(error, address, stream.resume_point) from None
    if not quiet:
        _console().print(usage_table(stream.answer))
    if interrupted.is_set():
        raise Problem("cancelled", code=EXIT_INTERRUPTED)


def _news(event: Event, *, is_replay: bool) -> list[str]:
    """What a person at a terminal should know while an answer comes."""
    news = []
    if isinstance(event, Accepted):
        if is_replay:
            news.append(
                f"{event.request} was made before with this idempotency key: this is what comes, or came, of it"
            )
        if event.retention is not None:
            news.append(f"{event.request} can be resumed for {event.retention.window_s:g} s")
    elif isinstance(event, Notice) and event.kind is NoticeKind.CONTINUED:
        how = f", {event.exactness.value}" if event.exactness else ""
        news.append(f"the worker was lost; attempt {event.attempt} goes on{how}: {event.message}")
    return news


def usage_table(answer: Answer) -> Table:
    """What ran it, how it ended, what it cost. One row a fact: a revision's name fills half a terminal's width."""
    return facts_table(
        {
            "request": answer.request or "-",
            "revision": answer.revision or "-",
            "replica": answer.replica or "-",
            "finish reason": answer.finish_reason.value if answer.finish_reason else "-",
            **cost(answer.usage, answer.timing),
        }
    )


def facts_table(facts: Mapping[str, str]) -> Table:
    """One row a fact."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def cost(usage: Usage | None, timing: Timing | None) -> dict[str, str]:
    """Tokens and times, as facts. The four counts of output stand apart: none of them stands for another."""
    used, took = usage or Usage(), timing or Timing()
    cached = f" ({used.cached_prompt_tokens} from cache)" if used.cached_prompt_tokens else ""
    reasoning = f" ({used.reasoning_tokens} of reasoning)" if used.reasoning_tokens else ""
    facts = {
        "prompt tokens": f"{used.prompt_tokens}{cached}",
        "proposed tokens": f"{used.proposed_tokens}",
        "generated tokens": f"{used.generated_tokens}{reasoning}",
        "sent tokens": f"{used.sent_tokens}",
        "acknowledged tokens": f"{used.acknowledged_tokens}",
    }
    if usage is None:
        facts = dict.fromkeys(facts, "-")
    facts["time to first token"] = _milliseconds(took.time_to_first_token_s)
    facts["time per output token"] = _milliseconds(took.time_per_output_token_s)
    if took.cancel_to_stopped_s is not None:
        facts["cancel to stopped"] = _milliseconds(took.cancel_to_stopped_s)
    if took.cancel_to_freed_s is not None:
        facts["cancel to freed"] = _milliseconds(took.cancel_to_freed_s)
    return facts


def event_line(event: Event) -> str:
    """One event as one line of JSON."""
    document = {"event": type(event).__name__.lower(), **plain(event)}
    return json.dumps(document, ensure_ascii=False)


def problem_of(error: HeadraceError, address: str, point: ResumePoint | None = None) -> Problem:
    """A request that did not complete, with the table's advice; or where to go on with it, if it may run on."""
    code = EXIT_FAILURE
    if isinstance(error, RequestError):
        code = EXIT_USAGE
    elif isinstance(error, Cancelled):
        code = EXIT_INTERRUPTED
    if error.reason is None and isinstance(error, Unavailable):
        return _unreachable(error.message, address)
    if point is not None and isinstance(error, Interrupted) and error.answer and error.answer.finish_reason is None:
        return Problem(
            error.message, hint=f"`headrace request resume {point.request} --after {point.sequence}` may go on with it"
        )
    if error.reason is None and isinstance(error, DeadlineExceeded):
        return Problem("the request took longer than its deadline", hint="allow more with --timeout, or ask for less")
    hint = RULES[error.reason].advice if error.reason else ""
    if error.reason is Reason.UNAUTHENTICATED:
        hint = "say who calls: --api-key-file FILE, or HEADRACE_API_KEY, or --tls-cert and --tls-key"
    if error.quota:
        told = (f"{v.subject}: {v.description}" if v.description != error.message else v.subject for v in error.quota)
        hint = "\n  ".join([hint, *told])
    name = f"{error.reason.value}: " if error.reason else ""
    return Problem(f"{name}{error.message}", hint=hint, code=code)


def _unreachable(details: str, address: str) -> Problem:
    """Nobody could be asked; gRPC's text tells TLS that does not fit from a Router that is not there."""
    if handshake := re.search(r"handshake failed.*?: (?:.*OPENSSL_internal:)?(.*?)(?:: OK)?$", details):
        return Problem(
            f"the router at {address} and this command do not agree on TLS: {handshake[1]}",
            hint="see --tls-ca, and --tls-cert with --tls-key; the Router's certificate must name its address",
        )
    if "failed to connect" in details and details.endswith("Socket closed"):
        return Problem(
            f"something at {address} takes the connection and closes it",
            hint="does it want TLS (--tls, --tls-ca), or a client's certificate (--tls-cert and --tls-key)?",
        )
    return Problem(
        f"the router at {address} does not answer",
        hint="start a stack with `headrace up`, or set HEADRACE_ROUTER to the address of yours",
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def plain(value: Any) -> Any:
    """A value of the SDK as what JSON knows."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Exception):
        return {"reason": plain(getattr(value, "reason", None)), "message": str(value)}
    return value


def _console() -> Console:
    return Console(stderr=True, highlight=False)


@contextmanager
def _interrupt_cancels(stream: Stream) -> Iterator[threading.Event]:
    """Make ctrl-C cancel the request; a second one is Python's own.

    KeyboardInterrupt is raised wherever Python happens to be, and is lost if that is a destructor or a callback of
    gRPC's; and there is none where a script started this in the background, which leaves SIGINT ignored.
    """
    interrupted = threading.Event()

    def on_interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted.set()
        # In a thread: the one that was interrupted may hold the very lock that cancelling takes.
        threading.Thread(target=stream.cancel, name="cancel", daemon=True).start()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class _Json:
    def event(self, event: Event) -> None:
        sys.stdout.write(event_line(event) + "\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Every line has ended."""


class _Text:
    """Text as it comes, and a newline at the end unless it has one."""

    def __init__(self) -> None:
        self._last = "\n"

    def event(self, event: Event) -> None:
        if isinstance(event, Delta) and event.text:
            sys.stdout.write(event.text)
            sys.stdout.flush()
            self._last = event.text[-1]

    def end(self) -> None:
        if self._last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
