"""Measured service times: when they are believed, what they fall back to, and that they forget."""

import pytest

from headrace.control import service_times
from headrace.control.load_class import load_class
from headrace.control.service_times import PRIOR_HOLD_S, SAMPLES_MIN, STALE_S, Served, ServiceTimes

REVISION = "models/m/revisions/0123456789ab"
SHORT = load_class(REVISION, "", 100, 100)
LONG = load_class(REVISION, "", 1000, 1000)
SERVED = Served(prompt_tokens=100, prefill_s=0.2, token_s=0.05, output_tokens=40, hold_s=2.5)


def fed(times=None, kind=SHORT, served=SERVED, count=SAMPLES_MIN, now=0.0):
    times = times or ServiceTimes()
    for _ in range(count):
        times.add(kind, served, now)
    return times


def estimate(times, kind=SHORT, prompt_tokens=100, max_tokens=100, now=1.0):
    return times.estimate(kind, prompt_tokens=prompt_tokens, max_tokens=max_tokens, now=now)


def test_nothing_is_known_until_enough_was_measured():
    expected = estimate(fed(count=SAMPLES_MIN - 1))
    assert (expected.prefill_s, expected.token_s, expected.hold_s) == (None, None, PRIOR_HOLD_S)
    assert expected.output_tokens == 100
    assert not expected.is_measured
    assert expected.end_s(10) is None


def test_a_class_tells_its_own_times():
    expected = estimate(fed())
    assert expected.prefill_s == pytest.approx(0.2)
    assert expected.token_s == pytest.approx(0.05)
    assert expected.output_tokens == pytest.approx(40)
    assert expected.hold_s == pytest.approx(2.5)
    assert expected.is_measured
    assert expected.end_s(11) == pytest.approx(0.2 + 10 * 0.05)
    assert estimate(fed(), max_tokens=5).output_tokens == 5  # never more than it may


def test_another_class_of_the_revision_borrows_them_by_tokens():
    expected = estimate(fed(), LONG, prompt_tokens=20, max_tokens=1000)
    assert expected.prefill_s == pytest.approx(20 * 0.002)
    assert expected.token_s == pytest.approx(0.05)
    assert expected.output_tokens == 1000  # how long answers are says only the class itself
    # For how long one has its slot, the share of their limit that others use tells well enough.
    assert expected.hold_s == pytest.approx(0.04 + 0.05 * 1000 * 40 / SHORT.output_bound)
    # A long prompt is not foreseen from short ones to take longer than anything that was seen: nobody is refused by
    # what is extrapolated.
    assert estimate(fed(), LONG, prompt_tokens=1000).prefill_s == pytest.approx(0.2)
    other = load_class("models/other/revisions/0123456789ab", "", 100, 100)
    assert estimate(fed(), other).prefill_s is None


def test_what_is_old_is_not_known_any_more():
    times = fed()
    assert estimate(times, now=STALE_S).prefill_s is not None
    assert estimate(times, now=STALE_S + 0.1).prefill_s is None
    assert times.hold_s(REVISION, STALE_S + 0.1) is None
    assert times.prefill_tokens_per_s(REVISION, STALE_S + 0.1) == 0


def test_one_reader_who_stood_still_moves_little_and_a_change_is_learnt():
    times = fed(count=32)
    times.add(SHORT, Served(100, 0.2, 60.0, 40, 2400.0), 1.0)
    assert estimate(times).token_s < 0.07  # 1000 times as slow, once
    slow = Served(100, 2.0, 0.5, 40, 25.0)
    assert estimate(fed(times, served=slow, count=100, now=2.0), now=2.0).token_s == pytest.approx(0.5, rel=0.2)


def test_what_many_take_together_is_their_mean():
    times = ServiceTimes()
    for n in range(400):
        times.add(SHORT, Served(100, 0.2, 0.05, 40, 1.0 if n % 2 else 4.0), 0.0)
    assert times.hold_s(REVISION, 1.0) == pytest.approx(2.5, rel=0.05)  # their average as times is 2
    assert estimate(times).hold_s == pytest.approx(2.5, rel=0.05)
    times.add(SHORT, Served(100, 0.2, 0.05, 40, 1e6), 1.0)
    assert times.hold_s(REVISION, 1.0) < 2.5 * 1.5 * 1.65


def test_what_was_cut_short_says_nothing_of_lengths():
    times = fed(served=Served(100, 0.2, 0.05, None, None), count=50)
    expected = estimate(times)
    assert expected.token_s == pytest.approx(0.05)
    assert (expected.output_tokens, expected.is_measured) == (100, False)


def test_the_tokens_that_bytes_make_are_learnt_and_not_forgotten():
    times = ServiceTimes()
    for _ in range(SAMPLES_MIN - 1):
        times.counted(SHORT, 10, 40, 0.0)
    assert times.prompt_tokens(SHORT, 10) == 10
    times.counted(SHORT, 10, 40, 0.0)
    assert times.prompt_tokens(SHORT, 10) == 40
    assert times.prompt_tokens(LONG, 100) == 400  # of its revision
    assert times.prompt_tokens(load_class("models/other/revisions/0123456789ab", "", 10, 10), 10) == 10


def test_prefill_is_told_in_tokens_a_second():
    assert fed().prefill_tokens_per_s(REVISION, 1.0) == 500
    assert ServiceTimes().prefill_tokens_per_s(REVISION, 1.0) == 0


def test_classes_are_bounded_and_the_one_not_measured_for_longest_goes(monkeypatch):
    monkeypatch.setattr(service_times, "CLASSES_MAX", 2)
    times = fed()
    fed(times, LONG)
    fed(times, SHORT, count=1)
    fed(times, load_class(REVISION, "high", 100, 100), count=1)
    assert len(times) == 2
    assert estimate(times, LONG).output_tokens == 100  # forgotten
    assert estimate(times).output_tokens == pytest.approx(40)
