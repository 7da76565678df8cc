"""When a client holds back, as arithmetic, as a story of an overload, and as properties."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.client_throttle import ClientThrottle, ThrottlePolicy, Ticket, is_shed
from headrace.control.errors import Reason

EAGER = ThrottlePolicy(refusals_min=0)


def send(throttle: ClientThrottle, now: float, *, draw: float = 1.0) -> Ticket:
    ticket = throttle.admit(now, draw)
    assert ticket is not None
    return ticket


def fill(throttle: ClientThrottle, served: int, refused: int, now: float = 0.0) -> None:
    for number in range(served + refused):
        ticket = send(throttle, now)
        if number < refused:
            throttle.refused(ticket)


@pytest.mark.parametrize(
    ("served", "refused", "expected"),
    [
        pytest.param(0, 0, 0.0, id="nothing is known"),
        pytest.param(10, 0, 0.0, id="all is well"),
        pytest.param(10, 10, 0.0, id="K = 2: half may be refused"),
        pytest.param(10, 30, 20 / 41, id="(R - K * A) / (R + 1)"),
        pytest.param(0, 9, 0.9, id="nothing gets through"),
        pytest.param(0, 999, 0.95, id="some are always sent"),
    ],
)
def test_the_formula(served: int, refused: int, expected: float) -> None:
    throttle = ClientThrottle(EAGER)
    fill(throttle, served, refused)
    assert throttle.hold_probability(0.0) == pytest.approx(expected)


def test_a_call_counts_when_it_is_sent_and_as_served_until_it_is_refused() -> None:
    throttle = ClientThrottle(EAGER)
    tickets = [send(throttle, 0.0) for _ in range(1000)]
    assert throttle.hold_probability(0.0) == 0.0, "a thousand streams that begin are no sign of trouble"
    for ticket in tickets:
        throttle.refused(ticket)
    assert throttle.hold_probability(0.0) == 0.95


def test_what_is_held_back_counts_as_asked_for() -> None:
    throttle = ClientThrottle(EAGER)
    fill(throttle, served=0, refused=1)
    assert throttle.admit(0.0, 0.49) is None
    assert throttle.hold_probability(0.0) == pytest.approx(2 / 3)
    assert throttle.admit(0.0, 0.67) is not None
    assert throttle.hold_probability(0.0) == pytest.approx((3 - 2) / 4)


def test_a_small_client_never_notices() -> None:
    throttle = ClientThrottle(ThrottlePolicy())
    fill(throttle, served=0, refused=99)
    assert throttle.hold_probability(0.0) == 0.0
    fill(throttle, served=0, refused=1)
    assert throttle.hold_probability(0.0) == 0.95


def test_a_refusal_is_forgotten_with_its_call() -> None:
    throttle = ClientThrottle(EAGER)
    slow = [send(throttle, 0.0) for _ in range(9)]
    fill(throttle, served=9, refused=0, now=60.0)
    for ticket in slow:  # refused only now
        throttle.refused(ticket)
    assert throttle.hold_probability(119.9) == 0.0
    fill(throttle, served=0, refused=9, now=119.9)
    assert throttle.hold_probability(119.9) > 0
    assert throttle.hold_probability(120.0) == 0.0, "9 of 18 are left"
    assert throttle.hold_probability(180.0) == pytest.approx(0.9)
    assert throttle.hold_probability(239.9) == 0.0
    throttle.refused(slow[0])
    assert throttle.hold_probability(239.9) == 0.0, "a ticket of a slice that is forgotten"


def test_an_overload_is_spared_and_its_end_is_noticed() -> None:
    throttle, chance, sent = ClientThrottle(ThrottlePolicy()), random.Random(7), [0, 0, 0]
    for tick in range(6000):  # 10 requests a second: a minute well, five minutes refused, four minutes well
        now = tick / 10
        minute = int(now // 60)
        phase = 0 if minute < 1 else 1 if minute < 6 else 2
        ticket = throttle.admit(now, chance.random())
        if ticket is None:
            continue
        sent[phase] += 1
        if phase == 1:
            throttle.refused(ticket)
    assert sent[0] == 600, "nothing is held back while all is well"
    assert sent[1] < 0.55 * 3000, "of what was asked for during the overload"
    assert sent[2] > 0.7 * 2400
    assert throttle.hold_probability(600.0) == 0.0


def test_retries_have_a_budget_of_their_own() -> None:
    throttle = ClientThrottle(ThrottlePolicy(retries_min=3))
    assert [throttle.retry(0.0) for _ in range(5)] == [True, True, True, False, False]
    fill(throttle, served=23, refused=0)
    assert [throttle.retry(0.0) for _ in range(4)] == [True, True, False, False], (
        "a tenth of 20 requests, 3 were retries"
    )
    assert throttle.retry(120.0), "the window has passed"


def test_what_is_shed() -> None:
    assert {reason for reason in Reason if is_shed(reason)} == {
        Reason.OVERLOADED,
        Reason.QUEUE_TIMEOUT,
        Reason.QUOTA_EXCEEDED,
    }
    assert not is_shed(None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": 0.5},
        {"window_s": 0.0},
        {"refusals_min": -1},
        {"hold_max": 1.0},
        {"retry_share": 2.0},
        {"retries_min": -1},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ThrottlePolicy(**wrong)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1), st.booleans()), max_size=300), st.integers(0, 20))
def test_never_held_back_below_the_floor_nor_while_half_is_served(
    steps: list[tuple[float, float, bool]], refusals_min: int
) -> None:
    throttle, now = ClientThrottle(ThrottlePolicy(refusals_min=refusals_min)), 0.0
    refused = 0
    for wait_s, draw, is_refused in steps:
        now += wait_s
        probability = throttle.hold_probability(now)
        assert 0 <= probability <= 0.95
        if refused < refusals_min or not refused:
            assert probability == 0
        ticket = throttle.admit(now, draw)
        assert (ticket is None) == (draw < probability)
        if ticket is not None and is_refused:
            throttle.refused(ticket)
            refused += 1


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=300))
def test_retries_of_a_window_stay_within_their_share(steps: list[tuple[float, bool]]) -> None:
    throttle, now = ClientThrottle(ThrottlePolicy(retries_min=2)), 0.0
    asked: list[float] = []
    retried: list[float] = []
    for wait_s, is_retry in steps:
        now += wait_s
        if is_retry:
            if throttle.retry(now):
                retried.append(now)
        else:
            send(throttle, now)
            asked.append(now)
        # A slice is forgotten whole, so a window is known to a slice's length.
        recent = sum(at > now - 110 for at in retried)
        assert recent <= 2 + 0.1 * sum(at > now - 120 - 110 for at in asked) + 1
