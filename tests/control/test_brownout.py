"""The order of refusal: levels go up quickly, down slowly, one at a time, and CRITICAL is last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.brownout import DOWN_S, UP_S, Brownout, floor, pressure_of
from headrace.control.priority import Priority

ALL, BATCH, STANDARD, CRITICAL = Priority.SHEDDABLE, Priority.BATCH, Priority.STANDARD, Priority.CRITICAL


@pytest.mark.parametrize(
    ("pressures", "wanted"),
    [
        ([(0, 0.9), (10, 0.99)], ALL),
        ([(0, 1.0)], ALL),
        ([(0, 1.0), (0.5, 0.9), (1.0, 1.0)], ALL),
        ([(0, 1.0), (1.0, 1.0)], BATCH),
        ([(0, 9.0), (1.0, 9.0)], BATCH),
        ([(0, 9.0), (1.0, 9.0), (2.0, 9.0)], STANDARD),
        ([(t, 9.0) for t in range(20)], CRITICAL),
        ([(t, 1.9) for t in range(20)], BATCH),
        ([(0, 1.0), (1, 1.0), (2, 0.6), (60, 0.6)], BATCH),
        ([(0, 1.0), (1, 1.0), (2, 0.4), (6.9, 0.4)], BATCH),
        ([(0, 1.0), (1, 1.0), (2, 0.4), (7.0, 0.4)], ALL),
        ([(0, 9.0), (1, 9.0), (2, 9.0), (3, 0), (8, 0)], BATCH),
    ],
    ids=[
        "below the threshold",
        "not for long enough",
        "interrupted",
        "SHEDDABLE is refused first",
        "one level at a time",
        "then BATCH",
        "then STANDARD; CRITICAL never",
        "only as far as the pressure goes",
        "between the thresholds nothing changes",
        "slowly down",
        "down",
        "down one level at a time",
    ],
)
def test_levels(pressures: list[tuple[float, float]], wanted: Priority) -> None:
    brownout = Brownout()
    for now, pressure in pressures:
        brownout.observe(pressure, now)
    assert brownout.admits_from is wanted


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(0, 10)), max_size=100))
def test_it_moves_by_one_and_never_faster_than_it_may(looks: list[tuple[float, float]]) -> None:
    brownout = Brownout()
    now, changed_at, level = 0.0, 0.0, ALL
    for gap_s, pressure in looks:
        now += gap_s
        after = brownout.observe(pressure, now)
        if after != level:
            assert abs(after - level) == 1
            assert now - changed_at >= (UP_S if after > level else DOWN_S) - 1e-9
            assert after <= CRITICAL
            level, changed_at = after, now


@pytest.mark.parametrize(
    ("age_s", "waiting", "least", "most"),
    [
        (0.0, 0, 0.0, 0.0),
        (2.0, 1, 0.4, 0.6),
        (4.0, 1, 1.0, 1.0),
        (0.0, 11, 0.0, 0.0),
        (0.0, 12, 1.0, 1.0),
        (0.0, 14, 2.0, 2.0),
        (0.0, 16, 3.0, 3.0),
    ],
)
def test_pressure(age_s: float, waiting: int, least: float, most: float) -> None:
    assert least <= pressure_of(queue_age_s=age_s, target_s=2.0, waiting=waiting, waiting_max=16) <= most


def test_a_queue_without_room_is_no_error() -> None:
    assert pressure_of(queue_age_s=0.0, target_s=2.0, waiting=0, waiting_max=0) == 0.0


@pytest.mark.parametrize(
    ("level", "waits", "wanted"),
    [(CRITICAL, STANDARD, STANDARD), (STANDARD, CRITICAL, STANDARD), (CRITICAL, None, ALL), (ALL, CRITICAL, ALL)],
    ids=["STANDARD alone is not refused", "lower ones are", "nobody waits", "no pressure"],
)
def test_nobody_is_refused_for_the_sake_of_nobody(level: Priority, waits: Priority | None, wanted: Priority) -> None:
    assert floor(level, waits) is wanted
