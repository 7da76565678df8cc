"""What may be deleted, and that a deletion and a use that meet never both happen."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from headrace.adapters.etcd import EtcdStore
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Reason
from headrace.rpc import status
from support.registry_api import Api, refused, revision, set_alias

ROUNDS = 60


def delete_revision(name: str) -> Any:
    return pb.DeleteRevisionRequest(name=name)


async def outcome(call: Awaitable[Any]) -> Any:
    """The answer, or the reason of the refusal."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        failure = status.from_rpc_error(error)
        assert failure is not None
        return failure.reason


async def test_an_artifact_is_deleted_once_no_revision_needs_it(api: Api) -> None:
    name = await api.artifact()
    made = await api.revision("m", artifact=name)
    failure = await refused(api.stub.DeleteArtifact(pb.DeleteArtifactRequest(name=name)))
    assert failure.reason is Reason.RESOURCE_IN_USE
    assert failure.metadata == {"resourceName": name, "usedBy": made, "usedByCount": "1"}
    await api.stub.DeleteRevision(delete_revision(made))
    await api.stub.DeleteArtifact(pb.DeleteArtifactRequest(name=name))
    assert (await refused(api.stub.GetArtifact(pb.GetArtifactRequest(name=name)))).reason is Reason.NOT_FOUND
    assert await api.artifact() == name, "and can be registered again"


async def test_an_artifact_of_another_revision_is_no_obstacle(api: Api) -> None:
    used, free = await api.artifact(1), await api.artifact(2)
    await api.revision("m", artifact=used)
    await api.stub.DeleteArtifact(pb.DeleteArtifactRequest(name=free))


async def test_a_revision_is_deleted_once_nothing_names_or_serves_it(api: Api) -> None:
    name, other = await api.revision("m", slots=1), await api.revision("m", slots=2)
    await api.alias("chat", other, name)
    await api.alias("bulk", name)
    replica = resources_pb2.Replica(name="replicas/r1", revision=name)
    await api.store.put("replicas/r1", replica.SerializeToString())
    failure = await refused(api.stub.DeleteRevision(delete_revision(name)))
    assert failure.reason is Reason.RESOURCE_IN_USE
    assert failure.metadata["usedBy"] == "aliases/bulk, aliases/chat, replicas/r1"
    await api.alias("chat", other)
    await api.stub.DeleteAlias(pb.DeleteAliasRequest(name="aliases/bulk"))
    assert (await refused(api.stub.DeleteRevision(delete_revision(name)))).metadata["usedBy"] == "replicas/r1"
    await api.store.delete("replicas/r1")
    await api.stub.DeleteRevision(delete_revision(name))
    assert (await refused(api.stub.DeleteRevision(delete_revision(name)))).reason is Reason.NOT_FOUND
    assert (await refused(api.stub.DeleteRevision(delete_revision(other)))).metadata["usedBy"] == "aliases/chat"


async def test_a_refusal_names_ten_users_and_counts_the_rest(api: Api) -> None:
    name = await api.revision()
    for index in range(12):
        await api.alias(f"a{index:02d}", name)
    failure = await refused(api.stub.DeleteRevision(delete_revision(name)))
    assert failure.metadata["usedByCount"] == "12"
    assert failure.metadata["usedBy"].count("aliases/") == 10
    assert failure.message.endswith("aliases/a09 and 2 more.")


async def test_an_alias_and_the_deletion_of_its_target_exclude_each_other(api: Api) -> None:
    """At once, many times: one of the two is refused, and no alias is ever left without its revision."""
    for round_ in range(ROUNDS):
        name = await api.revision("m", slots=1 + round_)
        calls = [api.stub.SetAlias(set_alias("chat", name)), api.other.DeleteRevision(delete_revision(name))]
        if round_ % 2:
            calls.reverse()
        ended = await asyncio.gather(*map(outcome, calls))
        answers = ended if round_ % 2 == 0 else ended[::-1]
        alias_set = not isinstance(answers[0], Reason)
        assert alias_set == isinstance(answers[1], Reason), answers
        assert answers[0] is Reason.NOT_FOUND or answers[1] is Reason.RESOURCE_IN_USE
        there = await outcome(api.stub.GetRevision(pb.GetRevisionRequest(name=name)))
        assert alias_set == (not isinstance(there, Reason))
        if alias_set:
            await api.stub.DeleteAlias(pb.DeleteAliasRequest(name="aliases/chat"))


