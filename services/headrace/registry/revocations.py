"""Revocations and audit records of the RegistryService."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import InvalidRequest, Violation
from headrace.registry.audit import Change
from headrace.registry.catalogue import AUDIT_PREFIX, REVOCATION_PREFIX
from headrace.registry.checks import REVOCABLE_RULE, checked_revocation, is_revocable
from headrace.registry.records import TRIES, Listed, Records, busy, not_found, reader, to_bytes
from headrace.runtime.ports import Compare, KeyValue, Put
from headrace.runtime.telemetry import get_logger


class RevocationCalls(Records):
    """The methods that are about revocations."""

    async def Revoke(self, request: pb.RevokeRequest, context: Any) -> pb.RevokeResponse:  # noqa: N802
        """Revoke; again, it replaces reason and end_running, and the time stays that of the first."""
        wanted = checked_revocation(request.revocation, self._now_ms())
        key = f"{REVOCATION_PREFIX}{wanted.name}"
        for _ in range(TRIES):
            found = await self._store.get(key)
            before = _read_or_none(found)
            if before is not None:
                wanted.create_time.CopyFrom(before.create_time)
            if before == wanted:
                return pb.RevokeResponse(revocation=wanted)
            state = Compare(key, mod_revision=found.mod_revision if found else 0)
            change = Change("Revoke", wanted.name, before, wanted)
            if (await self._commit(context, change, [state], [Put(key, to_bytes(wanted))])).succeeded:
                return pb.RevokeResponse(revocation=wanted)
        raise busy(wanted.name)

    async def LiftRevocation(self, request: pb.LiftRevocationRequest, context: Any) -> pb.LiftRevocationResponse:  # noqa: N802
        """End a revocation."""
        if not is_revocable(request.name):
            raise InvalidRequest((Violation("name", REVOCABLE_RULE),))
        key = f"{REVOCATION_PREFIX}{request.name}"
        for _ in range(TRIES):
            found = await self._store.get(key)
            if found is None:
                raise not_found(key)
            same = Compare(key, mod_revision=found.mod_revision)
            change = Change("LiftRevocation", request.name, _read_or_none(found), None)
            if (await self._commit(context, change, [same], deletes=[key])).succeeded:
                return pb.LiftRevocationResponse()
        raise busy(key)

    async def ListRevocations(self, request: pb.ListRevocationsRequest, context: Any) -> pb.ListRevocationsResponse:  # noqa: N802
        """List by name."""
        listing = await self._store.range(REVOCATION_PREFIX)
        found: list[Any] = []
        for kv in listing.items:
            message = _read_or_none(kv)
            if message is None:
                get_logger().error("damaged_record", key=kv.key)
            else:
                found.append(message)
        found.sort(key=lambda message: str(message.name))
        return pb.ListRevocationsResponse(revocations=found)


class AuditCalls(Records):
    """The method that is about audit records."""

    async def ListAuditRecords(self, request: pb.ListAuditRecordsRequest, context: Any) -> pb.ListAuditRecordsResponse:  # noqa: N802
        """List the newest first."""
        listed = Listed(
            "ListAuditRecords",
            AUDIT_PREFIX,
            reader(resources_pb2.AuditRecord),
            filters={"resource": request.resource},
            wanted=lambda record: request.resource in ("", record.resource),
            newest_first=True,
            batch=1000,
        )
        found, token = await self._list(request, listed)
        return pb.ListAuditRecordsResponse(records=found, next_page_token=token)


def _read_or_none(found: KeyValue | None) -> resources_pb2.Revocation | None:
    """A damaged revocation is written over."""
    try:
        return None if found is None else resources_pb2.Revocation.FromString(found.value)
    except DecodeError:
        return None
