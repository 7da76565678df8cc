"""Control of a queue's age: bursts are left alone, a queue that stands is shed from."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.queue_age import SHED_MAX, QueueAge


def shed(ages: list[tuple[float, float | None]], **bounds: float) -> list[int]:
    """How many are shed at each look: (time, age of the head)."""
    queue = QueueAge(**{"target_s": 1.0, "interval_s": 5.0, **bounds})
    return [queue.due(age, now) for now, age in ages]


@pytest.mark.parametrize(
    ("ages", "wanted"),
    [
        ([(t, 0.9) for t in range(30)], 0),
        ([(t, 3.0 if t % 4 else 0.5) for t in range(30)], 0),
        ([(t, 3.0) for t in range(5)], 0),
        ([(t, 3.0) for t in range(6)], 1),
        ([(t, 3.0) for t in range(5)] + [(5.0, None), (6.0, 3.0), (10.0, 3.0)], 0),
        ([(t, 1.0) for t in range(30)], 0),
    ],
    ids=[
        "young",
        "a burst that drains in between",
        "not for an interval yet",
        "stands for an interval",
        "empty in between begins anew",
        "at the target is good",
    ],
)
def test_only_a_queue_that_stands_is_shed_from(ages: list[tuple[float, float | None]], wanted: int) -> None:
    assert sum(shed(ages)) == wanted


def test_it_sheds_faster_and_faster_until_the_queue_is_good_again() -> None:
    queue = QueueAge(target_s=1.0, interval_s=5.0)
    at = [t / 10 for t in range(400) if queue.due(3.0, t / 10)]
    gaps = [round(b - a, 1) for a, b in itertools.pairwise(at)]
    assert at[0] == 5.0
    assert all(b <= a + 0.1 for a, b in itertools.pairwise(gaps)), "a look is 0.1 s"
    assert gaps[-1] < gaps[0] / 2
    assert queue.is_standing
    assert queue.due(0.5, 40.0) == 0
    assert not queue.is_standing
    assert [queue.due(3.0, 40.0 + t) for t in range(1, 6)] == [0] * 5, "a whole interval again"
    assert queue.due(3.0, 46.0) == 1


def test_one_short_wait_of_a_departure_shows_that_the_queue_drained() -> None:
    queue = QueueAge(target_s=1.0, interval_s=5.0)
    for t in range(20):
        queue.departed(0.2 if t % 4 == 0 else 4.0, t)
        assert queue.due(4.0, t) == 0
    for t in range(20, 26):
        queue.departed(4.0, t)
    assert queue.due(4.0, 26.0) > 0


def test_after_a_standstill_of_this_process_there_is_no_avalanche() -> None:
    queue = QueueAge(target_s=1.0, interval_s=5.0)
    queue.due(3.0, 0.0)
    assert queue.due(3.0, 1e6) == SHED_MAX
    assert queue.due(3.0, 1e6 + 0.001) <= 1


@given(
    st.lists(
        st.tuples(st.floats(0.001, 3.0), st.one_of(st.none(), st.floats(0, 10)), st.floats(0, 10)),
        max_size=80,
    )
)
def test_nothing_is_shed_within_an_interval_of_a_good_wait(
    looks: list[tuple[float, float | None, float]],
) -> None:
    queue = QueueAge(target_s=1.0, interval_s=5.0)
    now = good_at = 0.0
    for gap_s, head_s, wait_s in looks:
        now += gap_s
        queue.departed(wait_s, now)
        due = queue.due(head_s, now)
        if wait_s <= 1.0 or head_s is None or head_s <= 1.0:
            good_at = now
        assert 0 <= due <= SHED_MAX
        if due:
            assert now - good_at >= 5.0
