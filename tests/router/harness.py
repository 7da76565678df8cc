"""A Router over real gRPC with a Scheduler whose every frame the test decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Failure
from headrace.control.idempotency import Origin
from headrace.control.resources import (
    Alias,
    AliasTarget,
    Engine,
    Execution,
    Replica,
    ReplicaState,
    RequestPolicy,
    Revision,
    Sampling,
)
from headrace.control.snapshot import RoutingSnapshot
from headrace.router.main import admin_server, client_server
from headrace.router.metrics import RouterMetrics
from headrace.router.routes import Routes
from headrace.router.service import InferenceService
from headrace.router.settings import RouterSettings
from headrace.rpc import status
from headrace.rpc.server import Server
from headrace.runtime.tasks import cancel_and_wait

DEADLINE_S = 10.0
T = TypeVar("T")
READY = ReplicaState.READY

REVISION = Revision(
    "m",
    "",
    "",
    Execution(Engine.SYNTHETIC, context_tokens=64, slots=4, kv_cells=256),
    RequestPolicy(max_output_tokens=32, default_sampling=Sampling(temperature=0.0)),
)


@dataclass
class ScriptedScheduler:
    """A real SchedulerService that records what it gets and sends what it is told."""

    dispatches: asyncio.Queue[sp.Dispatch] = field(default_factory=asyncio.Queue)
    credits: asyncio.Queue[sp.Credit] = field(default_factory=asyncio.Queue)
    cancels: asyncio.Queue[sp.Cancel] = field(default_factory=asyncio.Queue)
    inventories: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    versions: dict[int, int] = field(default_factory=dict)
    _context: Any = None
    _cut: asyncio.Event = field(default_factory=asyncio.Event)

    async def Attach(self, _requests: Any, context: Any) -> None:
        hello = await context.read()
        assert hello.hello.router == "routers/test"
        await context.write(sp.AttachResponse(welcome=sp.Welcome(scheduler="schedulers/test")))
        self._context = context
        self._cut.clear()
        self.attached.set()
        reader = asyncio.create_task(self._read(context))
        await self._cut.wait()
        reader.cancel()
        self.attached.clear()

    async def GetState(self, request: Any, context: Any) -> sp.GetStateResponse:
        return sp.GetStateResponse()

    async def _read(self, context: Any) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            if frame.inventory_request:
                self.inventories.put_nowait(frame.inventory_request)
            for name in ("dispatches", "credits", "cancels"):
                for message in getattr(frame, name):
                    if name == "dispatches":
                        self.versions[message.attempt] = message.record_version
                    getattr(self, name).put_nowait(message)

    async def send(self, **fields: Any) -> None:
        await self._context.write(sp.AttachResponse(**fields))

    async def admit(self, attempt: int) -> None:
        version = self.versions.get(attempt, 0)
        admitted = sp.Admitted(attempt=attempt, prompt_tokens=3, cached_prompt_tokens=1, record_version=version)
        await self.send(admitted=[admitted])

    async def deltas(self, attempt: int, *texts: str) -> None:
        encoded = [text.encode() for text in texts]
        columns = sp.Deltas(
            attempts=[attempt] * len(texts),
            token_counts=[1] * len(texts),
            token_ids=list(range(1, len(texts) + 1)),
            text_lengths=map(len, encoded),
            text=b"".join(encoded),
        )
        await self.send(deltas=columns)

    async def end(self, attempt: int, reason: int = pb.FINISH_REASON_STOP, **fields: Any) -> None:
        fields.setdefault("record_version", self.versions.get(attempt, 0))
        await self.send(ended=[sp.Ended(attempt=attempt, reason=reason, **fields)])  # type: ignore[arg-type]

    def cut(self) -> None:
        """Break the stream to the Router."""
        self._cut.set()


async def soon(queue: asyncio.Queue[T]) -> T:
    """The next entry, within the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        return await queue.get()


async def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait for `condition`."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def collect(call: Any) -> tuple[list[pb.GenerateEvent], grpc.RpcError | None]:
    """All events, and the error that the call ended with."""
    events = []
    try:
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
        code = await call.code()
        assert code is grpc.StatusCode.OK, code
    except grpc.RpcError as error:
        return events, error
    return events, None


