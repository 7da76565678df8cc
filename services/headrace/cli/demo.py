"""`headrace demo`: the whole path once, from nothing to a streamed answer and back to nothing."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import click

from headrace.cli.answers import problem_of, usage_table
from headrace.cli.places import Ports
from headrace.cli.show import Steps
from headrace.cli.stack import Plan, Stack
from headrace.cli.up import run_stack
from headrace.cli.weights import check_gguf
from headrace.client import AsyncClient, HeadraceError

PROMPT = "The water left the river through a narrow gate of stone,"
_TOKENS = 80
_DEADLINE_S = 120.0


@click.command(short_help="Start everything, stream one answer, stop.")
@click.option("--model", type=click.Path(path_type=Path), metavar="FILE", help="Use this GGUF file.")
@click.option("--engine", type=click.Choice(["llamacpp", "synthetic"]), default="llamacpp", show_default=True,
              help="synthetic needs no weights.")  # fmt: skip
@click.option("--prompt", default=PROMPT, show_default=True, help="What to continue.")
@click.option("--max-tokens", type=click.IntRange(1), default=_TOKENS, show_default=True, help="How far.")
def demo(model: Path | None, engine: str, prompt: str, max_tokens: int) -> None:
    """Start etcd, Registry, Scheduler, Triton and Router, stream one answer, print what it cost, and stop.

    Runs beside anything else: on free ports, in a temporary directory that is removed at the end.
    """
    if model is not None:
        check_gguf(model)
    state_dir = Path(tempfile.mkdtemp(prefix="headrace-demo-"))
    plan = Plan(state_dir=state_dir, ports=Ports.choose(0), engines=(engine,), model=model)

    async def ask(stack: Stack, steps: Steps) -> None:
        address, name = stack.addresses.router, stack.addresses.model
        steps.console.print()
        sys.stdout.write(prompt)
        async with AsyncClient(address) as client:
            stream = client.generate(
                prompt, model=name, max_tokens=max_tokens, temperature=0.7, repetition_penalty=1.1, seed=7,
                timeout_s=_DEADLINE_S,
            )  # fmt: skip
            try:
                async for piece in stream.text():
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            except HeadraceError as error:
                raise problem_of(error, address) from None
            finally:
                sys.stdout.write("\n")
                sys.stdout.flush()
        steps.console.print()
        steps.console.print(usage_table(stream.answer))
        steps.console.print()

    code = run_stack(plan, ask)
    # Kept when something went wrong: the problem names a log in it.
    shutil.rmtree(state_dir, ignore_errors=True)
    raise click.exceptions.Exit(code)
