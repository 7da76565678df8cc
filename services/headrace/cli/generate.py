"""`headrace generate`: one answer, as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from headrace.cli.answers import print_stream, problem_of
from headrace.cli.caller import caller_options, connect, take_caller
from headrace.cli.places import find
from headrace.cli.problems import EXIT_USAGE, Problem
from headrace.client import HeadraceError

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


_GUIDES = ("json_schema", "json_object", "regex", "choice", "grammar")
_FILE = click.Path(path_type=Path, dir_okay=False)


def _take_guide(options: dict[str, Any]) -> None:
    """What guides the answer, of which there may be one; files are read."""
    options["choice"] = list(options["choice"]) or None
    given = [f"--{name.replace('_', '-')}" for name in _GUIDES if options[name]]
    if len(given) > 1:
        raise Problem(f"{' and '.join(given)} exclude each other", code=EXIT_USAGE)
    for name in ("json_schema", "grammar"):
        options[name] = _read(name, options[name]) if options[name] is not None else None


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Problem(f"--{option.replace('_', '-')}: cannot read {path}: {why}", code=EXIT_USAGE) from None


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
@click.option(
    "--resume", "resumable", is_flag=True, help="Survive a lost connection: the request runs on, and is resumed."
)
@click.option("--priority", type=click.Choice(["sheddable", "batch", "standard", "critical"]),
              help="How much others may be served before it under load. Default: the tenant's.")  # fmt: skip
@click.option("--idempotency-key", metavar="KEY",
              help="Sent again with the same KEY it is not run again: what came of it is repeated.")  # fmt: skip
@click.option("--recover", is_flag=True, help="If its worker is lost, let another one go on behind what it wrote.")
@click.option("--affinity", "affinity_key", metavar="TEXT", help="Run where others with the same TEXT ran, if it can.")
@click.option("--json-schema", type=_FILE, metavar="FILE", help="The answer is JSON that is valid by this schema.")
@click.option("--json-object", is_flag=True, help="The answer is one JSON object.")
@click.option("--regex", metavar="PATTERN", help="The answer matches PATTERN as a whole.")
@click.option("--choice", multiple=True, metavar="TEXT", help="The answer is one of the TEXTs that are given.")
@click.option("--grammar", type=_FILE, metavar="FILE", help="The answer is of this grammar, in the engine's dialect.")
@caller_options
@click.option("--json", "as_json", is_flag=True, help="Print events, one JSON document a line.")
@click.option("--quiet", is_flag=True, help="No table at the end.")
def generate(
    prompt: str,
    model: str | None,
    chat: bool,
    system: str | None,
    resumable: bool,
    recover: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Ask for one answer to PROMPT ("-" reads it from standard input) and print it as it is generated.

    The text goes to standard output and the table of what it cost to standard error, so that a pipe gets the text
    alone. Ctrl-C cancels the request. Exit code 0 for a complete answer, 2 for a request that cannot work, 1 for
    one that failed, 130 when cancelled.

    With --resume a lost connection ends nothing: this command goes on where it was, and `headrace request resume`
    does so from elsewhere, for as long as the service keeps the events. HEADRACE_ROUTER may name several Routers of a
    fleet, with commas between them: one that is lost before the first output is replaced by another.

    \b
    headrace generate "Once upon a time" --max-tokens 64 --temperature 0
    headrace generate --chat --system "Answer in one word." "What is the capital of France?"
    cat notes.txt | headrace generate - --json
    headrace generate "A long story" --resume
    headrace generate "A river, as JSON: " --json-schema river.json
    headrace generate "Is water wet? " --choice yes --choice no
    headrace generate "Sum up: ..." --priority batch --idempotency-key report-2026-11-29 --recover
    HEADRACE_ROUTER=models.example:443 headrace generate "Hello" --tls --api-key-file ~/.headrace-key
    """  # noqa: D301
    places = find()
    model = model or places.model
    if not model:
        raise Problem("no model was named", hint="--model NAME; `headrace model list` has them", code=EXIT_USAGE)
    text = sys.stdin.read() if prompt == "-" else prompt
    options["stop"] = list(options["stop"]) or None
    _take_guide(options)
    if resumable:
        options["on_disconnect"] = "continue"
    if recover:
        options["recovery"] = "continue"
    with connect(places.router, take_caller(options)) as client:
        try:
            if chat or system:
                first = [{"role": "system", "content": system}] if system else []
                messages = [*first, {"role": "user", "content": text}]
                stream = client.generate(model=model, messages=messages, **options)
            else:
                stream = client.generate(text, model=model, **options)
        except HeadraceError as error:
            raise problem_of(error, places.router) from None
        print_stream(stream, places.router, as_json=as_json, quiet=quiet)
