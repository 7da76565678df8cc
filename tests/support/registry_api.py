"""RegistryService over real gRPC and a real etcd, without the rest of a Registry: nothing is published here."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from headrace.adapters.etcd import EtcdStore
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import registry_service_pb2_grpc as pb_grpc
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Failure
from headrace.registry.service import RegistryService
from headrace.rpc import status
from headrace.rpc.channels import CLIENT_OPTIONS
from headrace.rpc.server import Server

SHA = "ab" * 32


@dataclass
class Api:
    """Two servers over the same store, as two Registries have them, and a client of each."""

    store: EtcdStore
    stub: Any
    other: Any
    endpoint: str
    """host:port of the first."""

    async def artifact(self, size: int = 5, **fields: Any) -> str:
        request = pb.CreateArtifactRequest(artifact=artifact(size, **fields))
        return str((await self.stub.CreateArtifact(request)).artifact.name)

    async def revision(self, model: str = "m", *, slots: int = 2, **fields: Any) -> str:
        request = pb.CreateRevisionRequest(model=f"models/{model}", revision=revision(slots, **fields))
        return str((await self.stub.CreateRevision(request)).revision.name)

    async def alias(self, name: str, *targets: str, **fields: Any) -> Any:
        return (await self.stub.SetAlias(set_alias(name, *targets, **fields))).alias

    async def audit(self, **fields: Any) -> list[Any]:
        return list((await self.stub.ListAuditRecords(pb.ListAuditRecordsRequest(**fields))).records)


def artifact(size: int = 5, *, location: str = "/models/m", **fields: Any) -> Any:
    """An artifact with weights of `size` bytes, which is what tells it from others."""
    weights = resources_pb2.ArtifactFile.KIND_WEIGHTS
    file = resources_pb2.ArtifactFile(path="m.gguf", size=size, sha256=SHA, kind=weights)
    return resources_pb2.Artifact(files=[file], location=location, **fields)


def revision(slots: int = 2, *, artifact: str = "", **fields: Any) -> Any:
    engine = resources_pb2.Execution.ENGINE_LLAMACPP if artifact else resources_pb2.Execution.ENGINE_SYNTHETIC
    run = resources_pb2.Execution(engine=engine, context_tokens=128, slots=slots, kv_cells=4096)
    return resources_pb2.Revision(artifact=artifact, execution=run, **fields)


def set_alias(name: str, *targets: str, **fields: Any) -> Any:
    named = [resources_pb2.AliasTarget(revision=target, weight=1) for target in targets]
    return pb.SetAliasRequest(alias=resources_pb2.Alias(name=f"aliases/{name}", targets=named, **fields))


async def refused(call: Awaitable[Any]) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    failure = status.from_rpc_error(caught.value)
    assert failure is not None, "every error carries ErrorInfo"
    assert caught.value.code() == status.code_of(failure.reason)
    return failure


@contextlib.asynccontextmanager
async def serving(store: EtcdStore, **options: Any) -> AsyncIterator[Api]:
    """Serve the API twice over `store` while the block runs."""
    async with contextlib.AsyncExitStack() as stack:
        (stub, endpoint), (other, _) = [await _serve(stack, store, options) for _ in range(2)]
        yield Api(store, stub, other, endpoint)


async def _serve(stack: contextlib.AsyncExitStack, store: EtcdStore, options: dict[str, Any]) -> tuple[Any, str]:
    server = Server("127.0.0.1:0")
    server.add(pb.DESCRIPTOR.services_by_name["RegistryService"], RegistryService(store, **options))
    await server.start()
    stack.push_async_callback(server.stop, 0)
    channel = grpc.aio.insecure_channel(server.endpoint, options=CLIENT_OPTIONS)
    stack.push_async_callback(channel.close)
    return pb_grpc.RegistryServiceStub(channel), server.endpoint


def names(resources: Sequence[Any]) -> list[str]:
    return [resource.name for resource in resources]
