"""The group of commands, and how every failure becomes one sentence and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

import click

_COMMANDS = {
    "demo": "headrace.cli.demo:demo",
    "up": "headrace.cli.up:up",
    "status": "headrace.cli.status:status",
    "health": "headrace.cli.health:health",
    "generate": "headrace.cli.generate:generate",
    "request": "headrace.cli.request:request",
    "model": "headrace.cli.model:model",
    "artifact": "headrace.cli.artifact:artifact",
    "revision": "headrace.cli.revision:revision",
    "alias": "headrace.cli.alias:alias",
    "tenant": "headrace.cli.tenant:tenant",
    "revoke": "headrace.cli.revoke:revoke",
    "route": "headrace.cli.route:route",
    "snapshot": "headrace.cli.snapshot:snapshot",
    "audit": "headrace.cli.audit:audit",
    "router": "headrace.cli.serve:router",
    "scheduler": "headrace.cli.serve:scheduler",
    "registry": "headrace.cli.serve:registry",
}


class _Lazy(click.Group):
    """Imports a command when it is named, so that `headrace generate` does not load the servers' code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong option or setting, 3 degraded (status), 130 interrupted.",
)
@click.version_option(package_name="headrace")
def headrace() -> None:
    """Serve language models on NVIDIA Triton: the right model, one clear end to every request.

    \b
    headrace up                          start the whole stack on this machine
    headrace generate "Once upon a time" stream an answer
    headrace request show NAME           see where a request is; or cancel it, or go on reading it
    headrace status                      see what runs, and how it is

    In a fleet each service runs on its own: headrace router, scheduler and registry, with --config.
    """  # noqa: D301


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; never shows a traceback for a failure that it knows."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        result = headrace(args=arguments, prog_name="headrace", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`headrace status | head`): nothing is left to say.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _known(error)


def _known(error: Exception) -> int:
    from headrace.cli.problems import EXIT_USAGE, Problem, from_failure
    from headrace.control.errors import Failure
    from headrace.runtime.settings import SettingsError

    if isinstance(error, SettingsError):
        click.echo(f"headrace: {error}", err=True)
        return EXIT_USAGE
    problem = from_failure(error) if isinstance(error, Failure) else error
    if not isinstance(problem, Problem):
        raise error
    click.echo(f"headrace: {problem.sentence}", err=True)
    if problem.hint:
        click.echo(f"  {problem.hint}", err=True)
    return problem.code


if __name__ == "__main__":
    main()
