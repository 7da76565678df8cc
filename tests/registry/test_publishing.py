"""Publications as they are stored: shards, history and the way back, what is deleted when, and the fast path."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headrace.adapters import shard_codec
from headrace.adapters.etcd import EtcdStore
from headrace.adapters.route_codec import replica_to_proto
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Reason
from headrace.control.resources import Replica, ReplicaState
from headrace.registry import publisher, shard_keeping
from headrace.registry.shard_keeping import SNAPSHOTS_KEPT
from headrace.rpc import status
from headrace.runtime.snapshot_follower import SnapshotFollower
from headrace.runtime.tasks import cancel_and_wait
from support.etcd import eventually
from support.registry import Registry, Start


@contextlib.asynccontextmanager
async def following(store: EtcdStore) -> AsyncIterator[SnapshotFollower]:
    follower = SnapshotFollower(store, shard_codec)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        await cancel_and_wait(task)


async def keys(store: EtcdStore, prefix: str) -> dict[str, bytes]:
    return {kv.key: kv.value for kv in (await store.range(prefix)).items}


async def put_replicas(store: EtcdStore, revision: str, *numbers: int) -> None:
    for number in numbers:
        made = Replica(f"replicas/r{number}", revision, "schedulers/s", "127.0.0.1:1", ReplicaState.READY, 0)
        await store.put(made.name, replica_to_proto(made).SerializeToString())


def targets(snapshot: Any, alias: str) -> list[str]:
    return [t.revision for a in snapshot.aliases if a.name == f"aliases/{alias}" for t in a.targets]


async def test_one_replicas_change_writes_one_shard_and_the_root(registry: Registry, store: EtcdStore) -> None:
    named = await registry.add()
    await put_replicas(store, named, *range(300))
    await registry.shows(lambda s: len(s.replicas) == 300)
    before, history = await keys(store, "snapshot/"), await keys(store, "history/")
    await store.delete("replicas/r7")
    await registry.shows(lambda s: len(s.replicas) == 299)
    after = await keys(store, "snapshot/")
    assert len([key for key in after if key not in before]) == 1
    assert before["snapshot/root"] != after["snapshot/root"]
    assert await keys(store, "history/") == history, "only models and aliases are worth going back to"


async def test_a_rollback_sets_aliases_to_what_they_were(registry: Registry, store: EtcdStore) -> None:
    old = await registry.add("m")
    await registry.add("gone")
    good = (await registry.shows(lambda s: len(s.aliases) == 2)).version
    new = await registry.add("m", slots=3)
    await registry.alias("added", new)
    await registry.stub.DeleteAlias(pb.DeleteAliasRequest(name="aliases/gone"), timeout=5)
    bad = await registry.shows(lambda s: targets(s, "m") == [new] and {a.name[8:] for a in s.aliases} == {"m", "added"})
    kept = (await registry.stub.ListSnapshots(pb.ListSnapshotsRequest(), timeout=5)).roots
    assert [root.version for root in kept] == sorted((root.version for root in kept), reverse=True)
    assert {good, bad.version} <= {root.version for root in kept}
    earlier = (await registry.stub.GetSnapshot(pb.GetSnapshotRequest(version=good), timeout=5)).snapshot
    assert (earlier.version, targets(earlier, "m")) == (good, [old])

    done = await registry.stub.RollBack(pb.RollBackRequest(version=good), timeout=5)
    assert list(done.changed) == ["aliases/added", "aliases/gone", "aliases/m"]
    back = await registry.shows(lambda s: targets(s, "m") == [old] and targets(s, "gone") and not targets(s, "added"))
    assert back.version > bad.version
    again = await registry.stub.RollBack(pb.RollBackRequest(version=good), timeout=5)
    assert not again.changed
    (record,) = (
        await registry.stub.ListAuditRecords(pb.ListAuditRecordsRequest(resource=f"snapshots/{good}"), timeout=5)
    ).records
    assert record.method == "RollBack"


async def test_a_version_that_is_not_kept_is_not_found(registry: Registry) -> None:
    for call in (
        registry.stub.GetSnapshot(pb.GetSnapshotRequest(version=900), timeout=5),
        registry.stub.RollBack(pb.RollBackRequest(version=900), timeout=5),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        failure = status.from_rpc_error(caught.value)
        assert failure is not None
        assert (failure.reason, failure.field) == (Reason.NOT_FOUND, "version")


async def test_history_is_bounded_and_unused_shards_go_after_the_grace(
    start: Start, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_keeping, "GRACE_S", 0.3)
    monkeypatch.setattr(publisher, "IDLE_S", 0.1)
    async with start() as registry:
        named = await registry.add()
        await put_replicas(store, named, 1)
        for n in range(SNAPSHOTS_KEPT + 5):
            await registry.alias(f"a{n}", named)
            await registry.shows(lambda s, n=n: targets(s, f"a{n}"))  # type: ignore[misc]
        await store.delete("replicas/r1")
        await registry.shows(lambda s: not s.replicas)
        history = await keys(store, "history/")
        assert len(history) == SNAPSHOTS_KEPT
        used = {
            ref.digest.hex()[:32]
            for value in history.values()
            for ref in shard_codec.parse_root(value).shards
            if not ref.name.startswith("replicas/")
        }

        async def is_clean() -> bool:
            return {key.rpartition("/")[2] for key in await keys(store, "snapshot/shards/")} == used

        await eventually(is_clean)
        oldest = shard_codec.parse_root(history[min(history)]).version
        assert (await registry.stub.GetSnapshot(pb.GetSnapshotRequest(version=oldest), timeout=5)).snapshot.aliases


async def test_a_shard_that_was_deleted_is_written_again_with_a_new_version(
    registry: Registry, store: EtcdStore
) -> None:
    await registry.add()
    async with following(store) as follower:
        before = await follower.wait_for(lambda s: bool(s.aliases), timeout_s=5)
        for key in await keys(store, "snapshot/shards/"):
            await store.delete(key)
        await registry.alias("other", before.revisions[0].name)
        after = await follower.wait_for(lambda s: len(s.aliases) == 2, timeout_s=10)
        assert after.revisions == before.revisions
    async with following(store) as fresh:
        assert (await fresh.wait_for(timeout_s=5)).aliases == after.aliases


async def test_a_revocation_waits_for_nothing(start: Start, store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start() as registry, following(store) as follower:
        named = await registry.add()
        await follower.wait_for(lambda s: bool(s.aliases), timeout_s=5)
        monkeypatch.setattr(publisher, "SETTLE_S", 60.0)
        monkeypatch.setattr(publisher, "GAP_S", 60.0)
        for n, name in enumerate((named, "replicas/r1")):  # the second one comes in the gap after the first
            revoked = resources_pb2.Revocation(name=name, reason="why", end_running=bool(n))
            await registry.stub.Revoke(pb.RevokeRequest(revocation=revoked), timeout=5)
            found = await follower.wait_for(lambda s, name=name: s.is_revoked(name), timeout_s=5)  # type: ignore[misc]
            assert found.revocation_of[name].end_running is bool(n)
        await registry.stub.LiftRevocation(pb.LiftRevocationRequest(name=named), timeout=5)
        await follower.wait_for(lambda s: not s.is_revoked(named), timeout_s=5)


def last_good(snapshot: Any) -> list[str]:
    return [t.revision for alias in snapshot.aliases for t in alias.last_good]


async def test_what_an_alias_left_is_told_until_its_successor_serves_whoever_leads(
    start: Start, store: EtcdStore
) -> None:
    async with start(name="g2") as second:
        async with start(name="g1") as first:
            old, new = await first.add(), await first.add("other", slots=3)
            await put_replicas(store, old, 1)
            await first.shows(lambda s: s.replicas)
            await first.alias("m", new)
            await first.alias("other", old)
            await first.shows(lambda s: targets(s, "m") == [new] and last_good(s) == [old])
        await store.put("services/x/nudge", b"")
        await second.add("third")
        snapshot = await second.shows(lambda s: targets(s, "third"))
        assert last_good(snapshot) == [old], "the next leader knows it from what was published"
        versions = snapshot.version
        await asyncio.sleep(4 * publisher.GAP_S)
        assert (await second.shows(lambda s: True)).version == versions, "nothing is published without news"
        await put_replicas(store, new, 2)
        await second.shows(lambda s: any(r.revision == new for r in s.replicas) and last_good(s) == [])


async def test_callers_cannot_say_what_was_good_last(registry: Registry) -> None:
    named = await registry.add()
    one = resources_pb2.AliasTarget(revision=named, weight=1)
    alias = resources_pb2.Alias(name="aliases/x", targets=[one], last_good=[one])
    assert not (await registry.stub.SetAlias(pb.SetAliasRequest(alias=alias), timeout=5)).alias.last_good