def failure(error: grpc.RpcError | None) -> Failure:
    """What the service said."""
    assert error is not None
    found = status.from_rpc_error(error)
    assert found is not None
    return found


def kinds(events: list[pb.GenerateEvent], first: int = 1) -> list[str]:
    """Kinds of events that are numbered without a gap."""
    assert [event.sequence for event in events] == list(range(first, first + len(events)))
    assert len({event.request for event in events}) <= 1
    return [str(event.WhichOneof("event")) for event in events]


@dataclass
class Harness:
    scheduler: ScriptedScheduler
    stub: Any
    channel: grpc.aio.Channel
    target: str
    service: InferenceService
    routes: Routes
    metrics: RouterMetrics
    admin: Server

    def generate(self, **fields: Any) -> Any:
        request = pb.GenerateRequest(**{"model": "chat", "prompt": "hello", **fields})
        return self.stub.Generate(request, timeout=DEADLINE_S)

    async def interactive(self, **fields: Any) -> Any:
        """An interactive call whose request has been sent."""
        call = self.stub.GenerateInteractive(timeout=DEADLINE_S)
        request = pb.GenerateRequest(**{"model": "chat", "prompt": "hello", **fields})
        await call.write(pb.ClientFrame(start=request))
        return call

    async def admitted(self) -> sp.Dispatch:
        """The next dispatch, admitted."""
        dispatch = await self.dispatched()
        await self.scheduler.admit(dispatch.attempt)
        return dispatch

    async def dispatched(self) -> sp.Dispatch:
        async with asyncio.timeout(DEADLINE_S):
            return await self.scheduler.dispatches.get()


def open_channel(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel of its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


async def _tend(service: InferenceService) -> None:
    while True:
        service.tend()
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(
    *,
    replicas: int = 1,
    store: Any = None,
    name: str = "test",
    incarnation: str = "1",
    credentials: grpc.ChannelCredentials | None = None,
    guided: frozenset[str] = frozenset({"choice", "json_schema"}),
    **settings: Any,
) -> AsyncIterator[Harness]:
    """A Router; with a `store`, one that takes idempotency keys and answers other Routers.

    `credentials`: the client's, where the settings have TLS.
    """
    scheduler = ScriptedScheduler()
    peer = Server("127.0.0.1:0")
    peer.add(sp.DESCRIPTOR.services_by_name["SchedulerService"], scheduler)
    await peer.start()
    routes = Routes(router="routers/test", incarnation="1")
    routes.apply(
        RoutingSnapshot(
            "here",
            5,
            revisions=(REVISION,),
            aliases=(Alias("aliases/chat", (AliasTarget(REVISION.name, 1),)),),
            replicas=tuple(
                Replica(
                    f"replicas/r{n}",
                    REVISION.name,
                    "schedulers/test",
                    peer.endpoint,
                    ReplicaState.READY,
                    40 + n,
                    4,
                    guided=guided,
                )
                for n in range(replicas)
            ),
        )
    )
    metrics = RouterMetrics()
    here = Origin(f"routers/{name}", incarnation)
    service_settings = RouterSettings(listen="127.0.0.1:0", **{"request_bytes_max": 100_000, **settings})
    service = InferenceService(service_settings, routes, metrics, here)
    admin = admin_server(service_settings, service, routes, metrics)
    if store is not None:
        await admin.start()
        service.sharing.keys.use(store, admin.endpoint)
    server = client_server(service_settings, service, metrics)
    await server.start()
    tending = [asyncio.create_task(_tend(service))]
    if store is not None:
        tending.append(asyncio.create_task(service.elsewhere.fleet.run(store)))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await scheduler.attached.wait()
        async with open_channel(server.endpoint, credentials) as channel:
            link = routes.links[0]
            async with asyncio.timeout(DEADLINE_S):
                while not link.is_up:
                    await asyncio.sleep(0)
            stub = InferenceServiceStub(channel)
            yield Harness(scheduler, stub, channel, server.endpoint, service, routes, metrics, admin)
    finally:
        await cancel_and_wait(*tending)
        await routes.close()
        await server.stop(0)
        await service.sharing.close()
        if store is not None:
            await admin.stop(0)
        scheduler.cut()
        await peer.stop(0)
