"""The record of changes, and revocations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Reason
from headrace.registry.audit import JSON_BYTES_MAX, Audit, Change, to_json
from support.etcd import Etcd, make_store
from support.registry_api import SHA, Api, artifact, names, refused, serving, set_alias

REVISION = "models/m/revisions/0123456789ab"


def revoke(name: str, **fields: Any) -> Any:
    return pb.RevokeRequest(revocation=resources_pb2.Revocation(name=name, **fields))


async def test_every_change_is_recorded_with_who_what_before_and_after(api: Api) -> None:
    files = await api.artifact()
    one, two = await api.revision("m", slots=1), await api.revision("m", slots=2)
    first = await api.alias("chat", one)
    await api.alias("chat", two)
    await api.stub.DeleteAlias(pb.DeleteAliasRequest(name="aliases/chat"))
    await api.stub.DeleteRevision(pb.DeleteRevisionRequest(name=one))
    await api.stub.DeleteArtifact(pb.DeleteArtifactRequest(name=files))
    await api.stub.Revoke(revoke(REVISION, reason="leak"))
    await api.stub.LiftRevocation(pb.LiftRevocationRequest(name=REVISION))
    records = (await api.audit())[::-1]
    assert [(record.method, record.resource) for record in records] == [
        ("CreateArtifact", files),
        ("CreateRevision", one),
        ("CreateRevision", two),
        ("SetAlias", "aliases/chat"),
        ("SetAlias", "aliases/chat"),
        ("DeleteAlias", "aliases/chat"),
        ("DeleteRevision", one),
        ("DeleteArtifact", files),
        ("Revoke", REVISION),
        ("LiftRevocation", REVISION),
    ]
    assert [(bool(r.before_json), bool(r.after_json)) for r in records] == [
        *[(False, True)] * 4, (True, True), *[(True, False)] * 3, (False, True), (True, False),
    ]  # fmt: skip
    change = records[4]
    assert json.loads(change.before_json)["targets"] == [{"revision": one, "weight": 1}]
    assert json.loads(change.before_json)["etag"] == first.etag
    assert json.loads(change.after_json)["targets"] == [{"revision": two, "weight": 1}]
    assert names(records) == sorted(names(records)), "ids sort by time"
    assert all(record.time.seconds > 0 for record in records)


async def test_what_changes_nothing_is_no_record(api: Api) -> None:
    target = await api.revision()
    await api.alias("chat", target)
    await api.stub.Revoke(revoke(REVISION))
    before = await api.audit()
    assert await api.revision() == target
    await api.alias("chat", target)
    await api.stub.Revoke(revoke(REVISION))
    await refused(api.stub.SetAlias(set_alias("chat", REVISION)))
    await refused(api.stub.SetAlias(set_alias("chat", target, etag="1", labels={"a": "b"})))
    await refused(api.stub.DeleteRevision(pb.DeleteRevisionRequest(name=target)))
    await refused(api.stub.DeleteAlias(pb.DeleteAliasRequest(name="aliases/none")))
    assert await api.audit() == before


@pytest.mark.parametrize(
    ("said", "actor"),
    [("ada", "ada"), ("", "unknown"), (None, "unknown"), ("%C3%84nne", "Änne"), ("x" * 100, "x" * 64), ("a%0Ab", "ab"),
     ("%ff", "\ufffd")],
)  # fmt: skip
async def test_the_actor_is_who_the_call_names_and_where_it_came_from(api: Api, said: str | None, actor: str) -> None:
    metadata = () if said is None else (("headrace-actor", said),)
    await api.stub.Revoke(revoke(REVISION), metadata=metadata)
    (record,) = await api.audit()
    assert record.actor.startswith(f"{actor} (ipv4:127.0.0.1:")


async def test_records_are_listed_by_page_the_newest_first_and_by_resource(api: Api) -> None:
    target = await api.revision()
    for index in range(5):
        await api.alias("chat", target, labels={"n": str(index)})
        await api.alias("bulk", target, labels={"n": str(index)})
    everything = await api.audit()
    request = pb.ListAuditRecordsRequest(page_size=2, resource="aliases/chat")
    found, sizes = [], []
    while True:
        page = await api.stub.ListAuditRecords(request)
        found += page.records
        sizes.append(len(page.records))
        await api.alias("bulk", target, labels={"n": page.next_page_token[-8:]})
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert sizes == [2, 2, 1]
    assert found == [record for record in everything if record.resource == "aliases/chat"]
    assert [json.loads(record.after_json)["labels"]["n"] for record in found] == list("43210")


async def test_only_the_newest_records_are_kept(shared_etcd: Etcd) -> None:
    async with make_store(shared_etcd.endpoint) as store:
        for index in range(40):
            await store.put(f"audit/{index:014d}-old", b"")
        async with serving(store, audit_kept=7) as api:
            target = await api.revision()
            for index in range(9):
                await api.alias("chat", target, labels={"n": str(index)})
            assert len(await api.audit()) == 7
            calls = [(api.stub, api.other)[i % 2].SetAlias(set_alias(f"a{i}", target)) for i in range(20)]
            await asyncio.gather(*calls)
            for index in range(2):  # writers at once drop the same records; those who come next drop the rest
                await api.alias("last", target, labels={"n": str(index)})
            records = await api.audit()
    assert len(records) == 7
    assert records[0].resource == "aliases/last"


async def test_records_of_one_process_are_in_order_whatever_the_clock_does(shared_etcd: Etcd) -> None:
    times = iter([5000, 5000, 4000, 4000, 4500, 5001])
    async with make_store(shared_etcd.endpoint) as store:
        audit = Audit(store)
        made = [
            audit.record(Change("Revoke", "replicas/r", None, None), actor="", now_ms=next(times)).key for _ in range(6)
        ]
    assert made == sorted(made)
    assert len(set(made)) == 6


def test_a_large_resource_is_recorded_without_its_largest_fields() -> None:
    large = artifact(location="/models/m", labels={"a": "b"})
    for index in range(200):
        large.files.add(path=f"f{index}", size=1, sha256=SHA, kind=resources_pb2.ArtifactFile.KIND_OTHER)
    text = to_json(large)
    assert len(text.encode()) <= JSON_BYTES_MAX
    assert json.loads(text) == {"location": "/models/m", "labels": {"a": "b"}, "omitted": ["files"]}
    larger = resources_pb2.Artifact(location="x" * 9000, signature="y" * 9000)
    assert json.loads(to_json(larger)) == {"omitted": ["location", "signature"]}
    assert to_json(None) == ""


@pytest.mark.parametrize("name", [REVISION, "replicas/r1", "tenants/acme/keys/k1"])
async def test_a_revocation_stands_until_it_is_lifted(api: Api, name: str) -> None:
    first = (await api.stub.Revoke(revoke(name, reason="leak"))).revocation
    assert (first.name, first.reason, first.end_running) == (name, "leak", False)
    assert first.create_time.seconds > 0
    second = (await api.stub.Revoke(revoke(name, reason="worse", end_running=True))).revocation
    assert (second.reason, second.end_running) == ("worse", True)
    assert second.create_time == first.create_time, "it has been revoked since"
    assert list((await api.stub.ListRevocations(pb.ListRevocationsRequest())).revocations) == [second]
    stored = await api.store.get(f"revocations/{name}")
    assert stored is not None
    assert resources_pb2.Revocation.FromString(stored.value) == second
    await api.stub.LiftRevocation(pb.LiftRevocationRequest(name=name))
    assert not (await api.stub.ListRevocations(pb.ListRevocationsRequest())).revocations
    failure = await refused(api.stub.LiftRevocation(pb.LiftRevocationRequest(name=name)))
    assert failure.reason is Reason.NOT_FOUND


async def test_revocations_are_listed_by_name(api: Api) -> None:
    made = ["tenants/t/keys/k", "replicas/b", REVISION, "replicas/a"]
    for name in made:
        await api.stub.Revoke(revoke(name))
    await api.store.put("revocations/replicas/bad", b"\xff")
    listed = (await api.stub.ListRevocations(pb.ListRevocationsRequest())).revocations
    assert names(listed) == sorted(made)


@pytest.mark.parametrize(
    "name",
    ["", "models/m", "replicas/", "replicas/A", "replicas/a/b", "tenants/t", "tenants/t/keys/", "tenants/T/keys/k",
     "tenants/t/key/k", "aliases/a", "models/m/revisions/xyz", "tenants/t/keys/k/x"],
)  # fmt: skip
async def test_only_revisions_replicas_and_keys_are_revoked(api: Api, name: str) -> None:
    failure = await refused(api.stub.Revoke(revoke(name)))
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, "revocation.name")
    failure = await refused(api.stub.LiftRevocation(pb.LiftRevocationRequest(name=name)))
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, "name")


async def test_a_reason_is_a_sentence_not_a_report(api: Api) -> None:
    await api.stub.Revoke(revoke("replicas/r", reason="x" * 500))
    failure = await refused(api.stub.Revoke(revoke("replicas/r", reason="x" * 501)))
    assert failure.field == "revocation.reason"
