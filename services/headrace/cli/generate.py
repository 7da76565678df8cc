"""`headrace generate`: one answer, as it comes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import click
from rich.console import Console

from headrace.cli.answers import event_line, problem_of, usage_table
from headrace.cli.places import find
from headrace.cli.problems import EXIT_INTERRUPTED, EXIT_USAGE, Problem
from headrace.client import Cancelled, Client, Delta, Event, HeadraceError, Stream

_SAMPLING = (
    ("temperature", float, "0 always takes the likeliest token; up to 10."),
    ("top-k", int, "Draw among the k likeliest tokens; 0 is off."),
    ("top-p", float, "Draw among the likeliest tokens that reach this probability; 1 is off."),
    ("min-p", float, "Drop tokens below this share of the likeliest one's probability."),
    ("repetition-penalty", float, "Above 1 discourages tokens seen before."),
    ("presence-penalty", float, "-2 to 2, once for tokens seen before."),
    ("frequency-penalty", float, "-2 to 2, for each time a token was seen."),
    ("seed", int, "Fixes the random draws."),
)


def _sampling_options(command: Any) -> Any:
    for name, kind, text in reversed(_SAMPLING):
        command = click.option(f"--{name}", type=kind, help=text, metavar="N")(command)
    return command


@click.command(short_help="Stream one answer to standard output.")
@click.argument("prompt")
@click.option(
    "--model", metavar="NAME", help="Alias or exact revision. Default: HEADRACE_MODEL, or that of `headrace up`."
)
@click.option("--chat", is_flag=True, help="Send PROMPT as a user's message, through the model's chat template.")
@click.option("--system", metavar="TEXT", help="A system message before it; implies --chat.")
@click.option("--max-tokens", type=int, metavar="N", help="At most this many tokens.")
@_sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end.")
@click.option(
    "--top-logprobs", type=int, metavar="N", help="With --json: each token's log probability and N alternatives."
)
@click.option(
    "--timeout", "timeout_s", type=float, metavar="SECONDS", help="Deadline of the whole request. Default: 300."
)
@click.option("--json", "as_json", is_flag=True, help="Print events, one JSON document a line.")
@click.option("--quiet", is_flag=True, help="No table at the end.")
def generate(
    prompt: str, model: str | None, chat: bool, system: str | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Ask for one answer to PROMPT ("-" reads it from standard input) and print it as it is generated.

    The text goes to standard output and the table of what it cost to standard error, so that a pipe gets the text
    alone. Ctrl-C cancels the request. Exit code 0 for a complete answer, 2 for a request that cannot work, 1 for
    one that failed, 130 when cancelled.

    \b
    headrace generate "Once upon a time" --max-tokens 64 --temperature 0
    headrace generate --chat --system "Answer in one word." "What is the capital of France?"
    cat notes.txt | headrace generate - --json
    """  # noqa: D301
    places = find()
    model = model or places.model
    if not model:
        raise Problem("no model was named", hint="--model NAME; `headrace model list` has them", code=EXIT_USAGE)
    text = sys.stdin.read() if prompt == "-" else prompt
    options["stop"] = list(options["stop"]) or None
    with Client(places.router) as client:
        try:
            if chat or system:
                first = [{"role": "system", "content": system}] if system else []
                messages = [*first, {"role": "user", "content": text}]
                stream = client.generate(model=model, messages=messages, **options)
            else:
                stream = client.generate(text, model=model, **options)
            _print(stream, as_json=as_json)
        except HeadraceError as error:
            if error.answer is not None and error.answer.usage is not None and not quiet:
                Console(stderr=True, highlight=False).print(usage_table(error.answer))
            raise problem_of(error, places.router) from None
    if not quiet:
        Console(stderr=True, highlight=False).print(usage_table(stream.answer))


def _print(stream: Stream, *, as_json: bool) -> None:
    show: _Json | _Text = _Json() if as_json else _Text()
    with _interrupt_cancels(stream) as interrupted:
        try:
            with closing(iter(stream)) as events:
                for event in events:
                    show.event(event)
        except Cancelled:
            if not interrupted.is_set():
                raise
        finally:
            show.end()
    if interrupted.is_set():
        raise Problem("cancelled", code=EXIT_INTERRUPTED)


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
