"""The retry budget: a share of what succeeds, a floor, and what several Routers make of late reports."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.backoff import Retries
from headrace.control.request import AttemptEnd, RequestMachine, Step, Terms
from headrace.control.retry_budget import LAG_S, Report, RetryBudget
from headrace.control.sliding_count import BUCKETS, SlidingCount
from support.told import BUDGET, LOST, STOP, CreditWindow, ResourceLedger


def test_a_quiet_fleet_has_the_floor_and_gets_it_back_with_the_window() -> None:
    budget = RetryBudget(0.1, 3, window_s=10.0)
    assert [budget.take(1.0) for _ in range(4)] == [True, True, True, False]
    assert (budget.spent, budget.refused) == (3, 1)
    assert not budget.take(10.9)
    assert budget.take(11.6)


def test_successes_make_room_and_its_share_of_them_alone() -> None:
    budget = RetryBudget(0.1, 0, window_s=10.0)
    for _ in range(29):
        budget.succeeded(1.0)
    assert budget.balance(1.0) == pytest.approx(2.9)
    assert [budget.take(1.0) for _ in range(3)] == [True, True, False]
    budget.succeeded(1.0)
    assert budget.take(1.0)


def test_to_ask_takes_nothing() -> None:
    budget = RetryBudget(0.0, 1)
    assert budget.allows(1.0)
    assert budget.allows(1.0)
    assert budget.take(1.0)
    assert not budget.allows(1.0)
    assert budget.refused == 0


def test_reports_of_all_schedulers_add_up() -> None:
    budget = RetryBudget(0.1, 3)
    budget.report("a", Report(successes=100, extra_attempts=8, routers=1, at=1.0))
    budget.report("b", Report(successes=50, extra_attempts=5, routers=1, at=1.0))
    assert budget.balance(1.1) == pytest.approx(3 + 15 - 13)
    budget.report("b", Report(successes=50, extra_attempts=1, routers=1, at=1.2))
    assert budget.balance(1.3) == pytest.approx(3 + 15 - 9), "the newest report of each counts"


def test_what_was_spent_since_the_reports_counts_until_they_hold_it() -> None:
    budget = RetryBudget(0.1, 0)
    budget.report("a", Report(successes=100, extra_attempts=7, routers=1, at=1.0))
    assert [budget.take(2.0) for _ in range(4)] == [True, True, True, False]
    budget.report("a", Report(successes=100, extra_attempts=7, routers=1, at=2.0 + LAG_S / 2))
    assert not budget.take(2.2), "that report may have been on the way already"
    budget.report("a", Report(successes=100, extra_attempts=9, routers=1, at=3.0))
    assert [budget.take(3.1) for _ in range(2)] == [True, False], "that one holds them"


def test_a_router_takes_its_part_of_what_is_left_but_at_least_one() -> None:
    budget = RetryBudget(0.1, 4)
    budget.report("a", Report(successes=0, extra_attempts=0, routers=2, at=1.0))
    assert [budget.take(1.1) for _ in range(3)] == [True, True, False]
    lonely = RetryBudget(0.1, 2)
    lonely.report("a", Report(successes=0, extra_attempts=0, routers=50, at=1.0))
    assert [lonely.take(1.1) for _ in range(2)] == [True, False]


def test_a_scheduler_that_is_silent_for_a_window_says_nothing_any_more() -> None:
    budget = RetryBudget(0.1, 3, window_s=10.0)
    budget.report("a", Report(successes=1_000, extra_attempts=0, routers=1, at=1.0))
    assert budget.balance(10.9) > 50
    assert budget.balance(11.1) == 3


@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.booleans(), st.booleans()), max_size=400),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_amplification_is_bounded_whatever_comes(
    steps: list[tuple[float, bool, bool]], share: float, floor: int
) -> None:
    """Each first attempt may fail and ask for another one; those that were granted never exceed the bound."""
    budget = RetryBudget(share, floor, window_s=10.0)
    now, firsts, successes, granted = 0.0, 0, 0, 0
    for wait_s, is_success, wants in steps:
        now += wait_s
        firsts += 1
        if is_success:
            successes += 1
            budget.succeeded(now)
        if wants and budget.take(now):
            granted += 1
        assert budget._extra.total(now) <= floor + share * successes + 1e-9
    windows = 1 + math.ceil(now / 10.0)
    assert granted <= share * successes + floor * windows + 1e-9
    assert firsts + granted <= firsts * (1 + share) + floor * windows + 1e-9


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(0, 5), st.booleans()), max_size=300),
    st.floats(0, 0.9),
)
def test_several_routers_with_late_reports_overshoot_by_one_each_between_two_reports(
    routers: int, steps: list[tuple[float, int, bool]], delay_s: float
) -> None:
    """One Scheduler counts for all and reports each second, late."""
    share, floor = 0.1, 6
    budgets = [RetryBudget(share, floor) for _ in range(routers)]
    successes, extra = SlidingCount(10.0), SlidingCount(10.0)
    now, next_report, good, spent, reports = 0.0, 0.0, 0, 0, 1
    on_the_way: list[tuple[float, Report]] = []
    for wait_s, who, is_success in steps:
        now += wait_s
        if now >= next_report:
            next_report, reports = now + 1.0, reports + 1
            told = Report(successes.total(now), extra.total(now), routers, now + delay_s)
            on_the_way.append((now + delay_s, told))
        while on_the_way and on_the_way[0][0] <= now:
            _, told = on_the_way.pop(0)
            for budget in budgets:
                budget.report("a", told)
        if is_success:
            good += 1
            successes.add(now)
        if budgets[who % routers].take(now):
            spent += 1
            extra.add(now)
    windows = 1 + math.ceil(now / 10.0)
    assert spent <= share * good + (floor + routers) * (windows + 1) + routers * (1 + delay_s) * 2


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200))
def test_a_sliding_count_never_forgets_too_early_nor_much_too_late(gaps: list[float]) -> None:
    count, now, times = SlidingCount(5.0), 100.0, []
    for gap in gaps:
        now += gap
        count.add(now)
        times.append(now)
        exact = sum(1 for at in times if at > now - 5.0)
        late = sum(1 for at in times if at > now - 5.0 - 2 * 5.0 / BUCKETS)
        assert exact <= count.total(now) <= late


# DESIGN, worked example "retry amplification": failure probability 0.5, 3 attempts: 1.75 attempts on average


def attempts_of(outcomes: tuple[bool, ...], retries: Retries | None = None) -> int:
    """Attempts that a request of the real machine makes, whose n-th one fails where the n-th outcome says so."""
    machine = RequestMachine(BUDGET, CreditWindow(8), Terms(3, 10.0), ResourceLedger(), retries)
    now = 1.0
    for number, fails in enumerate(outcomes, 1):
        machine.dispatch(number, f"replicas/{number}")
        machine.ended(number, machine.record.attempt_version, LOST if fails else STOP, now)
        while (step := machine.next(now)) is Step.WAIT:
            assert machine.retry_at is not None
            now = machine.retry_at
        if step is not Step.RETRY:
            break
        if retries is not None and not retries.budget.take(now):
            machine.give_up("budget")
            break
    return machine.record.attempts


def test_retry_amplification_of_the_worked_example_is_exact() -> None:
    every = list(itertools.product((True, False), repeat=3))
    assert sum(attempts_of(outcomes) for outcomes in every) / len(every) == 1.75


@pytest.mark.parametrize(("share", "expected"), [(1e9, 1.75), (0.1, 1.05)])
def test_a_hundred_requests_a_second_become_175_without_a_budget_and_105_with_one(
    share: float, expected: float
) -> None:
    draws = random.Random(7)
    budget = RetryBudget(share, floor=3)
    retries = Retries(budget, draws.random)
    requests, attempts, now = 20_000, 0, 0.0
    for _ in range(requests):
        now += 0.01
        outcomes = tuple(draws.random() < 0.5 for _ in range(3))
        machine = RequestMachine(BUDGET, CreditWindow(8), Terms(3, 10.0), ResourceLedger(), retries)
        for number, fails in enumerate(outcomes, 1):
            machine.dispatch(number, f"replicas/{number}")
            machine.ended(
                number,
                machine.record.attempt_version,
                AttemptEnd(LOST.finish, LOST.reason, True) if fails else STOP,
                now,
            )
            if not fails:
                if number == 1:
                    budget.succeeded(now)
                break
            if not budget.take(now):
                break
        attempts += machine.record.attempts
    assert attempts / requests == pytest.approx(expected, abs=0.02)


def test_under_a_full_outage_the_amplification_is_the_floor() -> None:
    budget = RetryBudget()
    retries = Retries(budget, random.Random(1).random)
    requests = 1_000
    attempts = sum(attempts_of((True, True, True), retries) for _ in range(requests))
    assert attempts == requests + budget.floor
    assert attempts / requests < 1.1
