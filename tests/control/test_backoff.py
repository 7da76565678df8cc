"""When a failed attempt is followed by another one, by reason; and the pause in a request's machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.attempt_log import AttemptCause
from headrace.control.backoff import BASE_S, CAP_S, FREE_MAX, OVERLOADED_S, Retries, full_jitter_s, has_time_for
from headrace.control.deadlines import Budget
from headrace.control.errors import Reason
from headrace.control.lifecycle import Finish, RequestRecord
from headrace.control.request import AttemptEnd, Step
from headrace.control.retry_budget import RetryBudget
from support.told import LOST, STOP, Told

REFUSED = Finish.REJECTED
DRAINING = AttemptEnd(REFUSED, Reason.DRAINING, is_retryable=True, is_free=True)
STALE = AttemptEnd(REFUSED, Reason.STALE_EPOCH, is_retryable=True, is_free=True)
OVERLOADED = AttemptEnd(REFUSED, Reason.OVERLOADED)
PUSHED = AttemptEnd(Finish.FAILED, Reason.WORKER_LOST_BEFORE_OUTPUT, is_retryable=True, push_back_s=0.7)
TOO_LATE = AttemptEnd(REFUSED, Reason.DEADLINE_UNMEETABLE, push_back_s=3.0)
"""For its wait there."""
HALF = 0.5


def retries(*, share: float = 0.0, floor: int = 100, draw: float = HALF) -> Retries:
    return Retries(RetryBudget(share, floor), lambda: draw)


def after(
    end: AttemptEnd, *, attempts: int = 1, free: int = 0, overloads: int = 0, attempts_max: int = 3
) -> float | None:
    """Seconds from the end to the next attempt; None: there is none."""
    record = RequestRecord(0.0)
    for number in range(attempts):
        record.dispatch(number + 1, f"replicas/{number}")
    record.attempts_free, record.overloads = free, overloads
    at = retries().next_at(record, record.tried[-1], end, attempts_max, 10.0)
    return None if at is None else pytest.approx(at - 10.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("end", "state", "expected"),
    [
        (LOST, {}, HALF * BASE_S),
        (LOST, {"attempts": 2}, HALF * BASE_S * 2),
        (LOST, {"attempts": 3}, None),
        (LOST, {"attempts": 3, "free": 1}, HALF * BASE_S * 2),
        (LOST, {"attempts_max": 1}, None),
        (PUSHED, {}, 0.7),
        (PUSHED, {"attempts": 2}, 0.7),
        (DRAINING, {"free": 1}, 0.0),
        (STALE, {"attempts": 5, "free": 4}, 0.0),
        (DRAINING, {"attempts": FREE_MAX, "free": FREE_MAX}, 0.0),
        (DRAINING, {"attempts": FREE_MAX + 1, "free": FREE_MAX + 1}, None),
        (OVERLOADED, {"overloads": 1}, 0.0),
        (OVERLOADED, {"attempts": 2, "overloads": 2}, None),
        (OVERLOADED, {"overloads": 1, "attempts_max": 1}, None),
        (AttemptEnd(Finish.FAILED, Reason.ENGINE_FAILED), {}, None),
        (AttemptEnd(REFUSED, Reason.QUEUE_TIMEOUT), {}, None),
        (AttemptEnd(REFUSED, Reason.DEADLINE_UNMEETABLE), {}, None),
        (TOO_LATE, {"overloads": 1}, 0.0),
        (TOO_LATE, {"attempts": 2, "overloads": 2}, None),
        (TOO_LATE, {"overloads": 1, "attempts_max": 1}, None),
        (AttemptEnd(Finish.CANCELLED, Reason.CLIENT_CANCELLED), {}, None),
        (STOP, {}, None),
    ],
)
def test_the_rules(end: AttemptEnd, state: dict[str, int], expected: float | None) -> None:
    assert after(end, **state) == expected


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_jitter_is_spread_over_its_whole_range_and_capped(failures: int, draw: float) -> None:
    wait_s = full_jitter_s(failures, lambda: draw)
    assert 0 <= wait_s <= CAP_S
    assert wait_s == pytest.approx(draw * min(CAP_S, BASE_S * 2 ** min(failures - 1, 60)))


def test_an_overloaded_replica_is_avoided_for_as_long_as_it_says() -> None:
    policy = retries()
    policy.overloaded("replicas/a", None, 10.0)
    policy.overloaded("replicas/b", 2.0, 10.0)
    assert policy.avoid(10.1) == ["replicas/a", "replicas/b"]
    assert policy.avoid(10.1 + OVERLOADED_S) == ["replicas/b"]
    assert policy.avoid(12.0) == []


def test_what_is_remembered_of_overload_is_bounded() -> None:
    policy = retries()
    for number in range(20_000):
        policy.overloaded(f"replicas/{number}", 0.001, number * 1.0)
    assert len(policy._overloaded) <= 4096


@pytest.mark.parametrize(
    ("remaining_s", "expected_s", "has_time"),
    [(0.0, None, False), (0.01, None, True), (1.0, 1.0, False), (1.1, 1.0, True)],
)
def test_an_attempt_needs_more_time_than_its_first_token_is_expected_to_take(
    remaining_s: float, expected_s: float | None, has_time: bool
) -> None:
    assert has_time_for(remaining_s, expected_s) is has_time


# The pause in the machine


def paused(end: AttemptEnd = PUSHED, **terms: float) -> Told:
    """A request whose first attempt has ended at 3.0 and whose next one has to wait."""
    told = Told(retries=retries(), **terms)  # type: ignore[arg-type]
    told.dispatch()
    told.ended(end, 3.0)
    assert told.read(3.0) is Step.WAIT
    return told


def test_the_next_attempt_waits_for_its_time_to_the_instant() -> None:
    told = paused()
    assert told.machine.retry_at == pytest.approx(3.7)
    assert told.read(3.699) is Step.WAIT
    assert told.read(3.7) is Step.RETRY
    told.dispatch()
    assert told.machine.retry_at is None
    assert [one.cause for one in told.machine.attempted] == [AttemptCause.FIRST, AttemptCause.RETRY]


def test_a_pause_is_drawn_once() -> None:
    draws = iter([0.5, 0.9])
    told = Told(retries=Retries(RetryBudget(0, 9), lambda: next(draws)))
    told.dispatch()
    told.ended(LOST, 3.0)
    told.read(3.0)
    at = told.machine.retry_at
    told.read(3.001)
    assert told.machine.retry_at == at == pytest.approx(3.0 + 0.5 * BASE_S)


def test_a_drain_asks_for_no_pause_and_costs_no_attempt() -> None:
    told = Told(retries=retries(floor=0))
    for _ in range(5):
        told.dispatch()
        told.ended(DRAINING, 3.0)
        assert told.read(3.0) is Step.RETRY
        assert not told.machine.is_charged
    assert told.machine.record.attempts_free == 5


@pytest.mark.parametrize("how", ["cancel", "deadline", "queue", "drain", "gone"])
def test_what_ends_a_request_in_its_pause_ends_it_at_once(how: str) -> None:
    told = paused(AttemptEnd(LOST.finish, LOST.reason, is_retryable=True, push_back_s=16.9))
    machine = told.machine
    expected = {
        "cancel": Reason.CLIENT_CANCELLED, "deadline": Reason.DEADLINE_EXCEEDED, "queue": Reason.QUEUE_TIMEOUT,
        "drain": Reason.DRAINING, "gone": Reason.CLIENT_CANCELLED,
    }[how]  # fmt: skip
    must_stop = {
        "cancel": lambda: machine.ask_end(Reason.CLIENT_CANCELLED, 4.0),
        "deadline": lambda: machine.tick(100.0),
        "queue": lambda: machine.tick(20.0),
        "drain": lambda: machine.wind_down(Reason.DRAINING, 4.0),
        "gone": lambda: machine.detach(4.0),
    }[how]()
    assert not must_stop, "nothing runs"
    assert machine.is_over
    assert machine.record.reason is expected
    assert told.read(4.0) is Step.OVER
    machine.close()
    assert told.ledger.references == 0


@pytest.mark.parametrize("push_back_s", [17.0, 500.0])
def test_where_the_time_to_try_again_comes_too_late_the_error_is_shown_at_once(push_back_s: float) -> None:
    told = Told(retries=retries())
    told.dispatch()
    told.ended(AttemptEnd(LOST.finish, LOST.reason, is_retryable=True, push_back_s=push_back_s), 3.0)
    assert told.read(3.0) is Step.OVER
    assert told.machine.record.reason is LOST.reason


def test_an_admitted_attempt_that_was_lost_does_not_run_into_the_execution_limit_while_it_pauses() -> None:
    told = Told(retries=retries(), budget=Budget(0.0, 100.0, queue_s=None, execution_s=5.0))
    told.dispatch()
    told.admitted(1.0)
    told.ended(PUSHED, 5.5)
    told.read(5.5)
    assert not told.machine.tick(6.1)
    assert told.machine.record.finish is None


def test_without_budget_the_first_error_is_the_end_and_says_so() -> None:
    told = Told(retries=retries(floor=0))
    told.dispatch()
    told.ended(LOST, 3.0)
    assert told.read(3.0) is Step.OVER
    assert told.machine.record.reason is LOST.reason
    assert told.machine.refused_retry == "budget"


def test_an_old_attempt_says_nothing_in_the_pause_nor_after() -> None:
    told = paused()
    machine = told.machine
    assert not machine.output(1, 1, 3.1)
    assert not machine.admitted(1, 1, 3.1)
    assert not machine.ended(1, 1, STOP, 3.1)
    assert told.read(3.7) is Step.RETRY
    told.dispatch()
    assert not machine.output(1, 1, 3.8)
    assert not machine.ended(1, 1, STOP, 3.8)
    assert machine.is_running
    assert machine.late == 5
