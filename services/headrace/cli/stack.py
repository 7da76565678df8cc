"""The whole stack on this machine: etcd, Registry, Scheduler and Router as processes, and a model.

The services are started as `headrace registry` and so on: the code that runs in a fleet. They start side by
side and end in order, Router first, so that nothing that is running loses what it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.adapters.etcd_process import EtcdProcess, find_etcd
from headrace.api.registry.v1 import resources_pb2
from headrace.cli import weights
from headrace.cli.parts import Part, adopt_orphans, end_orphans
from headrace.cli.places import HOST, Addresses, Ports, own, remove_up, write_up
from headrace.cli.problems import Problem
from headrace.cli.registration import Admin, Execution, manifest, model_id
from headrace.cli.serve import PARENT, service_settings
from headrace.cli.show import Steps
from headrace.rpc.channels import CLIENT_OPTIONS
from headrace.runtime.settings import SettingsError, load_settings
from headrace.triton.process import bound_log

START_S = 90.0
LOAD_S = 600.0
STOP_MARGIN_S = 10.0
"""Beside a service's own drain_grace_s."""
_ETCD_POLL_S = 0.5
_HEALTH_POLL_S = 0.1
_RESTART_PAUSE_S = 0.5
_ORPHANED_S = 0.3
"""How long the children of a killed part take to become ours."""

T = TypeVar("T")

