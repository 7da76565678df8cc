"""`headrace router`, `scheduler` and `registry`: one service in this process, as it runs in a fleet.

Every setting of a service is an option, an environment variable and a key of the config file; `--help` lists
them from the service's own declaration.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click

from headrace.runtime import priority
from headrace.runtime.garbage import keep_start
from headrace.runtime.loop import ServiceLoop
from headrace.runtime.settings import Settings, SettingsError, describe_settings, env_name, load_settings
from headrace.runtime.tasks import stop_on_signals
from headrace.runtime.telemetry import configure_logging

PARENT = "HEADRACE_PARENT_PID"
"""Set by `headrace up`: the process whose death ends this one."""
_PR_SET_PDEATHSIG = 1
_ORPHANED_S = 0.05
_KUBERNETES = re.compile(r"_(SERVICE_(HOST|PORT)|PORT)(_|$)")
"""Kubernetes sets these in every pod for a Service named, say, headrace-router."""

Run = Callable[[Any, asyncio.Event], Awaitable[None]]


def service_settings(service: str) -> type[Settings]:
    """The class that declares the settings of a service."""
    module = importlib.import_module(f"headrace.{service}.settings")
    cls = getattr(module, f"{service.capitalize()}Settings")
    assert isinstance(cls, type)
    assert issubclass(cls, Settings)
    return cls


def setting_rows(service: str) -> list[tuple[str, str, str, str]]:
    """Rows of (setting, environment variable, default, meaning), the same on every machine."""
    cls = service_settings(service)
    return [
        (field, env, _default(cls, field) or default, text if text.endswith(".") else f"{text}.")
        for field, env, default, text in describe_settings(cls, service)
    ]


def _default(cls: type[Settings], field: str) -> str:
    info = cls.model_fields[field]
    if isinstance(info.default, tuple):
        return ",".join(map(str, info.default))
    if info.default_factory is not None:
        return "this host's name" if field == "name" else "computed"
    return ""


class _Service(click.Command):
    """A command whose options are the settings of a service; they are read when it is used."""

    def __init__(self, service: str, summary: str, story: str) -> None:
        self.service = service
        super().__init__(
            service, help=f"{summary}\n\n{story}", short_help=summary, callback=self._serve, params=[_config_option()],
            epilog="A setting on the command line wins over the environment, which wins over the config file "
            f"(TOML, table [{service}]). SIGTERM or ctrl-C drains; a second one ends at once.",
        )  # fmt: skip

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if len(self.params) == 1:
            self.params += [
                click.Option([f"--{field.replace('_', '-')}"], metavar="VALUE", help=f"{text} [{env}; {default}]")
                for field, env, default, text in setting_rows(self.service)
            ]
        return super().get_params(ctx)

    def _serve(self, config: Path | None, **options: str | None) -> None:
        try:
            cls = service_settings(self.service)
            settings = load_settings(
                cls, self.service, file=config, environ=_own_environment(self.service, cls), overrides=options
            )
            run: Run = importlib.import_module(f"headrace.{self.service}.main").run
            configure_logging(self.service, level=str(getattr(settings, "log_level", "info")))
            die_with_parent()
            if getattr(settings, "realtime", False):
                priority.take(self.service)
            keep_start()
            with asyncio.Runner(loop_factory=ServiceLoop) as runner:
                runner.get_loop().set_default_executor(priority.helpers())
                runner.run(_until_stopped(run, settings))
        except SettingsError as error:
            text = str(error)
            said = text if text.startswith(self.service) else f"{self.service}: {text}"
            click.echo(f"headrace {said}", err=True)
            raise click.exceptions.Exit(2) from None


async def _until_stopped(run: Run, settings: Settings) -> None:
    try:
        await run(settings, stop_on_signals(asyncio.get_running_loop()))
    except BaseExceptionGroup as group:  # a task group's wrapping is no news to an operator
        wrong: BaseException | None = group.subgroup(SettingsError)
        while isinstance(wrong, BaseExceptionGroup):
            wrong = wrong.exceptions[0]
        if wrong is None:
            raise
        raise wrong from None


def die_with_parent() -> None:
    """When `headrace up` started this process, drain if it dies, however it dies.

    The kernel sends its signal once for each thread of a dying parent that the child passes through, and a service
    takes a second SIGTERM for impatience. So it is another signal that becomes one SIGTERM.
    """
    parent = os.environ.pop(PARENT, "")
    if parent:
        signal.signal(signal.SIGHUP, _on_orphaned)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
        if os.getppid() != int(parent):  # it died before the line above
            raise click.exceptions.Exit(1)


def _on_orphaned(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Later and not here: uvloop runs a handler twice for a signal that is raised inside another one's.
    threading.Timer(_ORPHANED_S, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _own_environment(service: str, cls: type[Settings]) -> dict[str, str]:
    """The environment, unless it has a name that looks like a setting of this service and is none: a typo."""
    prefix = env_name(service, "")
    known = {env_name(service, field) for field in cls.model_fields}
    for name in os.environ:
        if name.startswith(prefix) and name not in known and not _KUBERNETES.search(name):
            raise SettingsError(
                f"environment variable {name}: {service} has no such setting; see headrace {service} -h"
            )
    return dict(os.environ)


def _config_option() -> click.Option:
    return click.Option(
        ["--config"], type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="TOML file with settings."
    )


router = _Service(
    "router",
    "Run a Router: it answers clients.",
    "It validates requests, picks a revision and a replica from the routing snapshot that it follows in etcd, and "
    "streams numbered events with exactly one end.",
)
scheduler = _Service(
    "scheduler",
    "Run a Scheduler: it owns the Triton workers of this host.",
    "It starts or attaches to its workers, waits until they are warm, registers them in etcd under its lease, and "
    "runs the attempts that Routers send.",
)
registry = _Service(
    "registry",
    "Run a Registry: it owns artifacts, revisions and aliases.",
    "It stores them in etcd and publishes the routing snapshot that Routers and Schedulers follow. No request of a "
    "client passes through it.",
)
