"""Routers of a test's own beside the stack's: the same etcd, the same workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stack.waiting import until_async
from support.etcd import free_port
from support.stack import COMMAND, RunningStack


@dataclass
class Router:
    """A Router process of the test's own."""

    address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def channel(self) -> grpc.aio.Channel:
        """A connection to it, of its own."""
        return grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])


@contextlib.asynccontextmanager
async def routers(stack: RunningStack, tmp_path: Path, *options: str) -> AsyncIterator[list[Router]]:
    """Two of them, serving."""
    started: list[Router] = []
    try:
        for name in ("other-a", "other-b"):
            address = f"127.0.0.1:{free_port()}"
            command = [*COMMAND, "router", "--name", name, "--listen", address, "--etcd", stack.etcd, *options]
            with (tmp_path / f"{name}.log").open("wb") as log:
                started.append(Router(address, subprocess.Popen(command, stdout=log, stderr=log)))
        for router in started:
            await until_async(lambda router=router: _serves(router))  # type: ignore[misc]
        yield started
    finally:
        for router in started:
            router.kill()


async def _serves(router: Router) -> bool:
    assert router.process.poll() is None, "the Router has ended"
    async with grpc.aio.insecure_channel(router.address) as channel:
        with contextlib.suppress(grpc.RpcError):
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False
