"""`headrace request`: look at a request, end it, or go on reading it, by its name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console

from headrace.cli.answers import cost, facts_table, plain, print_stream, problem_of
from headrace.cli.caller import caller_options, connect, take_caller
from headrace.cli.places import find
from headrace.client import Client, HeadraceError, RequestInfo

_NAME = click.argument("name")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON; the default when piped.")


@click.group(short_help="Show, cancel or resume a request by its name.")
def request() -> None:
    """Look at a request that runs or ended lately, end it, or go on reading it.

    NAME is "requests/...": `headrace generate` prints it with what the answer cost, and --json in every `accepted`
    event. The service forgets a request some time after its end.

    \b
    headrace request show requests/0a1b2c
    headrace request cancel requests/0a1b2c
    headrace request resume requests/0a1b2c --after 41
    """  # noqa: D301


@request.command(short_help="Show where a request is in its life.")
@_NAME
@caller_options
@_JSON
def show(name: str, as_json: bool, **options: Any) -> None:
    """Show the state of the request NAME, where it runs, and what it has used so far.

    Exit code 2 if no Router knows it.
    """
    with _client(options) as client:
        info = client.get_request(_full(name))
    _print(info, as_json=as_json)


@request.command(short_help="End a request, whoever reads it.")
@_NAME
@caller_options
@_JSON
def cancel(name: str, as_json: bool, **options: Any) -> None:
    """End the request NAME, and show it as it is then. Its reader is told, and what it held is freed.

    One that has ended is shown as it is: the first end stands. Exit code 2 if no Router knows it.
    """
    with _client(options) as client:
        info = client.cancel_request(_full(name))
    _print(info, as_json=as_json)


@request.command(short_help="Go on reading a request.")
@_NAME
@click.option("--after", type=click.IntRange(0), default=0, metavar="N",
              help="Sequence of the last event that was read. Default: 0, all of them.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS",
              help="How long to read; the request has a deadline of its own. Default: 300.")  # fmt: skip
@caller_options
@click.option("--json", "as_json", is_flag=True, help="Print events, one JSON document a line.")
@click.option("--quiet", is_flag=True, help="No table at the end.")
def resume(name: str, after: int, timeout_s: float | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Print the events of the request NAME behind sequence N, and go on as they are generated.

    Only for requests made with `headrace generate --resume` (on_disconnect CONTINUE), and as long as the service
    keeps their events. Whoever reads it now loses it to this command. Ctrl-C cancels the request.

    \b
    headrace generate "A long story" --resume --json > story.jsonl     the connection is lost for good after event 41
    headrace request resume requests/0a1b2c --after 41 --json >> story.jsonl
    """  # noqa: D301
    router = find().router
    with _client(options) as client:
        stream = client.resume(_full(name), after, timeout_s=timeout_s)
        print_stream(stream, router, as_json=as_json, quiet=quiet)


def _full(name: str) -> str:
    return name if name.startswith("requests/") else f"requests/{name}"


@contextmanager
def _client(options: dict[str, Any]) -> Iterator[Client]:
    """A client of the stack's Router, whose refusals become one sentence."""
    router = find().router
    with connect(router, take_caller(options)) as client:
        try:
            yield client
        except HeadraceError as error:
            raise problem_of(error, router) from None


def _print(info: RequestInfo, *, as_json: bool) -> None:
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(plain(info), indent=2, ensure_ascii=False))
        return
    facts = {
        "request": info.name,
        "state": info.state.value,
        "received": f"{info.receive_time.astimezone():%Y-%m-%d %H:%M:%S}" if info.receive_time else "-",
        "revision": info.revision or "-",
        "replica": info.replica or "-",
        "attempts": str(info.attempts),
        "last event": str(info.last_sequence),
        "read now": "yes" if info.attached else "no",
        "finish reason": info.finish_reason.value if info.finish_reason else "-",
    }
    if info.failure is not None:
        facts["because"] = f"{info.failure.reason.value}: {info.failure.message}"
    Console(highlight=False).print(facts_table({**facts, **cost(info.usage, info.timing)}))
