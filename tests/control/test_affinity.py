"""Homes of sessions; and slow start, which is as small."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.affinity import Affinity, affinity_hash
from headrace.control.slow_start import SlowStart
from support.fleets import replica

READY = tuple(replica(f"r{n}") for n in range(40))


def keys(count: int) -> list[int]:
    return [affinity_hash("t", "r", f"session-{n}") for n in range(count)]


def test_keys_of_tenants_and_revisions_never_meet_and_no_key_is_none() -> None:
    made = {affinity_hash(*of) for of in (("t", "r", "k"), ("u", "r", "k"), ("t", "s", "k"), ("tr", "", "k"))}
    assert len(made) == 4
    assert 0 not in made
    assert affinity_hash("t", "r", "") == 0
    assert Affinity().home(0, "r", READY, 0.0) == "" == Affinity().home(5, "r", (), 0.0)


def test_routers_that_have_not_seen_a_key_agree_and_few_keys_move() -> None:
    one, two = Affinity(), Affinity()
    homes = {key: one.home(key, "r", READY, 0.0) for key in keys(400)}
    assert homes == {key: two.home(key, "r", READY[::-1], 0.0) for key in keys(400)}
    assert len(set(homes.values())) > 25
    moved = {key for key in keys(400) if one.home(key, "r", READY[1:], 0.0) != homes[key]}
    assert moved == {key for key, name in homes.items() if name == READY[0].name}


@given(st.lists(st.sets(st.integers(0, 39), min_size=1), min_size=1, max_size=5))
def test_a_ring_that_has_followed_snapshots_is_the_one_that_is_made_of_the_last(steps: list[set[int]]) -> None:
    one = Affinity()
    for step in steps:
        ready = tuple(READY[n] for n in sorted(step))
        one.home(1, "r", ready, 0.0)
    fresh = Affinity()
    assert [one.home(k, "r", ready, 0.0) for k in keys(50)] == [fresh.home(k, "r", ready, 0.0) for k in keys(50)]


def test_who_served_last_is_home_until_it_is_too_long_ago() -> None:
    affinity = Affinity(ttl_s=100.0)
    key = keys(1)[0]
    ring = affinity.home(key, "r", READY, 0.0)
    other = next(r.name for r in READY if r.name != ring)
    affinity.serve(key, other, 0.0)
    affinity.serve(0, other, 0.0)
    assert affinity.home(key, "r", READY, 100.0) == other
    assert affinity.home(key, "r", READY, 100.1) == ring


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    affinity = Affinity(keys_max=3)
    first, *others = keys(4)
    affinity.serve(first, "x", 0.0)
    affinity.serve(others[0], "x", 0.0)
    affinity.serve(first, "x", 0.0)
    for key in others[1:]:
        affinity.serve(key, "x", 0.0)
    assert len(affinity) == 3
    assert [affinity.home(key, "r", READY, 0.0) == "x" for key in (first, *others)] == [True, False, True, True]
    affinity.keep(frozenset())
    assert not affinity._rings


@pytest.mark.parametrize(("now", "weight"), [(10.0, 0.1), (20.0, 0.55), (29.0, 0.955), (30.0, 1.0), (99.0, 1.0)])
def test_weight_grows_evenly(now: float, weight: float) -> None:
    slow = SlowStart(ramp_s=20.0, floor=0.1)
    slow.begin("a", 10.0)
    assert slow.weight("a", now) == pytest.approx(weight)
    assert slow.weight("b", now) == 1.0
    slow.forget("a")
    assert slow.weight("a", 10.0) == 1.0


def test_no_ramp_is_no_slow_start() -> None:
    slow = SlowStart(ramp_s=0.0)
    slow.begin("a", 0.0)
    assert slow.weight("a", 0.0) == 1.0
