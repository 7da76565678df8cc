"""The follower without etcd: what is taken over, what is refused, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.adapters.route_codec import parse_snapshot, snapshot_to_proto
from headrace.control.resources import Engine, Execution, Revision
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import KeyValue, Listing, WatchState
from headrace.runtime.snapshot_follower import ROOT_KEY, Freshness, SnapshotFollower

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

    def watch(self, prefix: str, on_reset: Callable[..., None], on_changes: Callable[..., None]) -> Any:
        assert ROOT_KEY.startswith(prefix)
        self.on_reset, self.on_changes = on_reset, on_changes
        return self.opened

    def list(self, snapshot: RoutingSnapshot | None, *, incarnation: str = A) -> None:
        items = () if snapshot is None else (KeyValue(ROOT_KEY, encoded(snapshot), 1, 1, 1),)
        self.on_reset(Listing(items, 1, incarnation))

    def put(self, *values: bytes | None) -> None:
        self.on_changes(tuple(Change(ROOT_KEY, n, value) for n, value in enumerate(values)))


def snapshot(version: int, *models: str, incarnation: str = A) -> RoutingSnapshot:
    run = Execution(Engine.SYNTHETIC, 128, 1, 128)
    return RoutingSnapshot(
        incarnation, version, revisions=tuple(Revision(model, "", "", run) for model in models), soft_age_s=30
    )


def encoded(value: RoutingSnapshot) -> bytes:
    return snapshot_to_proto(value).SerializeToString()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def follower(store: FakeStore) -> SnapshotFollower:
    return SnapshotFollower(store, parse_snapshot)  # type: ignore[arg-type]


def test_the_first_listing_and_each_change_are_taken_over(store: FakeStore, follower: SnapshotFollower) -> None:
    seen: list[int] = []
    follower.subscribe(lambda new: seen.append(new.version))
    store.list(snapshot(1))
    store.put(encoded(snapshot(2, "m")))
    assert follower.current == snapshot(2, "m")
    assert seen == [1, 2]


def test_only_the_newest_of_one_delivery_is_taken_over(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(1))
    store.put(encoded(snapshot(2, "m")), encoded(snapshot(3, "n")))
    assert follower.current == snapshot(3, "n")
    assert follower.applied == 2


def test_a_version_does_not_go_back_within_an_incarnation(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(5))
    store.put(encoded(snapshot(4, "m")))
    assert follower.current == snapshot(5)
    assert "version 4 does not follow version 5" in follower.refusal
    store.put(encoded(snapshot(5, "m")))
    assert follower.current == snapshot(5), "the same version with other content is refused too"
    store.put(encoded(snapshot(6, "m")))
    assert follower.current == snapshot(6, "m")
    assert follower.refusal == ""


def test_another_incarnation_begins_anew(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(500))
    store.list(snapshot(1, "m", incarnation=B), incarnation=B)
    assert follower.current == snapshot(1, "m", incarnation=B)


def test_a_snapshot_of_another_store_is_refused(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(snapshot(5))
    store.put(encoded(snapshot(6, incarnation=B)))
    assert follower.current == snapshot(5)
    assert "another incarnation" in follower.refusal


@pytest.mark.parametrize("damage", [b"\xff\xff", b"", "digest"], ids=["no proto", "empty", "another digest"])
def test_what_does_not_hold_together_is_refused_with_the_reason(
    store: FakeStore, follower: SnapshotFollower, damage: bytes | str
) -> None:
    store.list(snapshot(1, "m"))
    if damage == "digest":
        message = snapshot_to_proto(snapshot(2, "n"))
        message.digest = "0" * 64
        damage = message.SerializeToString()
    store.put(damage)  # type: ignore[arg-type]
    assert follower.current == snapshot(1, "m")
    assert follower.refusal
    assert follower.refused == 1


def test_a_store_without_a_snapshot_leaves_the_last_one_in_use(store: FakeStore, follower: SnapshotFollower) -> None:
    store.list(None)
    assert (follower.current, follower.refusal) == (None, "")
    store.list(snapshot(1, "m"))
    store.put(None)
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
    store.put(b"\xff")
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
        store.put(encoded(snapshot(3)))
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
