"""One replica that vanishes is believed; most of the fleet at once is not."""

from __future__ import annotations

from headrace.control.replica_hold import HOLD_S, SUSPECT, WINDOW_S, Held, ReplicaHold
from headrace.control.resources import Replica, ReplicaState

ALL = ("a", "b", "c", "d")


def replicas(*ids: str, state: ReplicaState = ReplicaState.READY, epoch: int = 1) -> tuple[Replica, ...]:
    return tuple(Replica(f"replicas/{i}", "models/m/revisions/0123456789ab", "s", "h:1", state, epoch) for i in ids)


def names(held: Held) -> set[str]:
    return {r.name.removeprefix("replicas/") for r in held.replicas}


def test_one_that_vanishes_is_gone_at_once() -> None:
    hold = ReplicaHold(replicas(*ALL))
    assert names(hold.observe(replicas("a", "b", "c"), 0)) == {"a", "b", "c"}
    assert hold.next_deadline() is None


def test_half_of_the_fleet_is_still_believed() -> None:
    assert names(ReplicaHold(replicas(*ALL)).observe(replicas("a", "b"), 0)) == {"a", "b"}


def test_most_of_the_fleet_is_held_as_suspect_and_given_up_in_the_end() -> None:
    hold = ReplicaHold(replicas(*ALL))
    held = hold.observe(replicas("a"), 0)
    assert names(held) == set(ALL)
    assert held.suspects == 3
    assert {r.detail for r in held.replicas} == {"", SUSPECT}
    assert hold.next_deadline() == HOLD_S
    assert names(hold.observe(replicas("a"), HOLD_S - 1)) == set(ALL)
    assert names(hold.observe(replicas("a"), HOLD_S)) == {"a"}
    assert hold.next_deadline() is None


def test_leases_that_end_one_after_another_count_together() -> None:
    hold = ReplicaHold(replicas(*ALL))
    assert names(hold.observe(replicas("a", "b", "c"), 0)) == {"a", "b", "c"}
    assert names(hold.observe(replicas("a", "b"), 1)) == {"a", "b"}
    assert names(hold.observe(replicas("a"), 2)) == set(ALL)


def test_losses_far_apart_do_not() -> None:
    hold = ReplicaHold(replicas(*ALL))
    for step, left in enumerate((("a", "b", "c"), ("a", "b"), ("a",), ())):
        assert names(hold.observe(replicas(*left), step * WINDOW_S)) == set(left)


def test_a_store_that_came_back_empty_makes_suspects_of_all_be_it_one() -> None:
    for known in (("a",), ALL):
        hold = ReplicaHold(replicas(*known))
        hold.observe(replicas(*known), 0)
        hold.lose_store(100)
        assert names(hold.observe((), 100)) == set(known)
        back = hold.observe(replicas("a", epoch=9), 101)
        assert (names(back), back.suspects) == (set(known), len(known) - 1)
        assert names(hold.observe(replicas("a", epoch=9), 100 + HOLD_S)) == {"a"}
    drained = ReplicaHold()
    drained.observe(replicas("a", state=ReplicaState.DRAINING), 0)
    drained.lose_store(1)
    assert names(drained.observe((), 1)) == set(), "its going was announced"


def test_a_suspect_that_registers_again_is_itself_again() -> None:
    hold = ReplicaHold(replicas(*ALL))
    hold.observe((), 0)
    held = hold.observe(replicas("a", epoch=9), 5)
    assert names(held) == set(ALL)
    assert held.suspects == 3
    assert [r.epoch for r in held.replicas if r.name == "replicas/a"] == [9]
    assert hold.observe(replicas(*ALL, epoch=9), 6).suspects == 0


def test_those_that_drained_are_not_missed() -> None:
    hold = ReplicaHold(replicas(*ALL, state=ReplicaState.DRAINING))
    assert names(hold.observe((), 0)) == set()


def test_a_lonely_replica_that_vanishes_is_believed() -> None:
    assert names(ReplicaHold(replicas("a")).observe((), 0)) == set()
