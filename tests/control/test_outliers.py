"""Ejection: what counts, for how long, the probe, and the share that stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.errors import Reason
from headrace.control.outliers import EjectionRules, Health, Outliers
from support.fleets import Fleet, replica

A = "replicas/a"


def outliers(replicas: int = 10, **rules: float) -> Outliers:
    made = Outliers(EjectionRules(**rules))  # type: ignore[arg-type]
    made.resize({"r": replicas})
    return made


def fail(found: Outliers, times: int = 3, at: float = 0.0, name: str = A) -> list[bool]:
    return [found.faulted("r", name, 0, at + n) for n in range(times)]


def test_faults_in_a_row_eject() -> None:
    found = outliers()
    assert fail(found, 2) == [False, False]
    found.succeeded("r", A, 0, 2.0)
    assert fail(found, 3, 10.0) == [False, False, True]
    assert found.health(A, 12.0) is Health.EJECTED
    assert found.excludes(A, 12.0)
    assert found.out(12.0)[Health.EJECTED] == found.ejections == 1


def test_most_of_the_latest_outcomes_eject_though_none_are_in_a_row() -> None:
    found, at = outliers(), 0.0
    ejected = []
    for _ in range(12):
        ejected.append(found.faulted("r", A, 0, at))
        found.succeeded("r", A, 0, at + 0.2)
        at += 0.4
    assert any(ejected)
    assert not any(ejected[:3])
    healthy = outliers()
    for n in range(200):
        at = 10.0 * n
        assert not healthy.faulted("r", A, 0, at), "now and then is no reason"
        healthy.succeeded("r", A, 0, at + 1.0)


def test_faults_that_come_together_are_one() -> None:
    found = outliers()
    assert not any(found.faulted("r", A, 0, 5.0 + n / 1000) for n in range(50)), "one process died"
    assert fail(found, 2, 6.0) == [False, True]


def test_the_time_doubles_up_to_a_bound_and_is_forgiven() -> None:
    found = outliers(time_s=5.0, time_s_max=40.0, forgive_s=300.0)
    fail(found)
    now, lengths = 2.0, []
    for token in range(1, 7):
        until = next(now + t / 2 for t in range(1, 400) if not found.excludes(A, now + t / 2))
        lengths.append(until - now)
        found.dispatched(A, token, until)
        assert found.faulted("r", A, token, until), "the probe failed"
        now = until
    assert lengths == [5.0, 10.0, 20.0, 40.0, 40.0, 40.0]
    found.dispatched(A, 9, now + 40.0)
    assert found.succeeded("r", A, 9, now + 41.0)
    fail(found, 3, now + 50.0)
    assert found.excludes(A, now + 52.0 + 39.0), "not forgiven yet"
    found.dispatched(A, 10, now + 100.0)
    assert found.succeeded("r", A, 10, now + 100.0)
    fail(found, 3, now + 500.0)
    assert found.excludes(A, now + 506.9)
    assert not found.excludes(A, now + 507.1)


def test_half_open_takes_one_at_a_time() -> None:
    found = outliers()
    fail(found)
    assert found.health(A, 7.0) is Health.HALF_OPEN
    assert not found.excludes(A, 7.0)
    found.dispatched(A, 1, 7.0)
    found.dispatched(A, 2, 7.0)
    assert found.excludes(A, 7.0)
    assert not found.succeeded("r", A, 2, 7.5), "not the probe"
    assert found.excludes(A, 7.5)
    found.released(A, 2)
    assert found.excludes(A, 7.5)
    found.released(A, 1)  # refused: it says nothing of the replica
    assert not found.excludes(A, 7.5)
    assert found.health(A, 7.5) is Health.HALF_OPEN
    found.dispatched(A, 3, 8.0)
    assert found.succeeded("r", A, 3, 9.0)
    assert found.health(A, 9.0) is Health.CLOSED
    assert not found.excludes(A, 9.0)


def test_what_was_on_the_way_before_the_ejection_changes_nothing() -> None:
    found = outliers()
    found.dispatched(A, 1, 0.0)
    fail(found)
    assert not found.faulted("r", A, 1, 3.0)
    assert not found.succeeded("r", A, 1, 3.0)
    assert found.excludes(A, 3.0)
    assert not found.excludes(A, 7.0)


@pytest.mark.parametrize(("replicas", "out"), [(1, 0), (2, 1), (3, 1), (10, 5)])
def test_a_share_stays(replicas: int, out: int) -> None:
    found = outliers(replicas)
    for n in range(replicas):
        fail(found, name=f"replicas/{n}")
    assert sum(found.excludes(f"replicas/{n}", 3.0) for n in range(replicas)) == out
    assert (found.ejections, found.spared) == (out, replicas - out)


def test_where_replicas_leave_the_longest_out_come_back() -> None:
    found = outliers(8)
    for n in range(4):
        fail(found, name=f"replicas/{n}")
    found.resize({"r": 4})
    assert [found.excludes(f"replicas/{n}", 3.0) for n in range(4)] == [False, False, True, True]
    found.forget("r", "replicas/3")
    assert not found.excludes("replicas/3", 3.0)


STEPS = st.tuples(st.sampled_from("fffsdro"), st.integers(0, 5), st.integers(1, 4), st.floats(0.0, 4.0))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 6), st.floats(0.0, 1.0), st.lists(STEPS, max_size=80))
def test_never_more_than_the_share_is_out(
    replicas: int, share: float, steps: list[tuple[str, int, int, float]]
) -> None:
    found, now = outliers(replicas, share_max=share, in_a_row=2), 0.0
    for kind, place, token, wait in steps:
        name, now = f"replicas/{place}", now + wait
        if kind == "f":
            found.faulted("r", name, token, now)
        elif kind == "s":
            found.succeeded("r", name, token, now)
        elif kind == "d":
            found.dispatched(name, token, now)
        elif kind == "r":
            found.released(name, token)
        else:
            replicas = place
            found.resize({"r": replicas})
        names = [f"replicas/{n}" for n in range(6)]
        assert sum(found.excludes(n, now) for n in names) <= int(share * replicas)
        assert sum(found.health(n, now) is not Health.CLOSED for n in names) == sum(found.out(now).values())


@pytest.mark.parametrize("gone", [False, True], ids=["replaced", "gone"])
def test_faults_of_a_process_that_is_no_more_are_held_against_nobody(gone: bool) -> None:
    fleet = Fleet(*(replica(name) for name in "abcd"))
    late = [fleet.send("a") for _ in range(9)]
    fleet.apply(*(replica(name, epoch=8 if name == "a" else 7) for name in "abcd" if name != "a" or not gone), now=1.0)
    for number, token in enumerate(late):
        fleet.routing.ended(token, Reason.WORKER_LOST_BEFORE_OUTPUT, 2.0 + number)
    assert fleet.routing.outliers.health("replicas/a", 12.0) is Health.CLOSED
    assert fleet.routing.outliers.ejections == 0
    assert not fleet.routing.outliers.is_any_out