async def test_a_revision_and_the_deletion_of_its_artifact_exclude_each_other(api: Api) -> None:
    for round_ in range(ROUNDS):
        name = await api.artifact(1 + round_)
        create = pb.CreateRevisionRequest(model="models/m", revision=revision(artifact=name))
        calls = [api.stub.CreateRevision(create), api.other.DeleteArtifact(pb.DeleteArtifactRequest(name=name))]
        if round_ % 2:
            calls.reverse()
        ended = await asyncio.gather(*map(outcome, calls))
        answers = ended if round_ % 2 == 0 else ended[::-1]
        created = not isinstance(answers[0], Reason)
        assert created == isinstance(answers[1], Reason), answers
        assert answers[0] is Reason.NOT_FOUND or answers[1] is Reason.RESOURCE_IN_USE


class Gate:
    """Holds the transactions of a use and of a deletion until both have looked and decided; then `first` is first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
        self._commit = EtcdStore.txn
        self._first = first
        self._arrived = {"use": asyncio.Event(), "deletion": asyncio.Event()}
        self._done = asyncio.Event()
        monkeypatch.setattr(EtcdStore, "txn", self._replaced())

    def _replaced(self) -> Any:
        async def txn(store: Any, compares: Any, puts: Any = (), deletes: Any = (), **options: Any) -> Any:
            return await self._txn(store, compares, puts, deletes, **options)

        return txn

    async def _txn(self, store: Any, compares: Any, puts: Any, deletes: Any, **options: Any) -> Any:
        kind = "deletion" if any(key.startswith(("revisions/", "artifacts/")) for key in deletes) else "use"
        is_change = any(put.key.startswith("audit/") for put in puts)
        if not is_change or self._arrived[kind].is_set():
            return await self._commit(store, compares, puts, deletes, **options)
        self._arrived[kind].set()
        for arrived in self._arrived.values():
            await arrived.wait()
        if kind != self._first:
            await self._done.wait()
        result = await self._commit(store, compares, puts, deletes, **options)
        self._done.set()
        return result


@pytest.mark.parametrize("first", ["use", "deletion"])
@pytest.mark.parametrize("used", ["revision", "artifact"])
async def test_of_a_use_and_a_deletion_that_have_both_decided_the_first_wins(
    api: Api, used: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if used == "revision":
        name = await api.revision()
        calls = [api.stub.SetAlias(set_alias("chat", name)), api.other.DeleteRevision(delete_revision(name))]
    else:
        name = await api.artifact()
        create = pb.CreateRevisionRequest(model="models/m", revision=revision(artifact=name))
        calls = [api.stub.CreateRevision(create), api.other.DeleteArtifact(pb.DeleteArtifactRequest(name=name))]
    Gate(monkeypatch, first)
    use, deletion = await asyncio.gather(*map(outcome, calls))
    if first == "use":
        assert (isinstance(use, Reason), deletion) == (False, Reason.RESOURCE_IN_USE)
    else:
        assert (use, isinstance(deletion, Reason)) == (Reason.NOT_FOUND, False)


@pytest.mark.parametrize("kind", ["aliases", "replicas"])
async def test_a_use_that_is_written_after_the_look_fails_the_deletion(
    api: Api, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrow moment itself: the use appears between the listing and the transaction."""
    name = await api.revision()
    commit = type(api.store).txn
    use = {
        "aliases": resources_pb2.Alias(name="aliases/x", targets=[resources_pb2.AliasTarget(revision=name, weight=1)]),
        "replicas": resources_pb2.Replica(name="replicas/x", revision=name),
    }[kind]

    async def txn(store: Any, compares: Any, puts: Any = (), deletes: Any = (), **options: Any) -> Any:
        if any(key.startswith("revisions/") for key in deletes):
            await commit(store, [], [type(puts[0])(f"{kind}/x", use.SerializeToString())])
        return await commit(store, compares, puts, deletes, **options)

    monkeypatch.setattr(type(api.store), "txn", txn)
    failure = await refused(api.stub.DeleteRevision(delete_revision(name)))
    assert (failure.reason, failure.metadata["usedBy"]) == (Reason.RESOURCE_IN_USE, f"{kind}/x")
    assert await api.audit(resource=name) == (await api.audit())[-1:], "a deletion that did not happen is no record"


