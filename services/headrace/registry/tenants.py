"""Tenants and their keys of the RegistryService."""

from __future__ import annotations

from typing import Any

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.registry.records import Records


class TenantCalls(Records):
    """The methods that are about tenants."""

    async def SetTenant(self, request: pb.SetTenantRequest, context: Any) -> pb.SetTenantResponse:  # noqa: N802
        """Write a tenant."""
        raise Failure(Reason.INTERNAL, "not built yet")

    async def GetTenant(self, request: pb.GetTenantRequest, context: Any) -> pb.GetTenantResponse:  # noqa: N802
        """One tenant."""
        raise Failure(Reason.INTERNAL, "not built yet")

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Any) -> pb.ListTenantsResponse:  # noqa: N802
        """List by name."""
        raise Failure(Reason.INTERNAL, "not built yet")

    async def DeleteTenant(self, request: pb.DeleteTenantRequest, context: Any) -> pb.DeleteTenantResponse:  # noqa: N802
        """Delete a tenant."""
        raise Failure(Reason.INTERNAL, "not built yet")

    async def CreateApiKey(self, request: pb.CreateApiKeyRequest, context: Any) -> pb.CreateApiKeyResponse:  # noqa: N802
        """Make a key."""
        raise Failure(Reason.INTERNAL, "not built yet")

    async def DeleteApiKey(self, request: pb.DeleteApiKeyRequest, context: Any) -> pb.DeleteApiKeyResponse:  # noqa: N802
        """Delete a key."""
        raise Failure(Reason.INTERNAL, "not built yet")
