"""The limit of a replica's concurrency: what a window does to it, and how it behaves over time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.concurrency_limit import LEARNING_WINDOWS, WINDOW_S, WINDOW_SAMPLES_MIN, ConcurrencyLimit

SLOTS = 16


class Replica:
    """Feeds one limit with windows; as busy as the limit allows, unless told otherwise."""

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self.limit = limit
        self.now = 0.0

    def window(self, step_s: float, in_flight: int | None = None) -> int:
        busy = self.limit.limit if in_flight is None else in_flight
        for n in range(WINDOW_SAMPLES_MIN + 1):
            self.limit.observe(step_s, busy, self.now + n * WINDOW_S / WINDOW_SAMPLES_MIN)
        self.now += WINDOW_S * (1 + 1 / WINDOW_SAMPLES_MIN)
        return self.limit.limit


@pytest.mark.parametrize(
    ("steps", "limits"),
    [
        ((0.02, 0.02, 0.02), (16, 16, 16)),
        ((0.2,), (12,)),
        ((0.2, 0.2, 0.2), (12, 10, 8)),
        ((0.2, 0.2, 0.02, 0.02), (12, 10, 11, 12)),
        ((0.1,), (16,)),
        ((0.2,) * 30, None),
    ],
    ids=["within", "over", "over and over", "back by one a window", "at the target is within", "never below one"],
)
def test_a_window_over_the_target_takes_a_fifth_and_one_within_gives_one(
    steps: tuple[float, ...], limits: tuple[int, ...] | None
) -> None:
    replica = Replica(ConcurrencyLimit(SLOTS, target_s=0.1))
    seen = tuple(replica.window(step_s) for step_s in steps)
    if limits is None:
        assert min(seen) == 1
    else:
        assert seen == limits


def test_a_replica_that_nobody_uses_shows_nothing() -> None:
    replica = Replica(ConcurrencyLimit(SLOTS, target_s=0.1))
    for _ in range(4):
        replica.window(0.2)
    low = replica.limit.limit
    for _ in range(20):
        assert replica.window(0.01, in_flight=low - 1) == low, "not at the limit: it does not grow"
        assert replica.window(9.0, in_flight=low // 2 - 1) == low, "far below it: the load is not what makes it slow"


def test_one_slow_step_is_not_a_slow_window() -> None:
    limit = ConcurrencyLimit(SLOTS, target_s=0.1)
    for n in range(200):
        limit.observe(30.0 if n % 3 == 0 else 0.05, SLOTS, n * 0.1)
    assert limit.limit == SLOTS, "prefills and pauses are outliers"


def test_without_a_target_a_replica_is_compared_with_itself_when_full() -> None:
    replica = Replica(ConcurrencyLimit(SLOTS, tolerance=2.0))
    for _ in range(50):
        replica.window(0.005, in_flight=2)
        replica.window(0.015, in_flight=10)
    assert replica.limit.target_s == math.inf, (
        "nearly idle windows are not its normal: a full batch is slower by design"
    )
    for _ in range(LEARNING_WINDOWS):
        assert replica.window(0.04) == SLOTS
    assert replica.limit.target_s == pytest.approx(0.08)
    for _ in range(20):
        assert replica.window(0.06) == SLOTS
    assert replica.window(0.5) < SLOTS


def test_what_no_reader_notices_is_not_slow() -> None:
    replica = Replica(ConcurrencyLimit(SLOTS))
    for _ in range(2 * LEARNING_WINDOWS):
        replica.window(0.001)
    assert replica.window(0.04) == SLOTS
    assert replica.window(0.06) < SLOTS


def test_what_is_slow_for_good_does_not_stay_at_one() -> None:
    replica = Replica(ConcurrencyLimit(SLOTS, target_s=0.1))
    limits = [replica.window(0.3) for _ in range(60)]
    assert min(limits) == 1
    assert limits[-1] == SLOTS, "load was not the cause"
    for _ in range(100):
        replica.window(0.05)
    assert replica.limit.target_s == pytest.approx(0.1), "the target comes back with the speed"


@given(
    slots=st.integers(1, 64),
    target_s=st.sampled_from((0.0, 0.05)),
    windows=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 80)), max_size=60),
)
def test_the_limit_stays_between_one_and_the_slots(
    slots: int, target_s: float, windows: list[tuple[float, int]]
) -> None:
    replica = Replica(ConcurrencyLimit(slots, target_s=target_s))
    for step_s, in_flight in windows:
        before = replica.limit.limit
        after = replica.window(step_s, in_flight)
        assert 1 <= after <= slots
        assert after <= before + 1, "it never jumps up"
        if after > before:
            assert in_flight >= before, "it does not grow unused"


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 100))
def test_a_sample_that_is_none_is_dropped(step_s: float, in_flight: int) -> None:
    limit = ConcurrencyLimit(4, target_s=1.0)
    for n in range(2 * WINDOW_SAMPLES_MIN):
        limit.observe(step_s, in_flight, float(n))
    assert 1 <= limit.limit <= 4


def knee(in_flight: int, *, at: int, slow: float = 1.0) -> float:
    """Steps of a replica: a little longer with each sequence, much longer behind the knee."""
    return slow * (0.010 + 0.001 * in_flight + 0.02 * max(0, in_flight - at))


def test_it_finds_the_knee_and_swings_in_a_band_around_it_and_recovers_from_a_slow_phase() -> None:
    target_s = 0.05
    best = max(n for n in range(1, 33) if knee(n, at=20) <= target_s)
    replica = Replica(ConcurrencyLimit(32, target_s=target_s))

    def run(windows: int, slow: float = 1.0) -> list[int]:
        return [replica.window(knee(replica.limit.limit, at=20, slow=slow)) for _ in range(windows)]

    run(20)
    settled = run(100)
    assert max(settled) <= best + 1
    assert min(settled) >= math.floor(0.8 * (best + 1)) - 1, "one decrease below the knee, not more"
    assert sum(settled) / len(settled) >= 0.85 * best
    slow = run(40, slow=1.9)
    # 1.9 times slower: the best is less, and the limit goes there.
    slow_best = max(n for n in range(1, 33) if knee(n, at=20, slow=1.9) <= target_s)
    assert max(slow[10:]) <= slow_best + 1
    assert min(slow[10:]) >= math.floor(0.8 * (slow_best + 1)) - 1
    recovered = run(20)
    assert max(recovered) >= best, "within 20 windows"
    again = run(100)
    assert max(again) <= best + 1
    assert min(again) >= math.floor(0.8 * (best + 1)) - 1
