"""What lives long is frozen once, and again when there is much more of it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace.control.resources import Engine, Execution, FailureDomain, Replica, ReplicaState, Revision
from headrace.control.snapshot import RoutingSnapshot
from headrace.runtime.garbage import GROWTH, SIZE_MIN, LongLived, keep_start


def snapshot(replicas: int) -> RoutingSnapshot:
    revision = Revision("m", "", "", Execution(Engine.SYNTHETIC, context_tokens=64, slots=4, kv_cells=256))
    one = Replica("r", revision.name, "schedulers/s", "s:1", ReplicaState.READY, 1, 4, 256, FailureDomain())
    return RoutingSnapshot(
        "test",
        1,
        revisions=(revision,),
        replicas=tuple(dataclasses.replace(one, name=f"r{n}") for n in range(replicas)),
    )


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    ("sizes", "frozen"),
    [
        ([SIZE_MIN - 1], [False]),
        ([SIZE_MIN], [True]),
        ([SIZE_MIN, SIZE_MIN + 1, SIZE_MIN], [True, False, False]),
        ([SIZE_MIN, int(SIZE_MIN * GROWTH), int(SIZE_MIN * GROWTH) + 1], [True, True, False]),
    ],
    ids=["little", "much", "a little more", "twice as much"],
)
def test_when_it_is_frozen(sizes: list[int], frozen: list[bool]) -> None:
    kept, found = LongLived(), []
    for size in sizes:
        gc.unfreeze()
        kept.take(snapshot(size))
        found.append(gc.get_freeze_count() > 0)
    assert found == frozen


def test_what_is_frozen_is_looked_at_no_more_and_garbage_is_not_kept_with_it() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    dead = weakref.ref(Node())
    alive = Node()
    before = gc.get_freeze_count()
    LongLived().take(snapshot(SIZE_MIN))
    assert dead() is None
    assert gc.get_freeze_count() > before
    assert all(one is not alive for one in gc.get_objects())


def test_what_a_service_starts_with_is_looked_at_no_more() -> None:
    made = [[n] for n in range(1000)]
    keep_start()
    assert all(one is not made for one in gc.get_objects())
    assert gc.get_freeze_count() >= len(made)
