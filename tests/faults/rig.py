"""The real stack of the fault suite: etcd, proxies, services as processes, and readers, load and churn beside them.

Router ──┐                        ┌── etcd, one member or three
Scheduler├── a proxy for each ────┤
Registry ┤   service and member   │
readers ─┘                        └── a store of our own, past the proxies
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from faults.load import CHURN, MODEL, RATE, Churn, Load, Writer
from faults.members import Members, members
from faults.proxy import Proxy
from faults.readers import Reader, Twin, Versions, held_by
from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_settings import EtcdConfig
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import registry_service_pb2_grpc as pb_grpc
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.parts import Part, adopt_orphans, end_orphans
from headrace.cli.registration import Execution
from headrace.cli.serve import PARENT
from headrace.control.client_retry import RetryPolicy
from headrace.control.errors import Failure
from headrace.control.resources import ReplicaState
from headrace.control.snapshot import RoutingSnapshot
from headrace.registry.catalogue import LEADER_KEY
from headrace.rpc.channels import CLIENT_OPTIONS
from headrace.runtime.tasks import cancel_and_wait
from support.etcd import eventually, free_port

REGISTRY_TTL_S = 5
LEASE_TTL_S = 15
"""Of Router and Scheduler."""
STARTED_S = 120.0
STREAMS = 4
SLOTS = 16
TWIN_PREFIX = "/faults-twin"
_MAIN = "import os; os.environ.pop('LD_PRELOAD', 0); from headrace.cli.main import main; main()"
"""What is preloaded into a service is not for its Triton: libfaketime breaks the locks that its processes share."""


@dataclass
class Service:
    """One service of the rig."""

    kind: str
    name: str
    address: str
    metrics: str
    proxies: list[Proxy]
    part: Part | None = None
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        """Whether its process runs."""
        return self.part is not None and not self.part.ended.done()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.part is not None
        return self.part.pid


class Rig:
    """Everything that a fault may break, and what watches over it. Made by `rig`."""

    def __init__(self, directory: Path, etcd: Members, network: contextlib.AsyncExitStack) -> None:
        self.directory = directory
        self.etcd = etcd
        self._network = network
        self.services: dict[str, Service] = {}
        self.store = EtcdStore(EtcdConfig(etcd.endpoints))
        self.load: Load | None = None
        self.churn: Churn
        self.writer: Writer
        self.readers: list[Reader] = []
        self.twin: Twin
        self.reader_proxies: list[Proxy] = []
        self.reader_stores: list[EtcdStore] = []
        self.reported: dict[str, Versions] = {}
        self.revision = ""
        self.execution = Execution(
            context_tokens=4096, slots=SLOTS, kv_cells=SLOTS * 4096, decode_tokens_per_s=RATE
        ).to_proto(resources_pb2.Execution.ENGINE_SYNTHETIC)
        self.ages: dict[str, float] = {}
        """The greatest age of its snapshot that a Router told, since `ages` was cleared."""
        self.is_between_stores = False
        """While a wiped store fills again, a report may be of the old one's snapshot."""
        self.twin_store = EtcdStore(EtcdConfig(etcd.endpoints, prefix=TWIN_PREFIX))

    # Services.

    async def add(self, kind: str, name: str, environ: dict[str, str] | None = None) -> Service:
        """Start a service with proxies of its own."""
        proxies = [
            await self._network.enter_async_context(Proxy(process.client_port)) for process in self.etcd.processes
        ]
        ports = [free_port(), free_port()]
        service = Service(kind, name, f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", proxies)
        service.environ = environ or {}
        self.services[name] = service
        await self.start(service)
        return service

    async def start(self, service: Service) -> None:
        """Start it, with the addresses that it has."""
        command = [sys.executable, "-P", "-c", _MAIN, service.kind]
        command += ["--listen", service.address, "--metrics-listen", service.metrics, "--name", service.name]
        command += ["--etcd", ",".join(proxy.endpoint for proxy in service.proxies)]
        if service.kind == "registry":
            command += ["--lease-ttl-s", str(REGISTRY_TTL_S)]
        if service.kind == "scheduler":
            command += ["--state-dir", str(self.directory / "workers"), "--engines", "synthetic"]
        environ = {**os.environ, PARENT: str(os.getpid()), **service.environ}
        service.part = await Part.start(service.name, command, environ, self.directory / f"{service.name}.log")

    async def serving(self, service: Service) -> None:
        """Wait until it says that it serves."""
        async with grpc.aio.insecure_channel(service.address, options=CLIENT_OPTIONS) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def is_serving() -> bool:
                assert service.is_up, f"{service.part and service.part.why()}: {service.part and service.part.log}"
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=2)
                    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
                return False

            await eventually(is_serving, STARTED_S, f"{service.name} serves")

    def of(self, kind: str) -> list[Service]:
        """Services of one kind that run."""
        return [service for service in self.services.values() if service.kind == kind and service.is_up]

    @property
    def registries(self) -> list[str]:
        """Addresses of the Registries that run."""
        return [service.address for service in self.of("registry")]

    def proxies(self) -> list[Proxy]:
        """All ways of services and readers to etcd."""
        return [*self.reader_proxies, *(proxy for service in self.services.values() for proxy in service.proxies)]

    async def register(self, timeout_s: float = 30.0) -> None:
        """Create the revision of the load and its alias, if they are missing."""

        async def is_done() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._register(self.registries[0])
                return True
            return False

        await eventually(is_done, timeout_s, "registering the model")

    async def _register(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            stub = pb_grpc.RegistryServiceStub(channel)
            revision = resources_pb2.Revision(execution=self.execution)
            request = pb.CreateRevisionRequest(model=f"models/{MODEL}", revision=revision)
            self.revision = (await stub.CreateRevision(request, timeout=5)).revision.name
            target = resources_pb2.AliasTarget(revision=self.revision, weight=1)
            alias = resources_pb2.Alias(name=f"aliases/{MODEL}", targets=[target])
            await stub.SetAlias(pb.SetAliasRequest(alias=alias), timeout=5)

    # Looking.

    def weight(self, snapshot: RoutingSnapshot | None) -> int:
        """The weight of the alias that is changed all the time; 0 where it is missing."""
        alias = snapshot.alias_by_name.get(f"aliases/{CHURN}") if snapshot else None
        return alias.targets[0].weight if alias else 0

    async def reports(self) -> dict[str, resources_pb2.ServiceRecord]:
        """What the services say of themselves in the store."""
        listing = await self.store.range("services/", timeout_s=3.0)
        records = [resources_pb2.ServiceRecord.FromString(kv.value) for kv in listing.items]
        return {record.name.partition("/")[2]: record for record in records}

    async def watch_over(self) -> None:
        """Look at the services' reports and the Routers' gauges for ever, and remember."""
        while True:
            incarnation = self.readers[0].follower.current.incarnation if self.readers[0].follower.current else ""
            with contextlib.suppress(Failure):
                incarnation = (await self.store.head(timeout_s=1.0)).incarnation or incarnation
                for name, record in (await self.reports()).items():
                    versions = self.reported.setdefault(name, Versions(name))
                    if record.snapshot_version and not self.is_between_stores:
                        versions.note(record.snapshot_version, record.snapshot_digest, incarnation)
            for router in self.of("router"):
                with contextlib.suppress(OSError, TimeoutError):
                    gauges = await asyncio.to_thread(read_metrics, router.metrics)
                    age_s = gauges.get("headrace_router_snapshot_age_seconds", 0.0)
                    self.ages[router.name] = max(self.ages.get(router.name, 0.0), age_s)
            await asyncio.sleep(0.3)

    async def converged(self, timeout_s: float = 90.0) -> tuple[float, RoutingSnapshot, list[str]]:
        """Wait until a change made from now on has reached everyone.

        Returns:
            Seconds until then, what the store holds, and what is still missing (at the end of the time only).
        """
        began = time.monotonic()
        await self.churn.stop()
        missing = ["nothing was acknowledged"]
        snapshot: RoutingSnapshot | None = None
        acknowledged = False
        while time.monotonic() - began < timeout_s:
            acknowledged = acknowledged or await self.churn.set()
            if acknowledged:
                with contextlib.suppress(Failure, TimeoutError):
                    snapshot = await held_by(self.store, 5.0)
                    missing = await self._behind(snapshot)
                    if not missing:
                        break
            await asyncio.sleep(0.1)
        if snapshot is None:
            return time.monotonic() - began, RoutingSnapshot("", 0), missing
        return time.monotonic() - began, snapshot, missing

    async def _behind(self, snapshot: RoutingSnapshot) -> list[str]:
        missing = []
        if self.weight(snapshot) < self.churn.acknowledged:
            missing.append(f"the snapshot shows change {self.weight(snapshot)}, {self.churn.acknowledged} was promised")
        for reader in self.readers:
            current = reader.follower.current
            if current is None or (current.version, current.digest) != (snapshot.version, snapshot.digest):
                missing.append(f"{reader.versions.name} runs {current and current.version}, not {snapshot.version}")
            elif not reader.is_fresh:
                missing.append(f"{reader.versions.name} does not hear the store")
        reports = await self.reports()
        for service in self.services.values():
            if not service.is_up:
                continue
            record = reports.get(service.name)
            if record is None:
                missing.append(f"{service.name} has no record")
            elif (record.snapshot_version, record.snapshot_digest) != (snapshot.version, snapshot.digest):
                missing.append(f"{service.name} runs {record.snapshot_version}, not {snapshot.version}")
        ready = [r for r in snapshot.replicas if r.revision == self.revision and r.state is ReplicaState.READY]
        if len(ready) < len(self.of("scheduler")):
            missing.append(f"{len(ready)} replicas are ready")
        return missing

    async def twin_is_equal(self) -> bool:
        """Whether the twin holds what the store holds."""
        stored = {kv.key: kv.value for kv in (await self.twin_store.range("d/")).items}
        return self.twin.view == stored

    async def leading(self) -> Service:
        """The Registry that leads."""
        found: list[Service] = []

        async def is_known() -> bool:
            leader = await self.store.get(LEADER_KEY)
            found[:] = [s for s in self.of("registry") if leader is not None and leader.value == s.name.encode()]
            return bool(found)

        await eventually(is_known, 30, "a Registry that leads")
        return found[0]


def read_metrics(endpoint: str) -> dict[str, float]:
    """A service's metrics, without labels, summed."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=2) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] = found.get(name.partition("{")[0], 0.0) + float(value)
    return found


@contextlib.asynccontextmanager
async def rig(
    directory: Path,
    *,
    cluster: int = 1,
    serving: Iterable[tuple[str, str]] = (("scheduler", "s1"), ("router", "r1")),
    streams: int = STREAMS,
    retry: RetryPolicy | None = None,
    environ: dict[str, str] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[Rig]:
    """Start everything, and end it.

    Args:
        directory: for data and logs.
        cluster: members of etcd.
        serving: services beside two Registries; without a Router there is no load.
        streams: requests that run at a time.
        retry: of their client; without one every refusal counts.
        environ: added to the services' environment.
        note: told what is being done.
    """
    known = {child.pid for child in psutil.Process().children()}
    async with contextlib.AsyncExitStack() as stack:
        adopt_orphans()
        note("starting etcd")
        etcd = await stack.enter_async_context(members(directory, cluster))
        network = await stack.enter_async_context(contextlib.AsyncExitStack())
        made = Rig(directory, etcd, network)
        stack.push_async_callback(made.store.aclose)
        stack.push_async_callback(end_services, made, known)
        note("starting services")
        for kind, name in (("registry", "g1"), ("registry", "g2"), *serving):
            await made.add(kind, name, environ)
        for service in made.of("registry"):
            await made.serving(service)
        await made.register()
        for service in (*made.of("scheduler"), *made.of("router")):
            await made.serving(service)
        await _watch(made, stack)
        note("waiting for workers")
        made.churn = await stack.enter_async_context(Churn(lambda: made.registries, made.revision))
        await made.churn.stop()
        _, _, missing = await made.converged(STARTED_S)
        assert not missing, f"the rig did not start: {missing}; logs in {directory}"
        routers = [service.address for service in made.of("router")]
        if routers and streams:
            made.load = await stack.enter_async_context(Load(routers, streams, retry=retry))
        yield made


async def _watch(made: Rig, stack: contextlib.AsyncExitStack) -> None:
    """Readers that go through proxies of their own, and the one that looks after them."""
    for process in made.etcd.processes:
        made.reader_proxies.append(await stack.enter_async_context(Proxy(process.client_port)))
    far = tuple(proxy.endpoint for proxy in made.reader_proxies)
    for number in range(3):
        store = EtcdStore(EtcdConfig(far))
        stack.push_async_callback(store.aclose)
        made.reader_stores.append(store)
        made.readers.append(await stack.enter_async_context(Reader(f"reader-{number}", store)))
    store = EtcdStore(EtcdConfig(far, prefix=TWIN_PREFIX))
    stack.push_async_callback(store.aclose)
    stack.push_async_callback(made.twin_store.aclose)
    made.writer = Writer(made.twin_store)
    stack.push_async_callback(made.writer.stop)
    made.twin = await stack.enter_async_context(Twin(store))
    watching = asyncio.create_task(made.watch_over())
    stack.push_async_callback(cancel_and_wait, watching)


async def end_services(made: Rig, known: set[int]) -> None:
    parts = [service.part for service in made.services.values() if service.part is not None]
    for kind in ("router", "scheduler", "registry"):
        ending = [service.part for service in made.services.values() if service.kind == kind and service.part]
        await asyncio.gather(*(part.stop(10.0) for part in ending))
    for part in parts:
        part.kill()
    etcds = {process.pid for process in made.etcd.processes if process.pid is not None}
    await asyncio.to_thread(end_orphans, known | etcds)
