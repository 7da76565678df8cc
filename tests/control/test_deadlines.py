"""A request's budget: it shrinks from hop to hop, and the limit that passed first has a name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.deadlines import HOP_MARGIN_S, HOP_SHARE, Budget, longest_wait_s
from headrace.control.errors import Reason
from headrace.control.priority import Priority

BUDGET = Budget(received_at=100.0, deadline_at=110.0, queue_s=3.0, execution_s=4.0)


@pytest.mark.parametrize(
    ("now", "admitted_at", "reason"),
    [
        (100.0, None, None),
        (102.9, None, None),
        (103.0, None, Reason.QUEUE_TIMEOUT),
        (110.0, None, Reason.DEADLINE_EXCEEDED),
        (103.0, 102.0, None),
        (105.9, 102.0, None),
        (106.0, 102.0, Reason.EXECUTION_TIMEOUT),
        (109.9, 106.0, None),
        (110.0, 106.0, Reason.DEADLINE_EXCEEDED),
    ],
)
def test_which_limit_has_passed(now: float, admitted_at: float | None, reason: Reason | None) -> None:
    assert BUDGET.passed(now, admitted_at=admitted_at) is reason


def test_without_limits_of_the_service_only_the_deadline_counts() -> None:
    budget = Budget(received_at=0.0, deadline_at=10.0)
    assert budget.queue_remaining_s(5.0) is None
    assert [budget.passed(9.9), budget.passed(9.9, admitted_at=0.0)] == [None, None]
    assert budget.passed(10.0) is Reason.DEADLINE_EXCEEDED


def test_the_wait_for_a_slot_counts_over_all_attempts() -> None:
    assert [BUDGET.queue_remaining_s(now) for now in (100.0, 102.0, 103.0, 109.0)] == [3.0, 1.0, 0.0, 0.0]


@given(st.floats(0, 1e6), st.floats(-10, 1e6), st.integers(1, 6))
def test_a_hop_gets_less_than_there_is_and_never_a_fresh_limit(deadline_at: float, now: float, hops: int) -> None:
    budget = Budget(received_at=0.0, deadline_at=deadline_at)
    before = budget.remaining_s(now)
    assert before >= 0
    for _ in range(hops):
        given_s = budget.for_next_hop_s(now)
        assert 0 <= given_s <= before
        assert given_s >= (1 - HOP_SHARE) * before - 1e-9, "a hop keeps no more than its share"
        assert given_s >= before - HOP_MARGIN_S - 1e-9, "and no more than its margin"
        budget, before = Budget(received_at=now, deadline_at=now + given_s), given_s


@pytest.mark.parametrize(
    ("priority", "queue_timeout_s", "ttft_target_s", "expected_s"),
    [
        (Priority.CRITICAL, 60.0, 10.0, 8.0),
        (Priority.STANDARD, 60.0, 10.0, 8.0),
        (Priority.BATCH, 60.0, 10.0, 60.0),
        (Priority.SHEDDABLE, 60.0, 10.0, 60.0),
        (Priority.STANDARD, 5.0, 10.0, 5.0),
        (Priority.STANDARD, 60.0, 0.0, 60.0),
        (Priority.STANDARD, 0.0, 10.0, 8.0),
        (Priority.BATCH, 0.0, 10.0, None),
        (Priority.CRITICAL, 0.0, 0.0, None),
    ],
)
def test_nobody_waits_longer_for_a_slot_than_a_first_token_may_take(
    priority: Priority, queue_timeout_s: float, ttft_target_s: float, expected_s: float | None
) -> None:
    found = longest_wait_s(priority, queue_timeout_s=queue_timeout_s, ttft_target_s=ttft_target_s)
    assert found == (None if expected_s is None else pytest.approx(expected_s))