async def test_a_snapshot_that_becomes_a_kept_one_after_the_look_makes_it_look_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await api.revision()
    commit, tries = EtcdStore.txn, 0

    async def txn(store: Any, compares: Any, puts: Any = (), deletes: Any = (), **options: Any) -> Any:
        nonlocal tries
        if any(key.startswith("revisions/") for key in deletes):
            tries += 1
            if tries == 1:
                await commit(store, [], [type(puts[0])("history/1", b"")])
        return await commit(store, compares, puts, deletes, **options)

    monkeypatch.setattr(EtcdStore, "txn", txn)
    await api.stub.DeleteRevision(delete_revision(name))
    assert tries == 2


async def test_unrelated_writes_delay_a_deletion_and_do_not_prevent_it(api: Api) -> None:
    name, other = await api.revision("m", slots=1), await api.revision("m", slots=2)
    stop = asyncio.Event()

    async def write() -> None:
        for index in itertools.count():
            if stop.is_set():
                return
            await api.other.SetAlias(set_alias("noise", other, labels={"n": str(index)}))
            await asyncio.sleep(0.005)

    writing = asyncio.create_task(write())
    await api.stub.DeleteRevision(delete_revision(name))
    stop.set()
    await writing


async def test_of_two_writers_with_the_same_etag_one_wins(api: Api) -> None:
    one, two = await api.revision("m", slots=1), await api.revision("m", slots=2)
    etag = (await api.alias("chat", one, labels={"n": "0"})).etag
    for round_ in range(1, ROUNDS):
        calls = [
            stub.SetAlias(set_alias("chat", target, etag=etag, labels={"n": str(round_)}))
            for stub, target in ((api.stub, one), (api.other, two))
        ]
        answers = await asyncio.gather(*map(outcome, calls))
        assert sorted(isinstance(a, Reason) for a in answers) == [False, True]
        assert Reason.ETAG_MISMATCH in answers
        etag = next(a.alias.etag for a in answers if not isinstance(a, Reason))
    assert len(await api.audit(resource="aliases/chat")) == ROUNDS


async def test_of_many_writers_without_an_etag_all_win_and_each_record_continues_the_one_before(api: Api) -> None:
    target = await api.revision()
    calls = [
        (api.stub, api.other)[index % 2].SetAlias(set_alias("chat", target, labels={"n": str(index)}))
        for index in range(12)
    ]
    answers = [answer.alias for answer in await asyncio.gather(*calls)]
    assert len({answer.etag for answer in answers}) == 12
    (last,) = (await api.stub.ListAliases(pb.ListAliasesRequest())).aliases
    assert last.etag == max((answer.etag for answer in answers), key=int)
    replaced = [
        json.loads(record.before_json or "{}").get("etag", "") for record in await api.audit(resource=last.name)
    ]
    assert sorted(replaced) == sorted(["", *(answer.etag for answer in answers if answer.etag != last.etag)])


async def test_of_two_deletions_of_an_alias_one_happens(api: Api) -> None:
    target = await api.revision()
    for _ in range(20):
        await api.alias("chat", target)
        delete = pb.DeleteAliasRequest(name="aliases/chat")
        answers = await asyncio.gather(*(outcome(stub.DeleteAlias(delete)) for stub in (api.stub, api.other)))
        assert answers.count(Reason.NOT_FOUND) == 1
    assert [record.method for record in await api.audit(resource="aliases/chat")] == ["DeleteAlias", "SetAlias"] * 20
