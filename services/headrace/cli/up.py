"""`headrace up`: the stack in the foreground, until ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import click

from headrace.cli.places import Ports, state_home
from headrace.cli.problems import EXIT_INTERRUPTED, EXIT_USAGE, Problem
from headrace.cli.registration import Execution
from headrace.cli.show import Steps
from headrace.cli.stack import Plan, Stack
from headrace.cli.weights import check_gguf
from headrace.runtime.telemetry import configure_logging

_DEFAULT = Execution()


@click.command(short_help="Start the whole stack on this machine.")
@click.option("--model", type=click.Path(path_type=Path), metavar="FILE", help="Serve this GGUF file.")
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice(["llamacpp", "synthetic"]), default=["llamacpp"],
    show_default=True, help="llamacpp runs a model file; synthetic makes up tokens at a set rate. May be repeated.",
)  # fmt: skip
@click.option("--port-base", type=click.IntRange(0, 65532), metavar="N",
              help="Router, Registry, Scheduler and etcd on ports N to N+3; 0: any that are free. "
              "Default: 50051, 50052, 50053 and 23790.")  # fmt: skip
@click.option("--state-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Logs and etcd's data. Default: ~/.local/state/headrace.")  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="TOML file with tables [router], [scheduler] and [registry].")  # fmt: skip
@click.option("--context", "context_tokens", type=click.IntRange(16), default=_DEFAULT.context_tokens,
              show_default=True, metavar="TOKENS", help="Most tokens of one request, prompt and output.")  # fmt: skip
@click.option("--slots", type=click.IntRange(1), default=_DEFAULT.slots, show_default=True,
              help="Requests that run at a time.")  # fmt: skip
@click.option("--restart", is_flag=True, help="Start a part again when it ends, instead of stopping (for drills).")
def up(
    model: Path | None,
    engines: tuple[str, ...],
    port_base: int | None,
    state_dir: Path | None,
    config: Path | None,
    context_tokens: int,
    slots: int,
    restart: bool,
) -> None:
    """Start etcd, Registry, Scheduler, Triton and Router on this machine and keep them running.

    Ctrl-C drains and stops them in order; a second one stops at once. What was registered stays in the state
    directory and is served again next time.

    \b
    headrace up                              the default model, Gemma 3 270M, on 127.0.0.1:50051
    headrace up --model my.gguf              your own model file
    headrace up --engine synthetic           no weights: made-up tokens, for trying things out
    headrace up --port-base 0 --state-dir X  beside another stack
    """  # noqa: D301
    if model is not None:
        check_gguf(model)
        if "llamacpp" not in engines:
            raise Problem("--model needs --engine llamacpp", code=EXIT_USAGE)
    plan = Plan(
        state_dir=(state_dir or state_home()).expanduser().resolve(),
        ports=Ports.choose(port_base),
        config=config,
        engines=tuple(dict.fromkeys(engines)),
        model=model,
        execution=Execution(context_tokens=context_tokens, slots=slots, kv_cells=context_tokens * max(4, slots // 4)),
        restart=restart,
    )
    raise click.exceptions.Exit(run_stack(plan, _announce))


def run_stack(plan: Plan, use: Callable[[Stack, Steps], Awaitable[None]]) -> int:
    """Start the stack, let `use` have it, stop it; returns the exit code.

    `use` ends by returning, which stops the stack, or by ctrl-C, which cancels it.
    """
    configure_logging("up", level="error")
    return asyncio.run(_run(plan, use))


async def _run(plan: Plan, use: Callable[[Stack, Steps], Awaitable[None]]) -> int:
    steps = Steps()
    stack = Stack(plan, steps)
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def on_signal(number: int) -> None:
        if interrupted.is_set():
            stack.kill()
            os._exit(128 + number)
        interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    problem: Exception | None = None
    was_up = False
    try:
        with steps:
            await _unless(interrupted, stack.start())
        was_up = not interrupted.is_set()
        if was_up:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(stack.watch())
                await _unless(interrupted, use(stack, steps))
                watch.cancel()
    except* Exception as errors:
        problem = _first(errors)
    if interrupted.is_set() and was_up:
        steps.console.print("\nDraining; ctrl-C again stops at once.")
    stack.steps = Steps(steps.console)
    with stack.steps:
        complaints = await stack.stop()
    if problem is not None:
        raise problem
    if complaints:
        raise Problem("; ".join(complaints))
    return 0 if was_up else EXIT_INTERRUPTED


async def _unless(interrupted: asyncio.Event, work: Awaitable[None]) -> None:
    """Await `work`, or cancel it when the person has had enough."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        waiter.cancel()
        task.cancel()


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an empty group")


async def _announce(stack: Stack, steps: Steps) -> None:
    address = stack.addresses.router
    name = next(iter(stack.models))
    call = f'{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 32}}'
    steps.console.print(
        f"\nHeadrace is up: [bold]{address}[/bold] (gRPC, plaintext)  Logs: {stack.plan.state_dir / 'logs'}\n\n"
        f'  headrace generate "Once upon a time"\n'
        f"  headrace status\n",
        soft_wrap=True,
    )
    steps.console.print(
        f"  grpcurl -plaintext -d '{call}' {address} headrace.api.inference.v1.InferenceService/Generate\n",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    steps.console.print("Ctrl-C drains and stops.")
    await asyncio.Event().wait()
