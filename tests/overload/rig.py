"""The stack of `make overload`: the fault suite's rig with two Schedulers of two workers each and two Routers.

A Scheduler runs one worker for a revision, so two revisions stand behind one alias with equal weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import psutil
from faults.members import Members, members
from faults.readers import held_by
from faults.rig import STARTED_S, Rig, Service, end_services
from stack.engine_stats import engine_stats, workers

from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import registry_service_pb2_grpc as pb_grpc
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.parts import adopt_orphans
from headrace.cli.registration import Execution
from headrace.control.resources import ReplicaState
from headrace.rpc.channels import CLIENT_OPTIONS
from overload import realtime
from support.etcd import eventually
from support.stack import RunningStack

ALIAS = "overload"
MODELS = ("left", "right")
SLOTS = 2
RATE = 25.0
"""Tokens a second of one sequence."""
TOKENS = 20
SERVICE_S = TOKENS / RATE
WORKERS = 4
TENANTS = {"one": 0, "two": 0, "three": 0, "narrow": 8}
"""By name: requests at a time that it may have."""
TENANT_KEY = "x-tenant"
SLO_S = 4.0
"""For the first token."""
_ENVIRON = {
    "HEADRACE_ROUTER_TENANT_METADATA": TENANT_KEY,
    "HEADRACE_ROUTER_TTFT_TARGET_S": str(SLO_S),
}


class OverloadRig(Rig):
    """See the module."""

    def __init__(self, directory: Path, etcd: Members, network: contextlib.AsyncExitStack, *, first: bool) -> None:
        super().__init__(directory, etcd, network)
        self.first = first
        """Whether Routers, Schedulers and who measures them go before ordinary threads."""
        self.revisions: dict[str, str] = {}
        """By model."""
        self.execution = Execution(
            context_tokens=2048, slots=SLOTS, kv_cells=SLOTS * 2048, decode_tokens_per_s=RATE
        ).to_proto(resources_pb2.Execution.ENGINE_SYNTHETIC)

    async def _register(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            stub = pb_grpc.RegistryServiceStub(channel)
            targets = []
            for model in MODELS:
                request = pb.CreateRevisionRequest(
                    model=f"models/{model}", revision=resources_pb2.Revision(execution=self.execution)
                )
                self.revision = (await stub.CreateRevision(request, timeout=5)).revision.name
                self.revisions[model] = self.revision
                targets.append(resources_pb2.AliasTarget(revision=self.revision, weight=1))
            alias = resources_pb2.Alias(name=f"aliases/{ALIAS}", targets=targets)
            await stub.SetAlias(pb.SetAliasRequest(alias=alias), timeout=5)
            for name, concurrency in TENANTS.items():
                made = resources_pb2.Tenant(
                    name=f"tenants/{name}",
                    concurrency=concurrency,
                    priority_ceiling=inference_pb2.PRIORITY_CRITICAL,
                )
                await stub.SetTenant(pb.SetTenantRequest(tenant=made), timeout=5)

    @property
    def routers(self) -> list[str]:
        """Addresses of both, running or not."""
        return [service.address for service in self.services.values() if service.kind == "router"]

    async def replicas_ready(self, timeout_s: float = STARTED_S) -> None:
        """Wait until the store's snapshot has every worker as ready, and so has its Scheduler."""

        async def is_so() -> bool:
            found = (await held_by(self.store, 5.0)).replicas
            ready = [r for r in found if r.state is ReplicaState.READY]
            if len(ready) != WORKERS or len(found) != WORKERS:
                return False
            with contextlib.suppress(grpc.RpcError):
                told = [await asyncio.to_thread(workers, _as_stack(service)) for service in self.of("scheduler")]
                return sum(worker.ready for by_model in told for worker in by_model.values()) == WORKERS
            return False

        await eventually(is_so, timeout_s, "all workers are ready")

    async def engines(self) -> dict[str, dict[str, Any]]:
        """What each engine says of itself, by Scheduler and model."""
        found = {}
        for service in self.of("scheduler"):
            for model in MODELS:
                found[f"{service.name} {model}"] = await asyncio.to_thread(engine_stats, _as_stack(service), model)
        return found

    def put(self, *, first: bool) -> None:
        """Let Routers and Schedulers that run go before ordinary threads, or not."""
        running = [service.pid for kind in ("router", "scheduler") for service in self.of(kind) if service.is_up]
        realtime.put(running, first=first)
        self.first = first

    def cpu_s(self) -> dict[str, float]:
        """Processor time that each service has used, and all engines together."""
        found = {
            service.name: _cpu_s(psutil.Process(service.pid)) for service in self.services.values() if service.is_up
        }
        found["engines"] = sum(_cpu_s(process) for process in tritons())
        return found

    async def generated(self) -> int:
        """Tokens that all engines have generated."""
        return sum(int(stats["generated_tokens"]) for stats in (await self.engines()).values())

    async def worker_pids(self) -> set[int]:
        """Process ids of all tritonservers that Schedulers call theirs."""
        found = [await asyncio.to_thread(workers, _as_stack(service)) for service in self.of("scheduler")]
        return {worker.pid for by_model in found for worker in by_model.values()}

    async def kill_worker(self, service: Service, model: str) -> int:
        """SIGKILL one tritonserver; returns its process id."""
        pid = (await asyncio.to_thread(workers, _as_stack(service)))[model].pid
        os.kill(pid, signal.SIGKILL)
        return int(pid)

    async def kill(self, service: Service) -> None:
        """SIGKILL the process of a service, and nothing beside it."""
        assert service.part is not None
        os.kill(service.pid, signal.SIGKILL)
        await asyncio.wait([service.part.ended], timeout=10)


def tritons() -> list[psutil.Process]:
    """All tritonservers below this process that run, also those that have lost their parent."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("tritonserver") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _as_stack(service: Service) -> RunningStack:
    """As much of a stack as asking an engine takes."""
    return cast("RunningStack", SimpleNamespace(scheduler=service.address))


@contextlib.asynccontextmanager
async def overload_rig(
    directory: Path, note: Callable[[str], None], *, first: bool = False
) -> AsyncIterator[OverloadRig]:
    """Start everything, and end it; `first`: see OverloadRig."""
    known = {child.pid for child in psutil.Process().children()}
    async with contextlib.AsyncExitStack() as stack:
        adopt_orphans()
        note("starting etcd")
        etcd = await stack.enter_async_context(members(directory, 1))
        network = await stack.enter_async_context(contextlib.AsyncExitStack())
        made = OverloadRig(directory, etcd, network, first=first)
        stack.push_async_callback(made.store.aclose)
        stack.push_async_callback(made.twin_store.aclose)
        stack.push_async_callback(end_services, made, known)
        note("starting services")
        await made.add("registry", "g1")
        await made.serving(made.services["g1"])
        await made.register()
        environ = {**_ENVIRON, **(realtime.ENVIRON if first else {})}
        for kind, name in (("scheduler", "s1"), ("scheduler", "s2"), ("router", "r1"), ("router", "r2")):
            await made.add(kind, name, environ)
        for service in (*made.of("scheduler"), *made.of("router")):
            await made.serving(service)
        note("waiting for workers")
        await made.replicas_ready()
        yield made
