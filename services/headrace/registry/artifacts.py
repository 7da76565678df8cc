"""Artifacts and revisions of the RegistryService: content-addressed, so never changed; deleted when nothing needs them.

A deletion and a use cannot both happen: a use is written under the condition that what it uses exists, a deletion under
the condition that no use was written since it looked for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from headrace.adapters import route_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control import names
from headrace.control.errors import Failure, Reason
from headrace.control.resources import Artifact
from headrace.registry import history
from headrace.registry.audit import Change
from headrace.registry.catalogue import HISTORY_PREFIX, artifact_key, revision_key
from headrace.registry.checks import checked_artifact, checked_filter, checked_revision
from headrace.registry.records import TRIES, Listed, Records, busy, damaged, not_found, reader
from headrace.runtime.ports import Compare, Listing

DRAFT_ARTIFACT = "revision.execution.speculative.draft_artifact"
_NAMED_MAX = 10
"""Users that a refusal names; it says how many there are."""


class ArtifactCalls(Records):
    """The methods that are about artifacts."""

    async def CreateArtifact(self, request: pb.CreateArtifactRequest, context: Any) -> pb.CreateArtifactResponse:  # noqa: N802
        """Register a manifest; the same one again answers with what is stored."""
        artifact = checked_artifact(request.artifact, self._now_ms())
        for _ in range(TRIES):
            stored = await self._create(
                context,
                method="CreateArtifact",
                key=artifact_key(artifact.name),
                message=route_codec.artifact_to_proto(artifact),
                difference="another location or signature",
            )
            if stored is not None:
                return pb.CreateArtifactResponse(artifact=stored)
        raise busy(artifact.name)

    async def GetArtifact(self, request: pb.GetArtifactRequest, context: Any) -> pb.GetArtifactResponse:  # noqa: N802
        """Return one."""
        names.parse(request.name, "artifacts")
        _, message = await self._get(artifact_key(request.name), request.name, resources_pb2.Artifact)
        return pb.GetArtifactResponse(artifact=message)

    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: Any) -> pb.ListArtifactsResponse:  # noqa: N802
        """List by name."""
        labels = checked_filter(request.labels)
        listed = Listed("ListArtifacts", "artifacts/", reader(resources_pb2.Artifact), labels=labels)
        found, token = await self._list(request, listed)
        return pb.ListArtifactsResponse(artifacts=found, next_page_token=token)

    async def DeleteArtifact(self, request: pb.DeleteArtifactRequest, context: Any) -> pb.DeleteArtifactResponse:  # noqa: N802
        """Forget an artifact that no revision needs."""
        names.parse(request.name, "artifacts")
        key = artifact_key(request.name)
        for _ in range(TRIES):
            found, message = await self._get(key, request.name, resources_pb2.Artifact)
            revisions = await self._store.range("revisions/")
            refuse_if_used(request.name, (r.name for r in _parsed(revisions, resources_pb2.Revision)
                                          if request.name in _artifacts_of(r)))  # fmt: skip
            same = [Compare(key, mod_revision=found.mod_revision), _unchanged("revisions/", revisions)]
            change = Change("DeleteArtifact", request.name, message, None)
            if (await self._commit(context, change, same, deletes=[key])).succeeded:
                return pb.DeleteArtifactResponse()
        raise busy(request.name)


class RevisionCalls(Records):
    """The methods that are about revisions."""

    async def CreateRevision(self, request: pb.CreateRevisionRequest, context: Any) -> pb.CreateRevisionResponse:  # noqa: N802
        """Register a revision of an artifact that exists; the same one again answers with what is stored."""
        model = names.parse(request.model, "models", field="model")
        if request.revision.artifact:
            names.parse(request.revision.artifact, "artifacts", field="revision.artifact")
        drafts = request.revision.execution.speculative.draft_artifact
        if drafts:
            names.parse(drafts, "artifacts", field=DRAFT_ARTIFACT)
        for _ in range(TRIES):
            artifact = await self._artifact(request.revision.artifact, "revision.artifact")
            draft = await self._artifact(drafts, DRAFT_ARTIFACT)
            requires = [Compare(artifact_key(one.name), exists=True) for one in (artifact, draft) if one is not None]
            revision = checked_revision(
                request.revision, model=model, artifact=artifact, draft=draft, now_ms=self._now_ms()
            )
            stored = await self._create(
                context,
                method="CreateRevision",
                key=revision_key(revision.name),
                message=route_codec.revision_to_proto(revision),
                difference="other content",
                requires=requires,
            )
            if stored is not None:
                return pb.CreateRevisionResponse(revision=stored)
        raise busy(revision.name)

    async def GetRevision(self, request: pb.GetRevisionRequest, context: Any) -> pb.GetRevisionResponse:  # noqa: N802
        """Return one."""
        names.parse_revision(request.name, field="name")
        _, message = await self._get(revision_key(request.name), request.name, resources_pb2.Revision)
        return pb.GetRevisionResponse(revision=message)

    async def ListRevisions(self, request: pb.ListRevisionsRequest, context: Any) -> pb.ListRevisionsResponse:  # noqa: N802
        """List by name, of one model or all."""
        labels = checked_filter(request.labels)
        prefix = "revisions/"
        if request.model:
            prefix = f"revisions/{names.parse(request.model, 'models', field='model')}/"
        filters = {"model": request.model}
        listed = Listed("ListRevisions", prefix, reader(resources_pb2.Revision), filters=filters, labels=labels)
        found, token = await self._list(request, listed)
        return pb.ListRevisionsResponse(revisions=found, next_page_token=token)

    async def DeleteRevision(self, request: pb.DeleteRevisionRequest, context: Any) -> pb.DeleteRevisionResponse:  # noqa: N802
        """Forget a revision that no alias names, no replica serves, and no kept snapshot would bring back."""
        names.parse_revision(request.name, field="name")
        key = revision_key(request.name)
        for _ in range(TRIES):
            found, message = await self._get(key, request.name, resources_pb2.Revision)
            aliases, replicas = await self._store.range("aliases/"), await self._store.range("replicas/")
            users = [a.name for a in _parsed(aliases, resources_pb2.Alias)
                     if any(target.revision == request.name for target in a.targets)]  # fmt: skip
            users += [r.name for r in _parsed(replicas, resources_pb2.Replica) if r.revision == request.name]
            users += await self._kept_for(request.name)  # after the listings: a root that moves on is noticed below
            refuse_if_used(request.name, users)
            same = [
                Compare(key, mod_revision=found.mod_revision),
                _unchanged("aliases/", aliases),
                _unchanged("replicas/", replicas),
                _unchanged(HISTORY_PREFIX, aliases),
            ]
            change = Change("DeleteRevision", request.name, message, None)
            if (await self._commit(context, change, same, deletes=[key])).succeeded:
                return pb.DeleteRevisionResponse()
        raise busy(request.name)

    async def _kept_for(self, revision: str) -> Sequence[str]:
        """The newest snapshot that is published or kept for a rollback and whose aliases name `revision`."""
        version = (await history.kept_revisions(self._store)).get(revision)
        return () if version is None else (f"snapshots/{version}",)

    async def _artifact(self, name: str, field: str) -> Artifact | None:
        """The artifact that a field names; None where it names none."""
        if not name:
            return None
        found = await self._store.get(artifact_key(name))
        if found is None:
            raise not_found(name, field)
        try:
            return route_codec.artifact_from_proto(resources_pb2.Artifact.FromString(found.value))
        except (BadRecord, DecodeError):
            raise damaged(name) from None


def _artifacts_of(revision: resources_pb2.Revision) -> tuple[str, str]:
    return revision.artifact, revision.execution.speculative.draft_artifact


def refuse_if_used(name: str, users: Iterator[str] | Sequence[str]) -> None:
    """Refuse to delete what others need.

    Raises:
        Failure: RESOURCE_IN_USE; `usedBy` in its metadata names them.
    """
    found = sorted(users)
    if not found:
        return
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    used_by = ", ".join(found[:_NAMED_MAX])
    metadata = {"resourceName": name, "usedBy": used_by, "usedByCount": str(len(found))}
    raise Failure(Reason.RESOURCE_IN_USE, f"{name} is needed by {used_by}{more}.", metadata=metadata)


def _unchanged(prefix: str, listing: Listing) -> Compare:
    return Compare(prefix, unchanged_since=listing.revision)


def _parsed(listing: Listing, message_class: Any) -> Iterator[Any]:
    """Those that can be read; a damaged record needs nothing, because nothing can use it."""
    for kv in listing.items:
        try:
            yield message_class.FromString(kv.value)
        except DecodeError:
            continue
