"""Server reflection with the comments of the protos, so that `grpcurl describe` explains each field.

The descriptors inside generated Python code have lost their comments. `protos/generate.py` keeps them in
`headrace/api/documented.binpb`; the files named there are answered from it, all others as usual.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

SERVICE_NAME: str = reflection.SERVICE_NAME


class _Documented(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """The library's servicer, with the comments put back into what it answers."""

    async def ServerReflectionInfo(  # noqa: N802
        self, request_iterator: AsyncIterable[Any], unused_context: Any
    ) -> AsyncIterator[Any]:
        documented = documented_files()
        async for response in super().ServerReflectionInfo(request_iterator, unused_context):
            if response.HasField("file_descriptor_response"):
                files = response.file_descriptor_response.file_descriptor_proto
                files[:] = [documented.get(FileDescriptorProto.FromString(data).name, data) for data in files]
            yield response


@functools.cache
def documented_files() -> Mapping[str, bytes]:
    """Serialized descriptors with comments, by the name of their .proto file."""
    data = resources.files("headrace.api").joinpath("documented.binpb").read_bytes()
    return {file.name: file.SerializeToString() for file in FileDescriptorSet.FromString(data).file}


def enable_reflection(service_names: list[str], server: Any) -> None:
    """Serve reflection for these services on `server`."""
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Documented([*service_names, SERVICE_NAME]), server)
