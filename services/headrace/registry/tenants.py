"""Tenants and their keys of the RegistryService.

A tenant is one record with its keys in it, so a tenant and its keys change and go together. What a caller of these
methods is shown, and what audit records keep, has no digest of a key; the key itself is in one answer and nowhere else.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from google.protobuf.message import DecodeError

from headrace.adapters import tenant_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control import names
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.tenants import ApiKey, Tenant, key_digest
from headrace.registry.aliases import check_etag
from headrace.registry.audit import Change
from headrace.registry.catalogue import TENANT_PREFIX, decode_tenant, revocation_key
from headrace.registry.checks import checked_filter
from headrace.registry.records import TRIES, Listed, Records, busy, damaged, not_found, to_bytes
from headrace.registry.tenant_checks import KEYS_MAX, checked_lifetime_ms, checked_tenant, parse_key
from headrace.runtime.ports import Compare, KeyValue, Put, TxnResult

KEY_PREFIX = "hr_"
_KEY_BYTES = 32


class TenantCalls(Records):
    """The methods that are about tenants."""

    async def SetTenant(self, request: pb.SetTenantRequest, context: Any) -> pb.SetTenantResponse:  # noqa: N802
        """Write a tenant, its keys as they are; with an etag only over that state of it."""
        wanted = checked_tenant(request.tenant, self._now_ms())
        await self._check_certificates(wanted)
        for _ in range(TRIES):
            found = await self._store.get(wanted.name)
            check_etag(wanted.name, wanted.etag, found)
            before = _read_or_none(found)
            after = dataclasses.replace(wanted, etag="", keys=before.keys if before else ())
            if found is not None and before is not None and _limits(before) == _limits(after):
                return pb.SetTenantResponse(tenant=_shown(before))
            done = await self._write(context, "SetTenant", found, before, after)
            if done.succeeded:
                return pb.SetTenantResponse(tenant=_shown(dataclasses.replace(after, etag=str(done.revision))))
        raise busy(wanted.name)

    async def GetTenant(self, request: pb.GetTenantRequest, context: Any) -> pb.GetTenantResponse:  # noqa: N802
        """Return one tenant."""
        names.parse(request.name, "tenants")
        _, tenant = await self._tenant(request.name)
        return pb.GetTenantResponse(tenant=_shown(tenant))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Any) -> pb.ListTenantsResponse:  # noqa: N802
        """List by name."""
        labels = checked_filter(request.labels)
        found, token = await self._list(request, Listed("ListTenants", TENANT_PREFIX, _read_shown, labels=labels))
        return pb.ListTenantsResponse(tenants=found, next_page_token=token)

    async def DeleteTenant(self, request: pb.DeleteTenantRequest, context: Any) -> pb.DeleteTenantResponse:  # noqa: N802
        """Delete a tenant with its keys; with an etag only that state of it."""
        names.parse(request.name, "tenants")
        for _ in range(TRIES):
            found = await self._store.get(request.name)
            if found is None:
                raise not_found(request.name)
            check_etag(request.name, request.etag, found)
            if (await self._write(context, "DeleteTenant", found, _read_or_none(found), None)).succeeded:
                return pb.DeleteTenantResponse()
        raise busy(request.name)

    async def CreateApiKey(self, request: pb.CreateApiKeyRequest, context: Any) -> pb.CreateApiKeyResponse:  # noqa: N802
        """Make a key; its secret is in this answer alone. An id that is taken is refused: the secret is not known."""
        names.parse(request.tenant, "tenants", field="tenant")
        if not names.is_id(request.key_id):
            raise InvalidRequest((Violation("key_id", f"must be {names.ID_RULE}"),))
        lifetime_ms = checked_lifetime_ms(request.lifetime) if request.HasField("lifetime") else 0
        name, secret, now_ms = f"{request.tenant}/keys/{request.key_id}", make_secret(), self._now_ms()
        await self._refuse_if_revoked(name)
        key = ApiKey(name, key_digest(secret), now_ms, now_ms + lifetime_ms if lifetime_ms else 0)
        for _ in range(TRIES):
            found, before = await self._tenant(request.tenant, field="tenant")
            if any(other.name == name for other in before.keys):
                text = f"{name} exists, and what was told of it is told once; delete it, or choose another id."
                raise Failure(Reason.ALREADY_EXISTS, text, field="key_id", metadata={"resourceName": name})
            if len(before.keys) >= KEYS_MAX:
                text = f"{before.name} has {KEYS_MAX} keys, the most that it can have; delete one first."
                raise Failure(Reason.INVALID_REQUEST, text, field="tenant", metadata={"limitKeys": str(KEYS_MAX)})
            after = dataclasses.replace(before, keys=tuple(sorted((*before.keys, key), key=lambda k: k.name)))
            if (await self._write(context, "CreateApiKey", found, before, after)).succeeded:
                return pb.CreateApiKeyResponse(key=tenant_codec.key_to_proto(key, with_digest=False), secret=secret)
        raise busy(request.tenant)

    async def DeleteApiKey(self, request: pb.DeleteApiKeyRequest, context: Any) -> pb.DeleteApiKeyResponse:  # noqa: N802
        """Delete a key: it is no longer accepted as soon as the Routers have the next snapshot."""
        tenant = parse_key(request.name)
        for _ in range(TRIES):
            found = await self._store.get(tenant)
            before = _read_or_none(found)
            if before is None or all(key.name != request.name for key in before.keys):
                raise not_found(request.name)
            after = dataclasses.replace(before, keys=tuple(k for k in before.keys if k.name != request.name))
            if (await self._write(context, "DeleteApiKey", found, before, after)).succeeded:
                return pb.DeleteApiKeyResponse()
        raise busy(request.name)

    async def _tenant(self, name: str, *, field: str = "name") -> tuple[KeyValue, Tenant]:
        """A stored tenant.

        Raises:
            Failure: NOT_FOUND, or INTERNAL when the record is damaged.
        """
        found = await self._store.get(name)
        if found is None:
            raise not_found(name, field)
        tenant = _read_or_none(found)
        if tenant is None:
            raise damaged(name)
        return found, tenant

    async def _write(
        self, context: Any, method: str, found: KeyValue | None, before: Tenant | None, after: Tenant | None
    ) -> TxnResult:
        """Write over what was found, or delete it (`after` is None), if it is still that."""
        name = after.name if after is not None else found.key if found is not None else ""
        same = Compare(name, mod_revision=found.mod_revision if found else 0)
        change = Change(method, name, _shown(before) if before else None, _shown(after) if after else None)
        if after is None:
            return await self._commit(context, change, [same], deletes=[name])
        return await self._commit(context, change, [same], [Put(name, to_bytes(tenant_codec.tenant_to_proto(after)))])

    async def _check_certificates(self, wanted: Tenant) -> None:
        """Refuse names in certificates that another tenant has: two would make it neither's."""
        if not wanted.certificate_names:
            return
        for kv in (await self._store.range(TENANT_PREFIX)).items:
            other = _read_or_none(kv)
            taken = set(other.certificate_names) & set(wanted.certificate_names) if other else ()
            if other is not None and other.name != wanted.name and taken:
                text = f"{other.name} has the certificate name {min(taken)}; a name is of one tenant."
                raise Failure(
                    Reason.RESOURCE_IN_USE, text, field="tenant.certificate_names", metadata={"usedBy": other.name}
                )

    async def _refuse_if_revoked(self, name: str) -> None:
        if await self._store.get(revocation_key(name)) is not None:
            text = f"{name} is revoked, so a key of that name would not be accepted; lift that, or choose another id."
            raise Failure(Reason.RESOURCE_IN_USE, text, field="key_id", metadata={"usedBy": revocation_key(name)})


def make_secret() -> str:
    """A new key: 256 random bits, in letters that need no quoting."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def _shown(tenant: Tenant) -> resources_pb2.Tenant:
    return tenant_codec.tenant_to_proto(tenant, with_digests=False)


def _read_shown(found: KeyValue) -> resources_pb2.Tenant:
    try:
        return _shown(decode_tenant(found.key, found.value, found.mod_revision))
    except BadRecord as error:
        raise DecodeError(str(error)) from None


def _read_or_none(found: KeyValue | None) -> Tenant | None:
    """A damaged tenant is as good as none: it is written over."""
    try:
        return None if found is None else decode_tenant(found.key, found.value, found.mod_revision)
    except (BadRecord, DecodeError):
        return None


def _limits(tenant: Tenant) -> Tenant:
    """All that a caller of SetTenant says."""
    return dataclasses.replace(tenant, etag="", update_time_ms=0, keys=())
