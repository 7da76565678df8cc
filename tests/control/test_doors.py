"""What a Router believes of whom replicas refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.doors import CRITICAL_AGE_MAX_S, REPORT_AGE_MAX_S, ROOM_KEPT, Asking, Closed, Doors
from headrace.control.priority import Priority

STANDARD, BATCH, CRITICAL, SHEDDABLE = Priority.STANDARD, Priority.BATCH, Priority.CRITICAL, Priority.SHEDDABLE
GREEDY = (Closed("greedy", STANDARD),)
LATE = (Closed("a", STANDARD, tokens=100, wait_s=3.0),)
LATE_CRITICAL = (Closed("a", CRITICAL, tokens=100, wait_s=3.0),)
DUE = (Closed("a", STANDARD, tokens=100, wait_s=0.0, done_s=5.0),)


def asking(priority: Priority = STANDARD, tenant: str = "a", **fields: Any) -> Asking:
    return Asking(priority, tenant, **fields)


@pytest.mark.parametrize(
    ("said", "sent", "asks", "why"),
    [
        ({"admits_from": 0}, 99, asking(), ""),
        ({"admits_from": STANDARD}, 0, asking(BATCH), "replicas"),
        ({"admits_from": STANDARD}, 0, asking(), ""),
        ({"admits_from": 9}, 0, asking(), "replicas"),
        ({"admits_from": 9}, 0, asking(CRITICAL), ""),
        ({"admits_from": 0, "room": 2}, 1, asking(), ""),
        ({"admits_from": 0, "room": 2}, 2, asking(), "replicas"),
        ({"admits_from": 0, "room": 2}, 2, asking(CRITICAL), ""),
        ({"admits_from": STANDARD, "room": 0}, 5, asking(), ""),
        ({"admits_from": 0, "closed": GREEDY}, 0, asking(tenant="greedy"), "share"),
        ({"admits_from": 0, "closed": GREEDY}, 0, asking(tenant="modest"), ""),
        ({"admits_from": 0, "closed": GREEDY}, 0, asking(BATCH, "greedy"), ""),
        ({"admits_from": 0, "closed": LATE}, 0, asking(tokens=100, queue_s=2.9), "wait"),
        ({"admits_from": 0, "closed": LATE}, 0, asking(tokens=100, queue_s=3.004), "wait"),
        ({"admits_from": 0, "closed": LATE}, 0, asking(tokens=100, queue_s=3.1), ""),
        ({"admits_from": 0, "closed": LATE}, 0, asking(tokens=60, queue_s=2.9), ""),
        ({"admits_from": 0, "closed": LATE}, 0, asking(CRITICAL, tokens=100, queue_s=2.9), ""),
        ({"admits_from": 0, "closed": LATE_CRITICAL}, 0, asking(CRITICAL, tokens=100, queue_s=2.9), "wait"),
        ({"admits_from": 0, "closed": DUE}, 0, asking(tokens=100, deadline_at=15.0), "wait"),
        ({"admits_from": 0, "closed": DUE}, 0, asking(tokens=100, deadline_at=15.1), ""),
    ],
    ids=[
        "admits all", "below", "at the lower bound", "all", "but critical", "room left", "none left",
        "for critical there is", "full: who may take a place is told", "its share is used", "not another's",
        "nor at another priority", "its wait is too long", "less the way there",
        "it may wait longer", "it is smaller", "critical may pass",
        "its wait is too long, critical or not",
        "it would be too late", "its deadline is later",
    ],
)  # fmt: skip
def test_whom_a_replica_refuses(said: dict[str, object], sent: int, asks: Asking, why: str) -> None:
    doors = Doors()
    doors.report("r", now=10.0, **said)  # type: ignore[arg-type]
    for _ in range(sent):
        doors.sent("r")
    assert doors.refuses("r", asks, 10.0) == why
    assert not doors.refuses("other", asks, 10.0)
    late = replace(asks, deadline_at=math.inf)
    age_max_s = CRITICAL_AGE_MAX_S if asks.priority == CRITICAL else REPORT_AGE_MAX_S
    if math.isinf(asks.deadline_at):
        assert doors.refuses("r", asks, 9.99 + age_max_s) == why
    assert not doors.refuses("r", late, 10.01 + age_max_s), "an old report refuses nobody"
    doors.forget("r")
    assert not doors.refuses("r", asks, 10.0)
    assert not len(doors)


def test_an_attempt_that_ended_gives_its_place_back_and_a_report_knows_of_all_that_was_sent() -> None:
    doors = Doors()
    doors.report("r", admits_from=0, room=1, now=0.0)
    doors.sent("r")
    assert doors.refuses("r", asking(), 0.0)
    doors.ended("r")
    doors.ended("r")
    assert not doors.refuses("r", asking(), 0.0)
    doors.sent("r")
    assert doors.refuses("r", asking(), 0.0), "what ended before is no room"
    doors.report("r", admits_from=0, room=1, now=0.1)
    assert not doors.refuses("r", asking(), 0.1)


def test_a_replica_with_room_for_all_is_not_kept() -> None:
    doors = Doors()
    doors.report("r", admits_from=0, room=ROOM_KEPT, now=0.0)
    assert "r" in doors
    doors.report("r", admits_from=SHEDDABLE, room=ROOM_KEPT + 1, now=0.1)
    assert "r" not in doors
    doors.sent("r")
    doors.ended("r")


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("report"), st.integers(0, 5), st.integers(0, 12)),
            st.tuples(st.sampled_from(["sent", "ended", "forget"]), st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
    priority=st.sampled_from(list(Priority)),
)
def test_nobody_is_refused_where_the_last_report_leaves_room(
    events: list[tuple[str, int, int]], priority: Priority
) -> None:
    doors, sent, last = Doors(), 0, None
    for kind, admits_from, room in events:
        if kind == "report":
            doors.report("r", admits_from=admits_from, room=room, now=0.0)
            sent, last = 0, (admits_from, room)
        elif kind == "forget":
            doors.forget("r")
            last = None
        else:
            getattr(doors, kind)("r")
            sent = max(0, sent + (1 if kind == "sent" else -1))
        if doors.refuses("r", asking(priority), 0.0):
            assert last is not None
            assert priority < CRITICAL
            assert priority < last[0] or sent >= last[1]
        else:
            assert last is None or priority == CRITICAL or priority >= last[0]
