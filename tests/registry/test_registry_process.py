"""The Registry as a process, through what breaks: etcd killed, wiped, two Registries, old leaders, lost leases."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.adapters import shard_codec
from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_settings import EtcdConfig
from headrace.adapters.route_codec import replica_to_proto
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control.replica_hold import SUSPECT
from headrace.control.resources import Replica, ReplicaState
from headrace.control.watch_cursor import Change
from headrace.registry.main import run
from headrace.registry.publisher import Publisher
from headrace.registry.service import RegistryService
from headrace.registry.settings import RegistrySettings
from headrace.runtime.membership import Membership
from headrace.runtime.service_report import ServiceReport
from headrace.runtime.settings import SettingsError, load_settings
from headrace.runtime.snapshot_follower import SnapshotFollower
from headrace.runtime.tasks import cancel_and_wait
from support.etcd import Etcd, eventually
from support.registry import Registry, Start, revision

LEADER = "registry/leader"


@contextlib.asynccontextmanager
async def following(store: EtcdStore) -> AsyncIterator[SnapshotFollower]:
    follower = SnapshotFollower(store, shard_codec)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        await cancel_and_wait(task)


def alias_names(snapshot: Any) -> set[str]:
    return {a.name.removeprefix("aliases/") for a in snapshot.aliases}


def replica(name: str, revision: str, state: ReplicaState = ReplicaState.READY) -> bytes:
    made = Replica(f"replicas/{name}", revision, "schedulers/s1", "127.0.0.1:1", state, 0)
    return replica_to_proto(made).SerializeToString()


async def test_a_new_installation_gets_an_empty_first_version(registry: Registry) -> None:
    snapshot = await registry.snapshot()
    assert snapshot.version == 1
    assert snapshot.incarnation
    assert snapshot.soft_age.seconds == 30
    assert not snapshot.revisions


async def test_what_is_set_is_applied_by_a_follower_in_order(registry: Registry, store: EtcdStore) -> None:
    versions: list[int] = []
    async with following(store) as follower:
        follower.subscribe(lambda new: versions.append(new.version))
        for n in range(5):
            await registry.add(f"m{n}")
            new = await follower.wait_for(lambda s, n=n: f"aliases/m{n}" in s.alias_by_name, timeout_s=5)  # type: ignore[misc]
            assert new.alias_by_name[f"aliases/m{n}"].etag
        assert versions == sorted(set(versions))
        before = await registry.snapshot()
        await store.put("other/key", b"does not matter")
        await registry.add("m0")
        await asyncio.sleep(0.3)
        assert (await registry.snapshot()).version == before.version, "the same content is not published again"


async def test_replicas_come_and_go_with_their_leases_and_carry_epochs(registry: Registry, store: EtcdStore) -> None:
    named = await registry.add()
    async with Membership(store, 15) as member:
        epoch = await member.register("replicas/r1", replica("r1", named))
        snapshot = await registry.shows(lambda s: s.replicas)
        assert (snapshot.replicas[0].name, snapshot.replicas[0].epoch) == ("replicas/r1", epoch)
        await member.update("replicas/r1", replica("r1", named, ReplicaState.DRAINING))
        await registry.shows(lambda s: s.replicas[0].state == resources_pb2.Replica.STATE_DRAINING)
    await registry.shows(lambda s: not s.replicas)


async def test_many_replicas_that_vanish_at_once_are_kept_as_suspects(start: Start, store: EtcdStore) -> None:
    async with start() as registry:
        named = await registry.add()
        lease, _ = await store.lease_grant(60)
        for name in ("r1", "r2", "r3"):
            await store.put(f"replicas/{name}", replica(name, named), lease=lease)
        await registry.shows(lambda s: len(s.replicas) == 3)
        await store.lease_revoke(lease)
        held = await registry.shows(lambda s: any(r.detail for r in s.replicas))
        held = await registry.shows(lambda s: [r.detail for r in s.replicas] == [SUSPECT] * 3)
        assert {r.state for r in held.replicas} == {resources_pb2.Replica.STATE_READY}
        assert "headrace_registry_suspect_replicas 3.0" in await scrape(registry)
    # One that starts now has only the published snapshot to go by.
    async with start() as registry, Membership(store, 15) as member:
        epoch = await member.register("replicas/r1", replica("r1", named))
        back = await registry.shows(lambda s: s.replicas and s.replicas[0].epoch == epoch)
        assert [r.detail for r in back.replicas] == ["", SUSPECT, SUSPECT]


async def test_etcd_is_killed_and_restarted(etcd: Etcd, registry: Registry) -> None:
    await registry.add("before")
    old = await registry.shows(lambda s: alias_names(s) == {"before"})
    await etcd.kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.snapshot()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not registry.task.done()
    await etcd.start()
    await registry.shows(lambda s: True)
    await registry.add("after")
    new = await registry.shows(lambda s: alias_names(s) == {"before", "after"})
    assert new.version > old.version
    assert new.incarnation == old.incarnation


async def test_a_wiped_store_takes_no_readers_models_away(etcd: Etcd, registry: Registry, store: EtcdStore) -> None:
    await registry.add("before")
    async with following(store) as follower:
        kept = await follower.wait_for(lambda s: bool(s.aliases), timeout_s=5)
        await etcd.kill()
        etcd.wipe()
        await etcd.start()
        await eventually(lambda: follower.refusal, 15)
        assert follower.current == kept
        await store.wait_ready(10)

        async def is_alarmed() -> bool:
            return "headrace_registry_content_lost 1.0" in await scrape(registry)

        await eventually(is_alarmed)
        assert await store.get("snapshot/root") is None
        await registry.add("again")
        new = await follower.wait_for(lambda s: "aliases/again" in s.alias_by_name, timeout_s=10)
        assert new.incarnation != kept.incarnation
        assert follower.refusal == ""


async def test_of_two_registries_one_publishes_and_the_other_takes_over(start: Start, store: EtcdStore) -> None:
    async with start(name="g2") as second, start(name="g1") as first:
        leader = await store.get(LEADER)
        assert leader is not None
        assert leader.value == b"g2"
        await first.add("through-the-other")
        await second.shows(lambda s: "through-the-other" in alias_names(s))
        second.stop.set()
        await second.task
        await first.add("later")
        snapshot = await first.shows(lambda s: "later" in alias_names(s), 5)
        assert alias_names(snapshot) == {"through-the-other", "later"}
        leader = await store.get(LEADER)
        assert leader is not None
        assert leader.value == b"g1"


async def test_a_registry_that_was_killed_takes_its_own_place_at_once(start: Start, store: EtcdStore) -> None:
    lease, _ = await store.lease_grant(600)
    await store.put(LEADER, b"g1", lease=lease)
    async with start(name="g1") as registry:
        await registry.add("m")
        await registry.shows(lambda s: "m" in alias_names(s))


class DeafToLeader(EtcdStore):
    """A store whose watch never tells that the leader has changed."""

    def watch(self, prefix: str, on_reset: Any, on_changes: Any) -> Any:
        def filtered(changes: tuple[Change, ...]) -> None:
            on_changes(tuple(change for change in changes if change.key != LEADER))

        return super().watch(prefix, on_reset, filtered)


async def test_an_old_leader_cannot_publish(etcd: Etcd, store: EtcdStore) -> None:
    deaf = DeafToLeader(EtcdConfig((etcd.endpoint,)))
    async with Membership(deaf, 15) as member:
        publisher = Publisher(deaf, member, name="old", soft_age_s=30, hard_age_s=60)
        task = asyncio.create_task(publisher.run())
        await eventually(lambda: publisher.published == 1)
        await store.delete(LEADER)
        await store.put(LEADER, b"new")
        root = await store.get("snapshot/root")
        await RegistryService(store).CreateRevision(
            pb.CreateRevisionRequest(model="models/m", revision=revision()), None
        )
        await eventually(lambda: publisher.conflicts)
        assert publisher.is_leader, "it still believes so"
        assert await store.get("snapshot/root") == root
        await cancel_and_wait(task)
    await deaf.aclose()


async def test_a_damaged_root_is_replaced(registry: Registry, store: EtcdStore) -> None:
    await registry.add("m")
    await registry.shows(lambda s: "m" in alias_names(s))
    await store.put("snapshot/root", b"\xff\xff\xff")
    await registry.shows(lambda s: "m" in alias_names(s))


async def test_a_version_is_above_all_that_a_service_reports(registry: Registry, store: EtcdStore) -> None:
    """What a restored backup looks like: the root is older than what a Router runs."""
    record = resources_pb2.ServiceRecord(name="routers/r1", snapshot_version=900)
    await store.put("services/routers/r1", record.SerializeToString())
    await registry.add("m")
    assert (await registry.shows(lambda s: "m" in alias_names(s))).version > 900


async def test_a_stop_leaves_nothing_behind_but_what_is_durable(etcd: Etcd, start: Start, store: EtcdStore) -> None:
    async with start() as registry:
        await registry.add("m")
        await registry.shows(lambda s: "m" in alias_names(s))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{registry.port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert (await check).status == health_pb2.HealthCheckResponse.SERVING
    left = {kv.key.split("/")[0]: kv.lease for kv in (await store.range("")).items}
    assert set(left) == {"incarnation", "revisions", "aliases", "snapshot", "history", "audit"}
    assert set(left.values()) == {0}
    async with start() as registry:
        assert alias_names(await registry.snapshot()) == {"m"}


async def test_a_reader_reports_what_it_runs_and_what_it_refused(registry: Registry, store: EtcdStore) -> None:
    await registry.add("m")
    async with following(store) as follower, Membership(store, 15) as member:
        report = ServiceReport(member, follower, name="routers/r1", endpoint="127.0.0.1:1")
        task = asyncio.create_task(report.run())
        snapshot = await follower.wait_for(lambda s: bool(s.aliases), timeout_s=5)

        async def record() -> Any:
            kv = await store.get("services/routers/r1")
            return resources_pb2.ServiceRecord.FromString(kv.value) if kv else resources_pb2.ServiceRecord()

        async def is_reported() -> bool:
            return (await record()).snapshot_version == snapshot.version

        await eventually(is_reported)
        assert (await record()).snapshot_digest == snapshot.digest
        follower._refuse("because")

        async def is_refusal_reported() -> bool:
            return (await record()).snapshot_refusal == "because"

        await eventually(is_refusal_reported)
        await cancel_and_wait(task)
        await report.withdraw()
        assert await store.get("services/routers/r1") is None


async def test_metrics_have_bounded_labels(registry: Registry) -> None:
    await registry.add("m")
    await registry.shows(lambda s: "m" in alias_names(s))
    text = await scrape(registry)
    assert 'headrace_registry_calls_total{method="CreateRevision",outcome="OK"} 1.0' in text
    for line in ("is_leader 1.0", "store_fresh 1.0", "lease_held 1.0", "left_out 0.0"):
        assert f"headrace_registry_{line}" in text
    assert "models/m" not in text


async def test_without_etcd_it_does_not_start_and_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EtcdStore, "connect", functools.partial(EtcdStore.connect, timeout_s=0.5))
    settings = load_settings(RegistrySettings, "registry", overrides={"etcd": "127.0.0.1:1"})
    with pytest.raises(
        SettingsError, match=r"^registry setting 'etcd': cannot reach etcd at 127\.0\.0\.1:1 within 0.5 s"
    ):
        await run(settings, asyncio.Event())


async def test_a_port_in_use_is_named_with_its_setting(etcd: Etcd, registry: Registry) -> None:
    taken = f"127.0.0.1:{registry.port}"
    settings = load_settings(
        RegistrySettings, "registry", overrides={"etcd": etcd.endpoint, "name": "g2", "listen": taken}
    )
    with pytest.raises(SettingsError, match=rf"setting 'listen': cannot listen on {taken}"):
        await run(settings, asyncio.Event())


def test_ages_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(SettingsError, match="snapshot_hard_age_s"):
        load_settings(RegistrySettings, "registry", overrides={"snapshot_hard_age_s": 1.0})


async def scrape(registry: Registry) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{registry.metrics_port}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(get)
