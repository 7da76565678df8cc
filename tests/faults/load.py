"""What goes on while things break: requests, changes of an alias through the Registry, and writes to etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import grpc

from headrace.adapters.etcd import EtcdStore
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import registry_service_pb2_grpc as pb_grpc
from headrace.api.registry.v1 import resources_pb2
from headrace.client import AsyncClient, HeadraceError
from headrace.control.client_retry import RetryPolicy
from headrace.control.errors import Failure
from headrace.rpc.channels import CLIENT_OPTIONS
from headrace.runtime.tasks import cancel_and_wait

MODEL = "load"
TOKENS = 100
RATE = 50.0
"""Tokens a second of a stream: one takes two seconds."""
CHURN = "churn"
CHURN_S = 0.25
TWIN_S = 0.05
TWIN_KEYS = 40


class Load:
    """Streams that follow each other, `streams` at a time. Use it as `async with`."""

    def __init__(
        self, routers: Sequence[str], streams: int, *, retry: RetryPolicy | None = None, tokens: int = TOKENS
    ) -> None:
        self._client = AsyncClient(list(routers), retry=retry, default_timeout_s=120.0)
        self._streams = streams
        self._tokens = tokens
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = False
        self.in_flight = 0
        self.completed = 0
        self.failures: list[str] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._one_after_the_other(n)) for n in range(self._streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()
        await self._client.close()

    async def finish(self) -> None:
        """Begin no more, and wait for those that run."""
        self._stop = True
        _, late = await asyncio.wait(self._tasks, timeout=60) if self._tasks else ((), ())
        if late:
            self.failures.append(f"{len(late)} requests never ended")
            await cancel_and_wait(*late)
        self._tasks = []

    async def _one_after_the_other(self, number: int) -> None:
        await asyncio.sleep(0.13 * number)  # not in step
        turn = 0
        while not self._stop:
            turn += 1
            self.in_flight += 1
            try:
                answer = await self._client.generate(
                    f"load {number} {turn}", model=MODEL, max_tokens=self._tokens, ignore_eos=True
                ).read()
                if answer.usage is None or answer.usage.sent_tokens != self._tokens:
                    self.failures.append(f"stream {number}: an answer of another length: {answer.usage}")
                else:
                    self.completed += 1
            except HeadraceError as error:
                self.failures.append(f"stream {number}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)
            finally:
                self.in_flight -= 1


class Churn:
    """Sets the weight of an alias to 1, 2, 3 and so on, through whichever Registry answers. Use it as `async with`.

    What was acknowledged must be in the final snapshot, or something later.
    """

    def __init__(self, registries: Callable[[], Sequence[str]], revision: str, *, first: int = 1) -> None:
        self._registries = registries
        self._revision = revision
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._task: asyncio.Task[None] | None = None
        self.tried = first - 1
        self.acknowledged = 0
        self.failed = 0

    async def __aenter__(self) -> Churn:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def stop(self) -> None:
        """Change no more."""
        if self._task is not None:
            await cancel_and_wait(self._task)
            self._task = None

    async def set(self, timeout_s: float = 2.0) -> bool:
        """Set the next weight; returns whether it was acknowledged."""
        self.tried += 1
        weight = self.tried
        alias = resources_pb2.Alias(
            name=f"aliases/{CHURN}", targets=[resources_pb2.AliasTarget(revision=self._revision, weight=weight)]
        )
        for address in self._registries():
            if address not in self._channels:
                self._channels[address] = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
            stub = pb_grpc.RegistryServiceStub(self._channels[address])
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.SetAlias(pb.SetAliasRequest(alias=alias), timeout=timeout_s)
                self.acknowledged = weight
                return True
        self.failed += 1
        return False

    async def _run(self) -> None:
        while True:
            await self.set()
            await asyncio.sleep(CHURN_S)


class Writer:
    """Writes keys straight to etcd; what it was promised, a `Twin` must have seen. Use it as `async with`."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self._task: asyncio.Task[None] | None = None
        self._count = 0
        self.promised: list[tuple[str, int]] = []
        """Key and revision of each write that etcd acknowledged."""

    async def __aenter__(self) -> Writer:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Write no more."""
        if self._task is not None:
            await cancel_and_wait(self._task)
            self._task = None

    async def burst(self, count: int) -> None:
        """Write `count` times at once."""
        for _ in range(count):
            await self.write()

    async def write(self) -> None:
        """Write once; an outage is waited out."""
        self._count += 1
        key = f"d/{self._count % TWIN_KEYS}"
        try:
            revision = await self._store.put(key, str(self._count).encode(), timeout_s=2.0)
        except Failure:
            await asyncio.sleep(0.2)
            return
        self.promised.append((key, revision))

    async def _run(self) -> None:
        while True:
            await self.write()
            await asyncio.sleep(TWIN_S)
