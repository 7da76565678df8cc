"""What a Router believes of whom replicas refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.doors import REPORT_AGE_MAX_S, ROOM_KEPT, Doors
from headrace.control.priority import Priority

STANDARD, BATCH, CRITICAL, SHEDDABLE = Priority.STANDARD, Priority.BATCH, Priority.CRITICAL, Priority.SHEDDABLE
GREEDY = frozenset({("greedy", int(STANDARD))})


@pytest.mark.parametrize(
    ("said", "sent", "asks", "refused"),
    [
        ({"admits_from": 0}, 99, (STANDARD, "a"), False),
        ({"admits_from": STANDARD}, 0, (BATCH, "a"), True),
        ({"admits_from": STANDARD}, 0, (STANDARD, "a"), False),
        ({"admits_from": 9}, 0, (STANDARD, "a"), True),
        ({"admits_from": 9}, 0, (CRITICAL, "a"), False),
        ({"admits_from": 0, "room": 2}, 1, (STANDARD, "a"), False),
        ({"admits_from": 0, "room": 2}, 2, (STANDARD, "a"), True),
        ({"admits_from": 0, "room": 2}, 2, (CRITICAL, "a"), False),
        ({"admits_from": STANDARD, "room": 0}, 5, (STANDARD, "a"), False),
        ({"admits_from": 0, "shares": GREEDY}, 0, (STANDARD, "greedy"), True),
        ({"admits_from": 0, "shares": GREEDY}, 0, (STANDARD, "modest"), False),
        ({"admits_from": 0, "shares": GREEDY}, 0, (BATCH, "greedy"), False),
    ],
    ids=[
        "admits all", "below", "at the lower bound", "all", "but critical always tries", "room left", "none left",
        "for critical there may be", "full: who may take a place is told", "its share is used", "not another's",
        "nor at another priority",
    ],
)  # fmt: skip
def test_whom_a_replica_refuses(said: dict[str, object], sent: int, asks: tuple[Priority, str], refused: bool) -> None:
    doors = Doors()
    doors.report("r", now=10.0, **said)  # type: ignore[arg-type]
    for _ in range(sent):
        doors.sent("r")
    assert doors.refuses("r", *asks, 10.0) is refused
    assert not doors.refuses("other", *asks, 10.0)
    assert not doors.refuses("r", *asks, 10.01 + REPORT_AGE_MAX_S), "an old report refuses nobody"
    doors.forget("r")
    assert not doors.refuses("r", *asks, 10.0)
    assert not len(doors)


def test_an_attempt_that_ended_gives_its_place_back_and_a_report_knows_of_all_that_was_sent() -> None:
    doors = Doors()
    doors.report("r", admits_from=0, room=1, now=0.0)
    doors.sent("r")
    assert doors.refuses("r", STANDARD, "a", 0.0)
    doors.ended("r")
    doors.ended("r")
    assert not doors.refuses("r", STANDARD, "a", 0.0)
    doors.sent("r")
    assert doors.refuses("r", STANDARD, "a", 0.0), "what ended before is no room"
    doors.report("r", admits_from=0, room=1, now=0.1)
    assert not doors.refuses("r", STANDARD, "a", 0.1)


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
        if doors.refuses("r", priority, "a", 0.0):
            assert last is not None
            assert priority < CRITICAL
            assert priority < last[0] or sent >= last[1]
        else:
            assert last is None or priority == CRITICAL or priority >= last[0]
