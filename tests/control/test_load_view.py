"""What one Router knows of load: its own attempts exactly, the others' as reported, less and less as that ages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.load_view import HALF_LIFE, HALF_LIFE_S_MAX, HALF_LIFE_S_MIN, SERVICE_S, LoadView, ReplicaReport
from headrace.control.resources import Replica, ReplicaState
from support.fleets import REVISION, replica

R = REVISION.name


def view(*replicas: Replica) -> LoadView:
    made = LoadView()
    made.apply({R: replicas})
    return made


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("bbbeefsa"), st.integers(0, 15), st.integers(0, 5)), max_size=60))
def test_the_count_in_flight_is_the_set_of_tokens_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    """Begin, end, end again, end what never was; snapshots that take replicas away, bring them back and move them."""
    loads, truth, now = view(*(replica(f"r{n}", zone="a") for n in range(6))), dict[int, str](), 0.0
    used = 0
    for kind, token, place in steps:
        now += 1.0
        if kind == "b":
            used += 1
            loads.begin(used, f"replicas/r{place}")
            truth[used] = f"replicas/r{place}"
        elif kind in "ef":
            assert loads.end(token, now) is (truth.pop(token, None) is not None)
        elif kind == "s":
            kept = [replica(f"r{n}", zone="b" if n % 2 else "a", epoch=token + 1) for n in range(place)]
            loads.apply({R: tuple(kept)})
        else:
            loads.admitted(token, now)
        assert loads.tokens == frozenset(truth)
        assert loads.in_flight == dict(Counter(truth.values()))
    habits = {id(s.habits): s.habits for s in loads.standings}.values()
    assert sum(h.in_flight for h in habits) == len(truth)
    assert all(sum(h.in_flight_by_zone.values()) == h.in_flight and min(h.in_flight_by_zone.values(), default=0) >= 0
               for h in habits)  # fmt: skip
    for token in list(truth):
        loads.end(token, now)
    loads.apply({})
    assert not list(loads.standings), "nothing is kept of what is gone"


@pytest.mark.parametrize(
    ("age", "weight"), [(0.0, 1.0), (HALF_LIFE * SERVICE_S, 0.5), (2 * HALF_LIFE * SERVICE_S, 0.25), (60.0, 0.0)]
)
def test_a_report_loses_weight_with_its_age(age: float, weight: float) -> None:
    loads = view(replica("a"))
    standing = loads.standing("replicas/a")
    assert standing is not None
    assert loads.weight(standing, 5.0) == 0.0, "there is none"
    loads.report("replicas/a", ReplicaReport(3, 1, 4), 5.0)
    assert loads.weight(standing, 5.0 + age) == pytest.approx(weight, abs=1e-6)
    loads.report("replicas/a", ReplicaReport(3, 1, 4), 50.0, age_s=age)
    assert loads.weight(standing, 50.0) == pytest.approx(weight, abs=1e-6)


@pytest.mark.parametrize(("service_s", "half_s"), [(1e-3, HALF_LIFE_S_MIN), (20.0, 7.0), (1e5, HALF_LIFE_S_MAX)])
def test_the_longer_attempts_take_the_longer_a_report_holds(service_s: float, half_s: float) -> None:
    loads = view(replica("a"))
    loads.report("replicas/a", ReplicaReport(3, 1, 4), 0.0)
    standing = loads.standing("replicas/a")
    assert standing is not None
    standing.habits.service_s = service_s
    assert loads.weight(standing, half_s) == pytest.approx(0.5)


def test_what_others_have_is_what_is_reported_less_what_is_ours() -> None:
    loads = view(replica("a"))
    loads.begin(1, "replicas/a")
    loads.report("replicas/a", ReplicaReport(3, 2, 4), 0.0)
    standing = loads.standing("replicas/a")
    assert standing is not None
    assert standing.theirs == 4
    loads.report("replicas/a", ReplicaReport(0, 0, 4), 0.0)
    assert standing.theirs == 0, "a report from before our dispatch reached it"


def test_an_attempts_time_is_measured_from_admission_and_only_of_those_that_ran() -> None:
    loads = view(replica("a"))
    for token, measured in ((1, False), (2, True)):
        loads.begin(token, "replicas/a")
        if not measured:
            loads.admitted(token, 10.0)
        loads.end(token, 100.0, is_measured=measured)
    assert loads.habits(R).service_s == SERVICE_S, "one said nothing of the worker, the other never began"
    for token in range(3, 103):
        loads.begin(token, "replicas/a")
        loads.admitted(token, 100.0)
        loads.end(token, 107.0)
    assert loads.habits(R).service_s == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize(
    ("limit", "slots", "width"), [(0, 8, 8), (3, 8, 3), (9, 8, 8), (3, 0, 3), (0, 0, 1)]
)  # fmt: skip
def test_a_replica_is_as_wide_as_its_limit_of_concurrency(limit: int, slots: int, width: int) -> None:
    assert ReplicaReport(slots=slots, concurrency_limit=limit).width == width


def test_a_snapshot_says_what_is_void_and_what_is_fresh() -> None:
    loads = LoadView()
    loading = ReplicaState.LOADING
    assert loads.apply({R: (replica("a"), replica("b"), replica("c", state=loading))}) == ([], [])
    loads.report("replicas/a", ReplicaReport(1), 0.0)
    loads.report("replicas/d", ReplicaReport(1), 0.0)
    again = (replica("a", epoch=8), replica("c"), replica("d", state=loading))
    void, fresh = loads.apply({R: again})
    assert [r.name for r in void] == ["replicas/a", "replicas/b"]
    assert [r.name for r in fresh] == ["replicas/a", "replicas/c"]
    standing = loads.standing("replicas/a")
    assert standing is not None
    assert standing.report is None, "another process"
    assert loads.standing("replicas/b") is None
    assert loads.apply({R: again}) == ([], [])


def test_a_replica_that_moves_to_another_revision_takes_its_attempts_along() -> None:
    loads = view(replica("a"))
    loads.begin(1, "replicas/a")
    assert loads.apply({R: (), "s": (replace(replica("a"), revision="s"),)}).void == []
    assert (loads.habits(R).in_flight, loads.habits("s").in_flight) == (0, 1)