STOP_ORDER = ("router", "scheduler", "registry")
SYNTHETIC_MODEL = "synthetic"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, and where."""

    state_dir: Path
    ports: Ports
    ports_setting: str = "--port-base"
    config: Path | None = None
    engines: tuple[str, ...] = ("llamacpp",)
    model: Path | None = None
    """Weights for llamacpp; None is the default model."""
    execution: Execution = field(default_factory=Execution)
    restart: bool = False
    """Start a part again when it ends, instead of ending the stack."""


class Stack:
    """Use: `await start()`, `await watch()`, and always `await stop()`. Belongs to one event loop."""

    def __init__(self, plan: Plan, steps: Steps) -> None:
        self.plan = plan
        self.models: dict[str, str] = {}
        """Revision behind each alias that was registered here."""
        self.steps = steps
        """Where progress is shown; may be replaced between calls."""
        self._parts: dict[str, Part] = {}
        self._is_up = False
        self._lock: IO[bytes] | None = None
        self._grace_s: dict[str, float] = {}
        self._stopping = False
        self._etcd_log = plan.state_dir / "etcd" / "etcd.log"
        self._etcd = EtcdProcess(
            plan.state_dir / "etcd", client_port=plan.ports.etcd, setting=plan.ports_setting.lstrip("-")
        )

    @property
    def addresses(self) -> Addresses:
        """Where everything answers."""
        ports = self.plan.ports
        pids = {name: part.pid for name, part in self._parts.items()}
        return Addresses(
            router=f"{HOST}:{ports.router}",
            registry=f"{HOST}:{ports.registry}",
            scheduler=f"{HOST}:{ports.scheduler}",
            etcd=self._etcd.endpoint,
            model=next(iter(self.models), ""),
            pid=os.getpid(),
            pids={**pids, "etcd": self._etcd.pid or 0},
        )

    async def start(self) -> None:
        """Start everything and wait until a worker serves each model.

        Raises:
            Problem: a part or a worker did not come up; names it and its log.
            SettingsError: etcd did not, or a setting of a service is wrong, which is found before anything starts.
        """
        self.plan.ports.check_free(self.plan.ports_setting)
        self._grace_s = {name: self._drain_grace_s(name) for name in STOP_ORDER}
        self._lock = own(self.plan.state_dir)
        adopt_orphans()
        await self._start_etcd()
        for name in reversed(STOP_ORDER):
            await self._launch(name)
        ready = {name: asyncio.create_task(self._serving(name)) for name in STOP_ORDER}
        try:
            await ready["registry"]
            await self._register()
            await asyncio.gather(ready["scheduler"], ready["router"])
            write_up(self.plan.state_dir, self.addresses)
            self._is_up = True
            await self._load()
        finally:
            for task in ready.values():
                task.cancel()
            await asyncio.gather(*ready.values(), return_exceptions=True)

    async def watch(self) -> None:
        """Return never; ends by cancellation, or when a part ends by itself.

        Raises:
            Problem: a part has ended, and the plan does not say to start it again.
        """
        while True:
            ended = [part.ended for part in self._parts.values()]
            await asyncio.wait(ended, timeout=_ETCD_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            bound_log(self._etcd_log)
            gone = [part for part in self._parts.values() if part.ended.done()]
            if gone and not self.plan.restart:
                raise self._crash(gone[0])
            if self._etcd.pid is None and not self.plan.restart:
                raise Problem("the etcd of this stack has ended", hint=f"its log: {self._etcd_log}")
            if gone or self._etcd.pid is None:
                await self._revive(gone)

    async def stop(self) -> list[str]:
        """End everything in order; returns a sentence for each part that did not end well."""
        self._stopping = True
        if self._lock is not None:
            remove_up(self.plan.state_dir)
        complaints = []
        for name in STOP_ORDER:
            part = self._parts.pop(name, None)
            if part is None or part.ended.done():
                continue
            title = f"stop {name}"
            self.steps.begin(title, "draining")
            code = await part.stop(self._grace_s[name] + STOP_MARGIN_S)
            # Before it has come up a service may not handle SIGTERM yet; nothing was running then.
            if code == 0 or (code == -signal.SIGTERM and not self._is_up):
                self.steps.done(title)
            else:
                complaints.append(f"{part.why()} (log: {part.log})")
                self.steps.failed(title, part.why())
        if self._etcd.pid is not None:
            self.steps.begin("stop etcd")
            await self._etcd.stop()
            self.steps.done("stop etcd")
        end_orphans(())
        if self._lock is not None:
            self._lock.close()
        return complaints

    def kill(self) -> None:
        """End everything at once; for a second ctrl-C. etcd dies with this process."""
        for part in self._parts.values():
            part.kill()
        time.sleep(_ORPHANED_S)
        end_orphans(())

    async def _start_etcd(self) -> None:
        _, development_only = find_etcd()
        self.steps.begin("etcd", "starting")
        await self._etcd.start()
        note = " (3.5.1 from PyPI, for development only)" if development_only else ""
        self.steps.done("etcd", f"{self._etcd.endpoint}{note}")

    async def _launch(self, name: str) -> None:
        port = getattr(self.plan.ports, name)
        command = [sys.executable, "-P", "-m", "headrace.cli.main", name, "--listen", f"{HOST}:{port}"]
        command += ["--etcd", self._etcd.endpoint]
        if self.plan.config is not None:
            command += ["--config", str(self.plan.config)]
        if name == "scheduler":
            command += ["--state-dir", str(self.plan.state_dir / "workers")]
        environ = {**os.environ, PARENT: str(os.getpid())}
        log = self.plan.state_dir / "logs" / f"{name}.log"
        if name not in self._parts:  # one that is started again goes on in its log
            log.unlink(missing_ok=True)
        self._parts[name] = await Part.start(name, command, environ, log)

    def _drain_grace_s(self, name: str) -> float:
        settings = load_settings(service_settings(name), name, file=self.plan.config, environ=os.environ)
        return float(getattr(settings, "drain_grace_s", 0.0))

    async def _serving(self, name: str) -> None:
        """Wait until the service says SERVING."""
        address = f"{HOST}:{getattr(self.plan.ports, name)}"
        self.steps.begin(name, "starting")
        part = self._parts[name]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S
        last = "does not answer"
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while loop.time() < deadline:
                if part.ended.done():
                    raise self._crash(part)
                with contextlib.suppress(grpc.RpcError):
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        self.steps.done(name, address)
                        return
                    last = "answers, and does not serve yet"
                    self.steps.note(name, "starting, not serving yet")
                await asyncio.sleep(_HEALTH_POLL_S)
        raise Problem(f"the {name} at {address} {last} after {START_S:g} s", hint=f"its log: {part.log}")

    async def _register(self) -> None:
        for engine in self.plan.engines:
            step = "model" if engine == "llamacpp" else engine
            self.steps.begin(step, "checking the model file" if engine == "llamacpp" else "registering")
            name, revision = await self._in_thread(self._add, engine, step)
            self.models[name] = revision
            self.steps.note(step, f"{revision}: registered")

    def _add(self, engine: str, step: str) -> tuple[str, str]:
        with Admin(self.addresses.registry) as admin:
            if engine == SYNTHETIC_MODEL:
                kind = resources_pb2.Execution.ENGINE_SYNTHETIC
                execution = Execution(prefill_tokens_per_s=10_000, decode_tokens_per_s=50, slots=64, kv_cells=262_144)
                return SYNTHETIC_MODEL, admin.add(name=SYNTHETIC_MODEL, engine=kind, execution=execution)
            expected = weights.DEFAULT_SHA256 if self.plan.model is None else ""
            path = self.plan.model or weights.default_model(self.steps.console.print)
            files = manifest(
                path,
                chat_template=None,
                expected=expected,
                progress=lambda done, size: self.steps.percent(step, "SHA-256", done, size),
            )
            name = weights.DEFAULT_MODEL if self.plan.model is None else model_id(None, path)
            artifact = admin.create_artifact(files)
            kind = resources_pb2.Execution.ENGINE_LLAMACPP
            return name, admin.add(name=name, engine=kind, execution=self.plan.execution, artifact=artifact)

    async def _load(self) -> None:
        for engine, revision in zip(self.plan.engines, self.models.values(), strict=True):
            step = "model" if engine == "llamacpp" else engine
            await self._in_thread(self._wait_ready, step, revision)
            self.steps.done(step, revision)

    def _wait_ready(self, step: str, revision: str) -> None:
        def note(text: str) -> None:
            if self._stopping or self._parts["scheduler"].ended.done():
                raise Problem("the Scheduler has ended")
            self.steps.note(step, f"{revision}: {text}")

        with Admin(self.addresses.registry) as admin:
            admin.wait_ready(revision, LOAD_S, note)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run blocking work; a part that ends meanwhile is the better explanation of its failure."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except Problem:
            await asyncio.sleep(0.2)
            gone = [part for part in self._parts.values() if part.ended.done()]
            if gone and not self._stopping:
                raise self._crash(gone[0]) from None
            raise
        except asyncio.CancelledError:
            self._stopping = True
            raise

    async def _revive(self, gone: list[Part]) -> None:
        await asyncio.sleep(_RESTART_PAUSE_S)
        end_orphans({part.pid for part in self._parts.values()} | {self._etcd.pid or 0})
        if self._etcd.pid is None:
            self.steps.console.print("etcd has ended: starting it again")
            with contextlib.suppress(SettingsError):  # its port is not free yet: the next round tries again
                await self._etcd.start()
        for part in gone:
            self.steps.console.print(f"{part.why()}: starting it again", markup=False)
            await self._launch(part.name)
        write_up(self.plan.state_dir, self.addresses)

    def _crash(self, part: Part) -> Problem:
        return Problem(part.why(), hint=f"its log: {part.log}")
