"""RegistryService over real gRPC and a real etcd: what is stored, what is refused, and with which details."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.adapters.etcd import EtcdStore
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from support.etcd import Etcd, etcd_process, eventually, make_store
from support.registry import Registry, revision, running

SHA = "ab" * 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Etcd]:
    """One for all: nothing here breaks it."""
    path: Path = tmp_path_factory.mktemp("etcd")
    async with etcd_process(path) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registry(etcd: Etcd) -> AsyncIterator[Registry]:
    async with running(etcd.endpoint) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(etcd: Etcd) -> AsyncIterator[EtcdStore]:
    async with make_store(etcd.endpoint, prefix="/headrace") as opened:
        yield opened


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def refused(call: Awaitable[Any]) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    failure = status.from_rpc_error(caught.value)
    assert failure is not None, "every error carries ErrorInfo"
    assert caught.value.code() == status.code_of(failure.reason)
    return failure


def artifact(location: str = "/models/m", **changes: Any) -> Any:
    file = {"path": "m.gguf", "size": 5, "sha256": SHA, "kind": resources_pb2.ArtifactFile.KIND_WEIGHTS, **changes}
    return resources_pb2.Artifact(files=[resources_pb2.ArtifactFile(**file)], location=location)


def alias(**fields: Any) -> Any:
    return pb.SetAliasRequest(alias=resources_pb2.Alias(**fields))


def targets(*pairs: tuple[str, int]) -> list[Any]:
    return [resources_pb2.AliasTarget(revision=name, weight=weight) for name, weight in pairs]


async def test_an_artifact_is_created_once_and_answers_again_with_what_is_stored(registry: Registry) -> None:
    request = pb.CreateArtifactRequest(artifact=artifact())
    first = (await registry.stub.CreateArtifact(request)).artifact
    assert first.name == f"artifacts/{first.digest[:12]}"
    assert first.create_time.seconds > 0
    assert (await registry.stub.CreateArtifact(request)).artifact == first
    listed = (await registry.stub.ListArtifacts(pb.ListArtifactsRequest())).artifacts
    assert first in listed
    failure = await refused(
        registry.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=artifact(location="/elsewhere")))
    )
    assert failure.reason is Reason.ALREADY_EXISTS
    assert failure.metadata["resourceName"] == first.name


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"path": "../m.gguf"}, "artifact.files[0].path"),
        ({"path": "/etc/passwd"}, "artifact.files[0].path"),
        ({"path": ""}, "artifact.files[0].path"),
        ({"sha256": SHA.upper()}, "artifact.files[0].sha256"),
        ({"kind": 0}, "artifact.files[0].kind"),
        ({"kind": 99}, "artifact.files[0].kind"),
        ({"location": " "}, "artifact.location"),
    ],
)
async def test_an_artifact_that_is_not_understood_names_the_field(
    registry: Registry, change: dict[str, Any], field: str
) -> None:
    failure = await refused(registry.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=artifact(**change))))
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, field)


async def test_a_wrong_digest_of_an_artifact_is_refused(registry: Registry) -> None:
    said = artifact()
    said.digest = "0" * 64
    failure = await refused(registry.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=said)))
    assert failure.field == "artifact.digest"


async def test_a_revision_is_content_addressed_and_completed(registry: Registry) -> None:
    request = pb.CreateRevisionRequest(model="models/m", revision=revision())
    first = (await registry.stub.CreateRevision(request)).revision
    assert first.name == f"models/m/revisions/{first.digest[:12]}"
    assert first.execution.prefill_chunk == 128
    assert (await registry.stub.CreateRevision(request)).revision == first
    other = (
        await registry.stub.CreateRevision(pb.CreateRevisionRequest(model="models/m", revision=revision(slots=3)))
    ).revision
    assert other.name != first.name
    listed = [r.name for r in (await registry.stub.ListRevisions(pb.ListRevisionsRequest())).revisions]
    assert {first.name, other.name} <= set(listed)
    assert listed == sorted(listed)


async def test_a_revision_with_weights_names_an_artifact_that_exists(registry: Registry) -> None:
    weights = (await registry.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=artifact()))).artifact
    message = revision()
    message.execution.engine = resources_pb2.Execution.ENGINE_LLAMACPP
    request = pb.CreateRevisionRequest(model="models/m", revision=message)
    assert (await refused(registry.stub.CreateRevision(request))).field == "revision.artifact"
    request.revision.artifact = "artifacts/000000000000"
    failure = await refused(registry.stub.CreateRevision(request))
    assert (failure.reason, failure.field) == (Reason.NOT_FOUND, "revision.artifact")
    request.revision.artifact = weights.name
    stored = (await registry.stub.CreateRevision(request)).revision
    snapshot = await registry.shows(lambda s: stored in s.revisions)
    assert weights in snapshot.artifacts


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"context_tokens": 0}, "revision.execution.context_tokens"),
        ({"slots": 0}, "revision.execution.slots"),
        ({"kv_cells": 100}, "revision.execution.kv_cells"),
        ({"engine": 0}, "revision.execution.engine"),
        ({"synthetic_decode_tokens_per_s": float("nan")}, "revision.execution.synthetic_decode_tokens_per_s"),
        ({"synthetic_prefill_tokens_per_s": -1.0}, "revision.execution.synthetic_prefill_tokens_per_s"),
    ],
)
async def test_a_revision_that_cannot_run_names_the_field(
    registry: Registry, change: dict[str, Any], field: str
) -> None:
    message = revision()
    for name, value in change.items():
        setattr(message.execution, name, value)
    failure = await refused(registry.stub.CreateRevision(pb.CreateRevisionRequest(model="models/m", revision=message)))
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, field)


async def test_a_policy_out_of_range_names_the_field(registry: Registry) -> None:
    message = revision()
    message.policy.default_sampling.temperature = -1
    failure = await refused(registry.stub.CreateRevision(pb.CreateRevisionRequest(model="models/m", revision=message)))
    assert failure.field == "revision.policy.default_sampling.temperature"


@pytest.mark.parametrize("model", ["", "m", "models/", "models/M", "models/a/b", "aliases/m", "models/-m"])
async def test_a_name_that_is_none_is_refused(registry: Registry, model: str) -> None:
    failure = await refused(registry.stub.CreateRevision(pb.CreateRevisionRequest(model=model, revision=revision())))
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, "model")


async def test_an_alias_is_written_over_what_was_read_and_nothing_else(registry: Registry) -> None:
    one, two = await registry.add("one"), await registry.add("two")
    first = await registry.alias("chat", one)
    assert first.etag
    assert (await registry.alias("chat", one)).etag == first.etag, "the same again changes nothing"
    second = await registry.alias("chat", two, etag=first.etag)
    assert second.etag != first.etag
    failure = await refused(registry.alias("chat", one, etag=first.etag))
    assert failure.reason is Reason.ETAG_MISMATCH
    assert (await registry.alias("chat", one)).targets[0].revision == one, "without an etag it is replaced"
    assert (await refused(registry.alias("new", one, etag="17"))).reason is Reason.ETAG_MISMATCH
    assert (await refused(registry.alias("chat", one, etag="x"))).reason is Reason.ETAG_MISMATCH


async def test_an_alias_names_revisions_that_exist(registry: Registry) -> None:
    here = await registry.add("here")
    gone = "models/gone/revisions/0123456789ab"
    failure = await refused(registry.stub.SetAlias(alias(name="aliases/x", targets=targets((here, 1), (gone, 1)))))
    assert (failure.reason, failure.field) == (Reason.NOT_FOUND, "alias.targets[1].revision")
    assert failure.metadata["resourceName"] == gone


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "chat"}, "alias.name"),
        ({"name": "aliases/x"}, "alias.targets"),
        ({"name": "aliases/x", "targets": targets(("models/m", 1))}, "alias.targets[0].revision"),
        ({"name": "aliases/x", "targets": targets(("models/m/revisions/0123456789ab", 0))}, "alias.targets[0].weight"),
        ({"name": "aliases/x", "targets": targets(*[("models/m/revisions/0123456789ab", 1)] * 2)},
         "alias.targets[1].revision"),
    ],
)  # fmt: skip
async def test_an_alias_that_is_not_understood_names_the_field(
    registry: Registry, fields: dict[str, Any], field: str
) -> None:
    failure = await refused(registry.stub.SetAlias(alias(**fields)))
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, field)


async def test_an_alias_is_deleted_once_and_only_in_the_state_that_was_read(registry: Registry) -> None:
    target = await registry.add("del")
    stored = await registry.alias("del2", target)
    request = pb.DeleteAliasRequest(name="aliases/del2", etag="1")
    assert (await refused(registry.stub.DeleteAlias(request))).reason is Reason.ETAG_MISMATCH
    request.etag = stored.etag
    await registry.stub.DeleteAlias(request)
    failure = await refused(registry.stub.DeleteAlias(request))
    assert (failure.reason, failure.metadata["resourceName"]) == (Reason.NOT_FOUND, "aliases/del2")
    await registry.shows(lambda s: "aliases/del2" not in {a.name for a in s.aliases})


async def test_the_registry_lists_itself_with_the_snapshot_it_reads(registry: Registry) -> None:
    await registry.add("seen")
    snapshot = await registry.shows(lambda s: any(a.name == "aliases/seen" for a in s.aliases))

    async def reported() -> Any:
        (record,) = (await registry.stub.ListServices(pb.ListServicesRequest())).services
        assert record.name == "registries/g1"
        assert record.endpoint == f"127.0.0.1:{registry.port}"
        assert record.snapshot_refusal == ""
        return record.snapshot_version >= snapshot.version

    await eventually(reported)


async def test_a_record_that_makes_no_sense_is_left_out_and_stops_nothing(registry: Registry, store: EtcdStore) -> None:
    await store.put("replicas/bad", b"\xff\xff")
    await store.put("aliases/bad", resources_pb2.Alias(name="aliases/other").SerializeToString())
    await store.put("revisions/m/000000000000", resources_pb2.Revision(name="models/m/revisions/1").SerializeToString())
    await registry.add("after-damage")
    snapshot = await registry.shows(lambda s: any(a.name == "aliases/after-damage" for a in s.aliases))
    assert not any(a.name == "aliases/bad" for a in snapshot.aliases)
    assert not snapshot.replicas


async def test_a_revision_is_not_deleted_while_a_snapshot_that_is_kept_would_bring_it_back(registry: Registry) -> None:
    old = await registry.add("kept", slots=1)
    await registry.shows(lambda s: any(t.revision == old for a in s.aliases for t in a.targets))
    new = await registry.add("kept", slots=2)
    published = await registry.shows(lambda s: any(t.revision == new for a in s.aliases for t in a.targets))
    failure = await refused(registry.stub.DeleteRevision(pb.DeleteRevisionRequest(name=old)))
    assert failure.reason is Reason.RESOURCE_IN_USE
    kind, version = failure.metadata["usedBy"].split("/")
    assert (kind, int(version) < published.version) == ("snapshots", True)
    await registry.stub.RollBack(pb.RollBackRequest(version=int(version)))
    failure = await refused(registry.stub.DeleteRevision(pb.DeleteRevisionRequest(name=old)))
    assert "aliases/kept" in failure.metadata["usedBy"]


async def test_a_revision_that_no_snapshot_named_is_deleted_and_leaves_the_next_one(registry: Registry) -> None:
    request = pb.CreateRevisionRequest(model="models/unnamed", revision=revision())
    name = (await registry.stub.CreateRevision(request)).revision.name
    await registry.shows(lambda s: name in [r.name for r in s.revisions])
    await registry.stub.DeleteRevision(pb.DeleteRevisionRequest(name=name))
    await registry.shows(lambda s: name not in [r.name for r in s.revisions])


async def test_a_way_back_to_a_revision_that_is_lost_is_refused_with_its_name(
    registry: Registry, store: EtcdStore
) -> None:
    lost = await registry.add("back", slots=1)
    before = await registry.shows(lambda s: any(t.revision == lost for a in s.aliases for t in a.targets))
    new = await registry.add("back", slots=2)
    await registry.shows(lambda s: any(t.revision == new for a in s.aliases for t in a.targets))
    await store.delete(f"revisions/back/{lost.rpartition('/')[2]}")
    failure = await refused(registry.stub.RollBack(pb.RollBackRequest(version=before.version)))
    assert (failure.reason, failure.metadata["resourceName"]) == (Reason.NOT_FOUND, lost)
    (kept,) = [
        a for a in (await registry.stub.ListAliases(pb.ListAliasesRequest())).aliases if a.name == "aliases/back"
    ]
    assert kept.targets[0].revision == new, "nothing has changed"
