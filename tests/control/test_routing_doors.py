"""Replicas that would refuse a request are passed by; where all would, a first attempt is still made."""

from __future__ import annotations

import random

import pytest

from headrace.control.doors import REPORT_AGE_MAX_S, Asking, Closed
from headrace.control.errors import Failure, Reason
from headrace.control.filters import Demand
from headrace.control.load_view import ReplicaReport
from headrace.control.priority import Priority
from support.fleets import Fleet, replica

BATCH, STANDARD, CRITICAL = (
    Demand(asking=Asking(p, "t"), priority=p) for p in (Priority.BATCH, Priority.STANDARD, Priority.CRITICAL)
)
FULL = ReplicaReport(4, 8, 4, room=0, admits_from=Priority.CRITICAL)
ONE_PLACE = ReplicaReport(4, 7, 4, room=1, closed=(Closed("t", Priority.STANDARD),))


def chosen(fleet: Fleet, demand: Demand, **facts: object) -> set[str]:
    return {fleet.choose(random.Random(n).random, demand, **facts).name for n in range(40)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("report", "demand", "passed"),
    [(FULL, STANDARD, True), (FULL, CRITICAL, False), (ONE_PLACE, STANDARD, True), (ONE_PLACE, BATCH, False)],
    ids=["full", "full, but critical", "its share is used", "at another priority it is not"],
)
def test_who_would_refuse_is_passed_by(report: ReplicaReport, demand: Demand, passed: bool) -> None:
    fleet = Fleet(replica("a"), replica("b"))
    for _ in range(20):
        fleet.send("b")
    fleet.routing.report("replicas/a", report, 0.0)
    assert chosen(fleet, demand) == ({"replicas/b"} if passed else {"replicas/a"})


def test_an_old_report_keeps_nobody_away() -> None:
    fleet = Fleet(replica("a"))
    fleet.routing.report("replicas/a", FULL, 0.0)
    with pytest.raises(Failure):
        fleet.choose(random.Random(1).random, STANDARD, now=1.0, tried=("replicas/other",))
    assert chosen(fleet, STANDARD, now=REPORT_AGE_MAX_S + 0.1, tried=("replicas/other",)) == {"replicas/a"}


def test_where_all_would_refuse_a_first_attempt_asks_and_a_second_one_does_not() -> None:
    fleet = Fleet(replica("a"), replica("b"))
    for name in ("replicas/a", "replicas/b"):
        fleet.routing.report(name, FULL, 0.0)
    assert len(chosen(fleet, STANDARD)) == 2
    with pytest.raises(Failure) as caught:
        fleet.choose(random.Random(1).random, STANDARD, tried=("replicas/a",))
    assert caught.value.reason is Reason.NO_HEALTHY_WORKER


def test_the_last_place_is_taken_once_until_the_next_report_or_the_end_of_what_took_it() -> None:
    fleet = Fleet(replica("a"), replica("b"))
    for name in ("replicas/a", "replicas/b"):
        fleet.routing.report(name, ReplicaReport(4, 7, 4, room=1), 0.0)
    token = fleet.send("a")
    assert chosen(fleet, STANDARD) == {"replicas/b"}
    fleet.routing.ended(token, Reason.OVERLOADED, 0.0)
    assert len(chosen(fleet, STANDARD)) == 2


def test_what_was_known_of_a_replica_that_is_replaced_is_forgotten() -> None:
    fleet = Fleet(replica("a"), replica("b"))
    fleet.routing.report("replicas/a", FULL, 0.0)
    fleet.routing.report("replicas/nobody", FULL, 0.0)
    assert list(fleet.routing.doors) == ["replicas/a"]
    fleet.apply(replica("a", epoch=8), replica("b"), now=0.1)
    assert not len(fleet.routing.doors)
