"""What decisions draw from: made once, and never of a snapshot that has passed."""

from __future__ import annotations

from headrace.control.load_view import LoadView
from headrace.control.pools import Pools
from headrace.control.resources import ReplicaState
from headrace.control.snapshot import RoutingSnapshot
from support.fleets import REVISION, replica, snapshot

NAME = REVISION.name
ANY: frozenset[str] = frozenset()


class Routed:
    """Loads and pools that have applied a snapshot."""

    def __init__(self, now: RoutingSnapshot, zones_excluded: frozenset[str] = ANY) -> None:
        self.loads = LoadView()
        self.pools = Pools(self.loads, zones_excluded)
        self.apply(now)

    def apply(self, now: RoutingSnapshot) -> None:
        self.snapshot = now
        self.loads.apply(now.replicas_of)
        self.pools.apply(now.ready_of)

    def names(self, zones: frozenset[str] = ANY) -> list[str]:
        return [s.name.removeprefix("replicas/") for s in self.pool(self.snapshot, zones)]

    def pool(self, at: RoutingSnapshot, zones: frozenset[str] = ANY):  # type: ignore[no-untyped-def]
        return self.pools.pool(NAME, at.ready_of[NAME], zones)


def test_the_ready_ones_of_the_zones_that_will_do() -> None:
    loading = replica("d", state=ReplicaState.LOADING)
    routed = Routed(snapshot(replica("a", zone="x"), replica("b", zone="y"), replica("c"), loading), frozenset("y"))
    assert routed.names() == ["a", "c"]
    assert routed.names(frozenset("xy")) == ["a"]
    assert routed.names(frozenset("z")) == []


def test_it_is_what_the_load_view_knows_and_made_once() -> None:
    routed = Routed(snapshot(replica("a"), replica("b")))
    first = routed.pool(routed.snapshot)
    assert all(routed.loads.standing(standing.name) is standing for standing in first)
    routed.apply(routed.snapshot)
    assert routed.pool(routed.snapshot) is first
    routed.apply(snapshot(replica("b"), replica("c"), version=2))
    assert routed.names() == ["b", "c"]


def test_replicas_that_left_and_came_back_are_what_is_known_of_them_now() -> None:
    here, gone = snapshot(replica("a")), snapshot()
    routed = Routed(here)
    assert routed.pool(here)
    routed.loads.begin(1, "replicas/a")
    routed.apply(gone)
    left = routed.pool(here)[0]
    assert left.is_open, "to a request that was pinned before, though what is in flight there is all that is known"
    assert left is not routed.loads.standing("replicas/a")
    routed.apply(here)
    found = routed.pool(here)[0]
    assert found is not left
    assert routed.loads.standing(found.name) is found
