"""RegistryService over the store: each call is one or two transactions, and safe to repeat after UNAVAILABLE."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.registry.aliases import AliasCalls
from headrace.registry.artifacts import ArtifactCalls, RevisionCalls
from headrace.registry.revocations import AuditCalls, RevocationCalls
from headrace.registry.snapshots import SnapshotCalls
from headrace.registry.tenants import TenantCalls
from headrace.runtime.telemetry import get_logger


class RegistryService(
    ArtifactCalls, RevisionCalls, AliasCalls, TenantCalls, RevocationCalls, AuditCalls, SnapshotCalls
):
    """The servicer; `Failure`s become statuses in `headrace.rpc.server`. See Records for its arguments."""

    async def ListServices(self, request: pb.ListServicesRequest, context: Any) -> pb.ListServicesResponse:  # noqa: N802
        """List what runs now, by name."""
        listing = await self._store.range("services/")
        found: list[Any] = []
        for kv in listing.items:
            try:
                found.append(resources_pb2.ServiceRecord.FromString(kv.value))
            except DecodeError:
                get_logger().error("damaged_record", key=kv.key)
        found.sort(key=lambda message: str(message.name))
        return pb.ListServicesResponse(services=found)
