"""RegistryService over the store: each call is one or two transactions, and safe to repeat after UNAVAILABLE."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from headrace.adapters import route_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2, routing_pb2
from headrace.control import names
from headrace.control.errors import Failure, Reason
from headrace.control.resources import Alias, Artifact
from headrace.registry.catalogue import artifact_key, decode_alias, revision_key
from headrace.registry.checks import checked_alias, checked_artifact, checked_revision
from headrace.runtime.ports import Compare, KeyValue, Put, Store
from headrace.runtime.snapshot_follower import ROOT_KEY
from headrace.runtime.telemetry import get_logger


class RegistryService:
    """The servicer; `Failure`s become statuses in `headrace.rpc.server`.

    Args:
        store: where everything is.
        now_ms: Unix time in milliseconds, for create and update times.
    """

    def __init__(self, store: Store, *, now_ms: Callable[[], int] = lambda: int(time.time() * 1000)) -> None:
        self._store = store
        self._now_ms = now_ms

    async def CreateArtifact(self, request: pb.CreateArtifactRequest, context: Any) -> pb.CreateArtifactResponse:  # noqa: N802
        """Register a manifest; the same one again answers with what is stored."""
        artifact = checked_artifact(request.artifact, self._now_ms())
        stored = await self._create(
            artifact_key(artifact.name), route_codec.artifact_to_proto(artifact), artifact.name, "another location"
        )
        return pb.CreateArtifactResponse(artifact=stored)

    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: Any) -> pb.ListArtifactsResponse:  # noqa: N802
        """List by name."""
        return pb.ListArtifactsResponse(artifacts=await self._list("artifacts/", resources_pb2.Artifact))

    async def CreateRevision(self, request: pb.CreateRevisionRequest, context: Any) -> pb.CreateRevisionResponse:  # noqa: N802
        """Register a revision of an artifact that exists; the same one again answers with what is stored."""
        model = names.parse(request.model, "models", field="model")
        artifact, requires = None, []
        if request.revision.artifact:
            names.parse(request.revision.artifact, "artifacts", field="revision.artifact")
            artifact = await self._artifact(request.revision.artifact)
            requires = [Compare(artifact_key(artifact.name), exists=True)]
        revision = checked_revision(request.revision, model=model, artifact=artifact, now_ms=self._now_ms())
        stored = await self._create(
            revision_key(revision.name),
            route_codec.revision_to_proto(revision),
            revision.name,
            "other content",
            requires=requires,
        )
        return pb.CreateRevisionResponse(revision=stored)

    async def ListRevisions(self, request: pb.ListRevisionsRequest, context: Any) -> pb.ListRevisionsResponse:  # noqa: N802
        """List by name."""
        return pb.ListRevisionsResponse(revisions=await self._list("revisions/", resources_pb2.Revision))

    async def SetAlias(self, request: pb.SetAliasRequest, context: Any) -> pb.SetAliasResponse:  # noqa: N802
        """Write an alias; with an etag only over that state of it. Targets that are set already are not rewritten."""
        alias = checked_alias(request.alias, self._now_ms())
        found = await self._store.get(alias.name)
        _check_etag(alias.name, alias.etag, found)
        if found is not None and _alias_of(found).targets == alias.targets:
            return pb.SetAliasResponse(alias=_alias_message(found))
        targets = [Compare(revision_key(target.revision), exists=True) for target in alias.targets]
        state = [Compare(alias.name, mod_revision=found.mod_revision if found else 0)] if alias.etag else []
        value = _bytes(route_codec.alias_to_proto(Alias(alias.name, alias.targets, "", alias.update_time_ms)))
        done = await self._store.txn([*targets, *state], [Put(alias.name, value)])
        if not done.succeeded:
            for index, target in enumerate(alias.targets):
                if await self._store.get(revision_key(target.revision)) is None:
                    raise _not_found(target.revision, f"alias.targets[{index}].revision")
            raise _etag_mismatch(alias.name)
        stored = Alias(alias.name, alias.targets, str(done.revision), alias.update_time_ms)
        return pb.SetAliasResponse(alias=route_codec.alias_to_proto(stored))

    async def DeleteAlias(self, request: pb.DeleteAliasRequest, context: Any) -> pb.DeleteAliasResponse:  # noqa: N802
        """Delete an alias; with an etag only that state of it."""
        names.parse(request.name, "aliases")
        found = await self._store.get(request.name)
        if found is None:
            raise _not_found(request.name, "name")
        _check_etag(request.name, request.etag, found)
        same = Compare(request.name, mod_revision=found.mod_revision) if request.etag else None
        done = await self._store.txn([same] if same else [], deletes=[request.name])
        if not done.succeeded:
            raise _etag_mismatch(request.name)
        return pb.DeleteAliasResponse()

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> pb.GetSnapshotResponse:  # noqa: N802
        """Return the published snapshot as it is stored."""
        found = await self._store.get(ROOT_KEY)
        if found is None:
            raise Failure(
                Reason.NO_SNAPSHOT, "No routing snapshot was published yet; the Registry may have just started."
            )
        try:
            return pb.GetSnapshotResponse(snapshot=routing_pb2.RoutingSnapshot.FromString(found.value))
        except DecodeError:
            raise Failure(Reason.NO_SNAPSHOT, "The stored routing snapshot is damaged; it will be replaced.") from None

    async def ListServices(self, request: pb.ListServicesRequest, context: Any) -> pb.ListServicesResponse:  # noqa: N802
        """List what runs now, by name."""
        return pb.ListServicesResponse(services=await self._list("services/", resources_pb2.ServiceRecord))

    async def GetArtifact(self, request: pb.GetArtifactRequest, context: Any) -> pb.GetArtifactResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def DeleteArtifact(self, request: pb.DeleteArtifactRequest, context: Any) -> pb.DeleteArtifactResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def GetRevision(self, request: pb.GetRevisionRequest, context: Any) -> pb.GetRevisionResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def DeleteRevision(self, request: pb.DeleteRevisionRequest, context: Any) -> pb.DeleteRevisionResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def ListAliases(self, request: pb.ListAliasesRequest, context: Any) -> pb.ListAliasesResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def Revoke(self, request: pb.RevokeRequest, context: Any) -> pb.RevokeResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def LiftRevocation(self, request: pb.LiftRevocationRequest, context: Any) -> pb.LiftRevocationResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def ListRevocations(self, request: pb.ListRevocationsRequest, context: Any) -> pb.ListRevocationsResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def ListAuditRecords(self, request: pb.ListAuditRecordsRequest, context: Any) -> pb.ListAuditRecordsResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Any) -> pb.ListSnapshotsResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def RollBack(self, request: pb.RollBackRequest, context: Any) -> pb.RollBackResponse:  # noqa: N802
        """Not available yet."""
        raise _not_available()

    async def _create(
        self, key: str, message: Any, name: str, difference: str, *, requires: list[Compare] | None = None
    ) -> Any:
        """Put `message` if the key is free; else answer with what is there, if it is the same but for its times."""
        done = await self._store.txn([Compare(key, create_revision=0), *(requires or [])], [Put(key, _bytes(message))])
        if done.succeeded:
            return message
        found = await self._store.get(key)
        if found is None:
            raise Failure(Reason.STORE_UNAVAILABLE, "What it refers to has changed meanwhile; send the request again.")
        stored = type(message).FromString(found.value)
        if _without_time(stored) != _without_time(message):
            raise Failure(Reason.ALREADY_EXISTS, f"{name} exists with {difference}.", metadata={"resourceName": name})
        return stored

    async def _artifact(self, name: str) -> Artifact:
        found = await self._store.get(artifact_key(name))
        if found is None:
            raise _not_found(name, "revision.artifact")
        try:
            return route_codec.artifact_from_proto(resources_pb2.Artifact.FromString(found.value))
        except (BadRecord, DecodeError):
            raise Failure(
                Reason.INTERNAL, f"The stored record of {name} is damaged.", metadata={"resourceName": name}
            ) from None

    async def _list(self, prefix: str, message_class: Any) -> list[Any]:
        listing = await self._store.range(prefix)
        found = []
        for kv in listing.items:
            try:
                found.append(message_class.FromString(kv.value))
            except DecodeError:
                get_logger().error("damaged_record", key=kv.key)
        return sorted(found, key=lambda message: str(message.name))


def _not_available() -> Failure:
    return Failure(Reason.INVALID_REQUEST, "This method is not available yet.")


def _check_etag(name: str, etag: str, found: KeyValue | None) -> None:
    if etag and (found is None or etag != str(found.mod_revision)):
        raise _etag_mismatch(name)


def _etag_mismatch(name: str) -> Failure:
    return Failure(
        Reason.ETAG_MISMATCH,
        f"{name} is not in the state that the etag stands for; read it again and repeat the change.",
        metadata={"resourceName": name},
    )


def _not_found(name: str, field: str) -> Failure:
    return Failure(Reason.NOT_FOUND, f"{name} does not exist.", field=field, metadata={"resourceName": name})


def _alias_of(found: KeyValue) -> Alias:
    """The stored alias; a damaged one is as good as empty, and will be overwritten."""
    try:
        return decode_alias(found.key, found.value, found.mod_revision)
    except (BadRecord, DecodeError):
        return Alias(found.key, ())


def _alias_message(found: KeyValue) -> resources_pb2.Alias:
    message = resources_pb2.Alias.FromString(found.value)
    message.etag = str(found.mod_revision)
    return message


def _without_time(message: Any) -> bytes:
    copy = type(message)()
    copy.CopyFrom(message)
    copy.ClearField("create_time")
    return _bytes(copy)


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString(deterministic=True)
    return data
