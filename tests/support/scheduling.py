"""A whole Scheduler for tests: real etcd, real Triton, the synthetic engine, and a Router's side made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from headrace.adapters.etcd import EtcdStore
from headrace.adapters.route_codec import replica_from_proto
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.registry.v1 import resources_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.api.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from headrace.control.resources import Alias, AliasTarget, Artifact, Engine, Execution, Replica, ReplicaState, Revision
from headrace.control.revocation import Revocation
from headrace.control.snapshot import RoutingSnapshot
from headrace.rpc.channels import internal_channel
from headrace.scheduler.main import run
from headrace.scheduler.settings import SchedulerSettings
from support.etcd import Etcd, etcd_process, make_store
from support.snapshots import store_snapshot

_versions = itertools.count(1)


def synthetic(model: str = "synth", *, rate: float = 0.0, slots: int = 64, context: int = 8192) -> Revision:
    """A revision of the synthetic engine."""
    execution = Execution(
        Engine.SYNTHETIC,
        context_tokens=context,
        slots=slots,
        kv_cells=slots * context,
        synthetic_decode_tokens_per_s=rate,
    )
    return Revision(model=model, artifact="", artifact_digest="", execution=execution)


@dataclass
class Cluster:
    """An etcd, a Scheduler in this process, and what it said of its replicas."""

    etcd: Etcd
    store: EtcdStore
    settings: SchedulerSettings
    stop: asyncio.Event
    task: asyncio.Task[None]
    workspace: Path

    async def publish(
        self,
        *revisions: Revision,
        artifacts: tuple[Artifact, ...] = (),
        kept: tuple[Revision, ...] = (),
        moved: Mapping[str, Revision] = MappingProxyType({}),
        last_good: tuple[Revision, ...] = (),
        replicas: tuple[Replica, ...] = (),
        revoked: tuple[str, ...] = (),
    ) -> RoutingSnapshot:
        """Publish a snapshot whose aliases name exactly these revisions.

        Args:
            artifacts: their artifacts.
            kept: revisions that are still known and that no alias names.
            moved: further aliases, and what they name now.
            last_good: of those further aliases.
            replicas: what is told of replicas; the Scheduler itself puts its own elsewhere.
        """
        aliases = {
            name: Alias(f"aliases/{name}", (AliasTarget(target.name, 1),))
            for name, target in ({revision.model: revision for revision in revisions} | dict(moved)).items()
        }
        for name in moved:
            aliases[name] = replace(aliases[name], last_good=tuple(AliasTarget(r.name, 1) for r in last_good))
        snapshot = RoutingSnapshot(
            incarnation=(await self.store.head()).incarnation,
            version=next(_versions),
            artifacts=artifacts,
            revisions=(*revisions, *kept),
            aliases=tuple(aliases.values()),
            replicas=replicas,
            revocations=tuple(map(Revocation, revoked)),
        )
        await store_snapshot(self.store, snapshot)
        return snapshot

    async def replicas(self) -> dict[str, Replica]:
        """Replicas as stored, by revision."""
        found = {}
        for item in (await self.store.range("replicas/")).items:
            replica = replica_from_proto(resources_pb2.Replica.FromString(item.value), epoch=item.create_revision)
            found[replica.revision] = replica
        return found

    async def replica(
        self, revision: Revision, state: ReplicaState, *, timeout_s: float = 60, other_than: int = 0
    ) -> Replica:
        """Wait until the replica of `revision` is in `state`, under another epoch than that one."""
        deadline = time.monotonic() + timeout_s
        while True:
            replica = (await self.replicas()).get(revision.name)
            if replica is not None and replica.state is state and replica.epoch != other_than:
                return replica
            if self.task.done():
                self.task.result()
            assert time.monotonic() < deadline, f"{revision.name} is not {state}: {replica}"
            await asyncio.sleep(0.05)

    async def endpoint(self) -> str:
        """host:port of the Scheduler."""
        deadline = time.monotonic() + 20
        while True:
            item = await self.store.get(f"services/schedulers/{self.settings.name}")
            if item is not None:
                return resources_pb2.ServiceRecord.FromString(item.value).endpoint
            if self.task.done():
                self.task.result()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    async def state(self) -> pb.GetStateResponse:
        """What the Scheduler says of itself."""
        async with internal_channel(await self.endpoint()) as channel:
            return await SchedulerServiceStub(channel).GetState(pb.GetStateRequest(), timeout=5)

    async def end(self) -> None:
        """Stop it as SIGTERM would, and wait."""
        self.stop.set()
        async with asyncio.timeout(60):
            await self.task


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """Run etcd and a Scheduler."""
    async with etcd_process(tmp_path / "etcd") as etcd, make_store(etcd.endpoint) as store:
        await store.range("snapshot/")  # draws the store's incarnation
        chosen = SchedulerSettings.model_validate(
            {
                "etcd": (etcd.endpoint,),
                "etcd_prefix": store._config.prefix,
                "listen": "127.0.0.1:0",
                "name": f"t{secrets.token_hex(4)}",
                "state_dir": tmp_path / "state",
                "threads": 1,
                "drain_grace_s": 5.0,
                **settings,
            }
        )
        stop = asyncio.Event()
        task = asyncio.create_task(run(chosen, stop))
        try:
            yield Cluster(etcd, store, chosen, stop, task, tmp_path)
        finally:
            stop.set()
            try:
                async with asyncio.timeout(30):
                    await task
            except TimeoutError:
                task.cancel()
                raise


@dataclass
class Heard:
    """What a Router was told of one attempt."""

    admitted: list[pb.Admitted] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: bytes = b""
    logprobs: list[float] = field(default_factory=list)
    ended: list[pb.Ended] = field(default_factory=list)


class RawRouter:
    """The Router's side of Attach, one stream."""

    def __init__(self, call: Any, channel: grpc.aio.Channel) -> None:
        self.heard: dict[int, Heard] = defaultdict(Heard)
        self.loads: list[pb.LoadReport] = []
        self.frames = 0
        self.welcome: pb.Welcome | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self._call = call
        self._channel = channel
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self.paused = asyncio.Event()
        self.paused.set()

    @classmethod
    @contextlib.asynccontextmanager
    async def attach(cls, endpoint: str, name: str = "routers/test") -> AsyncIterator[RawRouter]:
        """Open a session."""
        async with internal_channel(endpoint) as channel:
            call = SchedulerServiceStub(channel).Attach()
            router = cls(call, channel)
            try:
                await call.write(pb.AttachRequest(hello=pb.Hello(router=name, incarnation="i")))
                async with asyncio.timeout(10):
                    first = await call.read()
                router.welcome = first.welcome
                router._reader = asyncio.create_task(router._read())
                yield router
            finally:
                call.cancel()
                if router._reader is not None:
                    router._reader.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await router._reader

    async def send(self, **parts: Any) -> None:
        """Write one frame."""
        await self._call.write(pb.AttachRequest(**parts))

    async def dispatch(self, replica: Replica, **fields: Any) -> int:
        """Start an attempt; returns its token."""
        message = make_dispatch(replica, **fields)
        await self.send(dispatches=[message])
        return message.attempt

    async def until(self, condition: Callable[[], object], timeout_s: float = 20) -> None:
        """Wait until `condition()` holds, looking after each frame."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def end_of(self, attempt: int, timeout_s: float = 20) -> pb.Ended:
        """Wait for the end of an attempt."""
        await self.until(lambda: self.heard[attempt].ended, timeout_s)
        return self.heard[attempt].ended[0]

    async def _read(self) -> None:
        try:
            while True:
                await self.paused.wait()
                frame = await self._call.read()
                if frame is grpc.aio.EOF:
                    return
                self.frames += 1
                self._take(frame)
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        finally:
            self._news.set()

    def _take(self, frame: pb.AttachResponse) -> None:
        for admitted in frame.admitted:
            self.heard[admitted.attempt].admitted.append(admitted)
        deltas = frame.deltas
        token = byte = 0
        for attempt, count, length in zip(deltas.attempts, deltas.token_counts, deltas.text_lengths, strict=True):
            heard = self.heard[attempt]
            assert not heard.ended, "output after the end"
            heard.tokens += deltas.token_ids[token : token + count]
            heard.text += deltas.text[byte : byte + length]
            if deltas.logprobs:
                heard.logprobs += deltas.logprobs[token : token + count]
            token += count
            byte += length
        assert token == len(deltas.token_ids)
        assert byte == len(deltas.text)
        for ended in frame.ended:
            self.heard[ended.attempt].ended.append(ended)
        if frame.HasField("load"):
            self.loads.append(frame.load)


def make_dispatch(
    replica: Replica,
    *,
    attempt: int = 0,
    prompt: str = "hello",
    max_tokens: int | None = 16,
    credit: int = 1_000_000,
    remaining_s: float | None = None,
    queue_s: float | None = None,
    execution_s: float | None = None,
    record_version: int = 0,
    epoch: int | None = None,
    ignore_eos: bool = True,
    **generate: Any,
) -> pb.Dispatch:
    """A Dispatch with a fresh token."""
    request = inference_pb2.GenerateRequest(prompt=prompt, max_tokens=max_tokens, **generate)
    request.stop.ignore_eos = ignore_eos
    message = pb.Dispatch(
        attempt=attempt or secrets.randbits(62) + 1,
        request="requests/test",
        revision=replica.revision,
        replica=replica.name,
        epoch=replica.epoch if epoch is None else epoch,
        generate=request,
        credit_limit=credit,
        record_version=record_version,
    )
    for duration, seconds in (
        (message.remaining, remaining_s),
        (message.queue_timeout, queue_s),
        (message.execution_timeout, execution_s),
    ):
        if seconds is not None:
            duration.FromMilliseconds(round(seconds * 1000))
    return message
