"""The follower without etcd: what is taken over, what is refused, and who is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.adapters import shard_codec
from headrace.adapters.shard_codec import encode_root, parse_root
from headrace.api.registry.v1 import routing_pb2
from headrace.control.errors import Failure, Reason
from headrace.control.resources import Engine, Execution, Revision
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.watch_cursor import Change
from headrace.runtime import snapshot_follower
from headrace.runtime.ports import KeyValue, Listing, WatchState
from headrace.runtime.snapshot_follower import ROOT_KEY, Freshness, SnapshotFollower
from headrace.runtime.tasks import cancel_and_wait
from support.snapshots import stored_keys

A, B = "incarnation-a", "incarnation-b"


class FakeWatch:
    def __init__(self) -> None:
        self.state = WatchState()

    async def run(self) -> None:
        await asyncio.Event().wait()


class FakeStore:
    """Hands the follower what the test says."""

    def __init__(self) -> None:
        self.opened = FakeWatch()
        self.kept: dict[str, bytes] = {}
        """What `get` finds."""
        self.reads: list[str] = []
        self.is_down = False
        self.answers = asyncio.Event()
        self.answers.set()

    def watch(self, prefix: str, on_reset: Callable[..., None], on_changes: Callable[..., None]) -> Any:
        assert ROOT_KEY.startswith(prefix)
        self.on_reset, self.on_changes = on_reset, on_changes
        return self.opened

    async def get(self, key: str, **_: object) -> KeyValue | None:
        self.reads.append(key)
        await self.answers.wait()
        if self.is_down:
            raise Failure(Reason.STORE_UNAVAILABLE, "down")
        return KeyValue(key, self.kept[key], 1, 1, 1) if key in self.kept else None

    def list(self, snapshot: RoutingSnapshot | None, *, incarnation: str = A) -> None:
        stored = stored_keys(snapshot) if snapshot is not None else {}
        self.on_reset(Listing(tuple(KeyValue(key, value, 1, 1, 1) for key, value in stored.items()), 1, incarnation))

    def deliver(self, *changed: dict[str, bytes] | dict[str, None]) -> None:
        """One delivery of the watch, with all these changes."""
        pairs = [pair for keys in changed for pair in keys.items()]
        self.on_changes(tuple(Change(key, n, value) for n, (key, value) in enumerate(pairs)))

    def publish(self, *snapshots: RoutingSnapshot) -> None:
        """One delivery with all of these, each as the Registry writes it."""
        self.deliver(*map(stored_keys, snapshots))

    def put_root(self, value: bytes | None) -> None:
        self.on_changes((Change(ROOT_KEY, 9, value),))


def snapshot(version: int, *models: str, incarnation: str = A) -> RoutingSnapshot:
    run = Execution(Engine.SYNTHETIC, 128, 1, 128)
    return RoutingSnapshot(
        incarnation, version, revisions=tuple(Revision(model, "", "", run) for model in models), soft_age_s=30
    )


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def follower(store: FakeStore) -> SnapshotFollower:
    return SnapshotFollower(store, shard_codec)  # type: ignore[arg-type]


def test_the_first_listing_and_each_change_are_taken_over(store: FakeStore, follower: SnapshotFollower) -> None:
    seen: list[int] = []
    follower.subscribe(lambda new: seen.append(new.version))
    store.list(snapshot(1))
    store.publish(snapshot(2, "m"))
    assert follower.current == snapshot(2, "m")
    assert seen == [1, 2]


def test_only_the_newest_of_one_delivery_is_taken_over(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(1))
    store.publish(snapshot(2, "m"), snapshot(3, "n"))
    assert follower.current == snapshot(3, "n")
    assert follower.applied == 2


def test_a_version_does_not_go_back_within_an_incarnation(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(5))
    store.publish(snapshot(4, "m"))
    assert follower.current == snapshot(5)
    assert "version 4 does not follow version 5" in follower.refusal
    store.publish(snapshot(5, "m"))
    assert follower.current == snapshot(5), "the same version with other content is refused too"
    store.publish(snapshot(6, "m"))
    assert follower.current == snapshot(6, "m")
    assert follower.refusal == ""


def test_another_incarnation_begins_anew(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(500))
    store.list(snapshot(1, "m", incarnation=B), incarnation=B)
    assert follower.current == snapshot(1, "m", incarnation=B)


def test_a_snapshot_of_another_store_is_refused(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(5))
    store.publish(snapshot(6, incarnation=B))
    assert follower.current == snapshot(5)
    assert "another incarnation" in follower.refusal


def with_other_digest(root: bytes) -> bytes:
    return encode_root(replace(parse_root(root), digest="0" * 64))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: b"\xff\xff", "RoutingRoot"),
        (lambda root: b"", "no incarnation"),
        (with_other_digest, "digest"),
    ],
    ids=["no proto", "empty", "another digest"],
)
def test_a_root_that_does_not_hold_together_is_refused_with_the_reason(
    store: FakeStore, follower: SnapshotFollower, damage: Callable[[bytes], bytes], words: str
) -> None:
    store.list(snapshot(1, "m"))
    keys = stored_keys(snapshot(2, "n"))
    store.deliver({**keys, ROOT_KEY: damage(keys[ROOT_KEY])})
    assert follower.current == snapshot(1, "m")
    assert words in follower.refusal
    assert follower.refused == 1
    store.publish(snapshot(3, "n"))
    assert (follower.current, follower.refusal) == (snapshot(3, "n"), "")


def renamed(shard: bytes) -> bytes:
    message = routing_pb2.Shard.FromString(shard)
    message.name = "models/other"
    return message.SerializeToString()


@pytest.mark.parametrize("damage", [lambda shard: b"\xff", lambda shard: shard + b"\0", renamed])
def test_a_shard_with_other_bytes_than_its_digest_is_refused(
    store: FakeStore, follower: SnapshotFollower, damage: Callable[[bytes], bytes]
) -> None:
    store.list(snapshot(1, "m"))
    keys = stored_keys(snapshot(2, "n"))
    store.deliver({key: value if key == ROOT_KEY else damage(value) for key, value in keys.items()})
    assert follower.current == snapshot(1, "m")
    assert "the shard models/n has digest" in follower.refusal


def test_a_snapshot_shares_the_shards_that_did_not_change(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(1, "m"))
    before = follower.current
    root = stored_keys(snapshot(2, "m", "n"))
    store.deliver({key: value for key, value in root.items() if key not in stored_keys(snapshot(1, "m"))}, root)
    assert follower.current == snapshot(2, "m", "n")
    assert before is not None
    assert follower.current.revisions[0] is before.revisions[0]
    assert store.reads == []


@contextlib.asynccontextmanager
async def following(follower: SnapshotFollower) -> AsyncIterator[None]:
    task = asyncio.create_task(follower.run())
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def test_a_shard_that_the_watch_did_not_bring_is_read(store: FakeStore, follower: SnapshotFollower) -> None:
    async with following(follower):
        store.list(snapshot(1))
        store.kept = stored_keys(snapshot(2, "m"))
        store.put_root(store.kept[ROOT_KEY])
        assert follower.current == snapshot(1)
        assert (await follower.wait_for(lambda new: new.version == 2, timeout_s=5)) == snapshot(2, "m")
        assert len(store.reads) == 1


async def test_a_store_that_does_not_answer_is_asked_again(
    store: FakeStore, follower: SnapshotFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_follower, "FETCH_RETRY_S", 0)
    async with following(follower):
        store.list(snapshot(1))
        store.kept, store.is_down = stored_keys(snapshot(2, "m")), True
        store.put_root(store.kept[ROOT_KEY])
        while len(store.reads) < 3:
            await asyncio.sleep(0)
        assert follower.current == snapshot(1)
        store.is_down = False
        await follower.wait_for(lambda new: new.version == 2, timeout_s=5)


async def test_a_shard_that_is_nowhere_is_a_refusal_that_names_it(store: FakeStore, follower: SnapshotFollower) -> None:
    async with following(follower):
        store.list(snapshot(1))
        store.put_root(stored_keys(snapshot(2, "m"))[ROOT_KEY])
        while not follower.refusal:
            await asyncio.sleep(0)
        assert "the shard models/m of snapshot 2 is not in the store" in follower.refusal
        assert follower.current == snapshot(1)


async def test_a_newer_root_supersedes_one_that_waits_for_its_shards(
    store: FakeStore, follower: SnapshotFollower
) -> None:
    seen: list[int] = []
    follower.subscribe(lambda new: seen.append(new.version))
    async with following(follower):
        store.list(snapshot(1))
        store.kept = stored_keys(snapshot(2, "m"))
        store.answers.clear()
        store.put_root(store.kept[ROOT_KEY])
        while not store.reads:
            await asyncio.sleep(0)
        store.publish(snapshot(3, "n"))
        store.answers.set()
        for _ in range(20):
            await asyncio.sleep(0)
    assert seen == [1, 3]
    assert follower.refusal == ""


def test_of_shards_that_the_snapshot_does_not_have_only_the_bytes_are_kept(
    store: FakeStore, follower: SnapshotFollower
) -> None:
    store.list(snapshot(1, "m"))
    store.publish(snapshot(2, "n"))
    assert {shard.name for shard in follower._shards.values()} == {"models/n"}
    store.put_root(stored_keys(snapshot(3, "m"))[ROOT_KEY])
    assert follower.current == snapshot(3, "m")
    assert store.reads == []
    gone = {key for key in stored_keys(snapshot(2, "n")) if key != ROOT_KEY}
    assert gone < follower._stored.keys()
    store.deliver(dict.fromkeys(gone))
    assert gone.isdisjoint(follower._stored), "nor are they where the store has them no more"


def test_a_store_without_a_snapshot_leaves_the_last_one_in_use(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(None)
    assert (follower.current, follower.refusal) == (None, "")
    store.list(snapshot(1, "m"))
    store.put_root(None)
    assert follower.current == snapshot(1, "m")
    store.list(None, incarnation=B)
    assert follower.current == snapshot(1, "m")
    assert "no snapshot" in follower.refusal
    store.list(snapshot(1, "m"))
    assert follower.refusal == "", "it is back"


def test_a_failing_subscriber_keeps_it_from_nobody(store: FakeStore, follower: SnapshotFollower) -> None:
    seen: list[int] = []
    follower.subscribe(lambda new: seen.append(1 // 0))
    follower.subscribe(lambda new: seen.append(new.version))
    store.list(snapshot(1))
    assert seen == [1]
    assert follower.current == snapshot(1)


def test_observers_hear_of_refusals_too(store: FakeStore, follower: SnapshotFollower) -> None:
    heard: list[str] = []
    follower.observe(lambda: heard.append(follower.refusal))
    store.list(snapshot(1))
    store.put_root(b"\xff")
    assert len(heard) == 2
    assert heard[1]


async def test_waiting_ends_with_the_snapshot_that_was_waited_for(store: FakeStore, follower: SnapshotFollower) -> None:
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(follower.wait_for(timeout_s=5))
        third = tasks.create_task(follower.wait_for(lambda new: new.version >= 3, timeout_s=5))
        await asyncio.sleep(0)
        store.list(snapshot(1))
        await first
        assert not third.done()
        store.publish(snapshot(3))
    assert third.result().version == 3
    with pytest.raises(TimeoutError):
        await follower.wait_for(lambda new: False, timeout_s=0)


@pytest.mark.parametrize(
    ("now", "expected"),
    [(100, "fresh"), (105, "fresh"), (106, "stale"), (130, "stale"), (131, "soft"), (3700, "soft"), (3701, "hard")],
)
def test_freshness_follows_the_silence_of_the_store(
    store: FakeStore, follower: SnapshotFollower, now: float, expected: str
) -> None:
    assert follower.freshness(now) is Freshness.NONE
    store.list(snapshot(1))
    store.opened.state = replace(store.opened.state, heard_at=100.0)
    assert follower.freshness(now) is Freshness(expected)
    assert follower.age_s(now) == now - 100
