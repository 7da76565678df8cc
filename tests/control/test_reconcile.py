"""Books and engine are compared both ways, and nothing that is merely on the way is touched."""

import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.control.attempt_book import Attempt
from headrace.control.deadlines import Budget
from headrace.control.reconcile import LOOK_EVERY_S, Findings, Reconciler


def attempt(token, received_at=0.0):
    budget = Budget(received_at=received_at, deadline_at=math.inf, queue_s=None, execution_s=None)
    return Attempt(token, 1, "replicas/r", 1, 0, 0, budget, 10, 10, handed_at=received_at)


def look(reconciler, books, live, now):
    assert reconciler.ask(now)
    return reconciler.compare({one.token: one for one in books}, live, now + 0.1)


def test_what_two_looks_find_counts():
    reconciler = Reconciler(opened_at=0.0)
    books = [attempt(1), attempt(2)]
    assert look(reconciler, books, [1, 9], LOOK_EVERY_S) == Findings()
    assert look(reconciler, books, [1, 9], 3 * LOOK_EVERY_S) == Findings(orphans=(9,), unknown=(2,))


def test_one_look_counts_for_nothing():
    reconciler = Reconciler(opened_at=0.0)
    assert look(reconciler, [attempt(2)], [9], LOOK_EVERY_S) == Findings()
    assert look(reconciler, [attempt(2)], [2, 8], 3 * LOOK_EVERY_S) == Findings()


def test_an_attempt_that_came_after_the_question_is_not_missed():
    reconciler = Reconciler(opened_at=0.0)
    for n in range(1, 4):
        now = 2 * n * LOOK_EVERY_S
        assert look(reconciler, [attempt(2, received_at=now)], [], now) == Findings()


def test_one_question_is_out_at_a_time_and_answers_that_nobody_asked_for_are_void():
    reconciler = Reconciler(opened_at=10.0)
    assert not reconciler.ask(10.0 + LOOK_EVERY_S - 0.1)
    assert reconciler.ask(10.0 + LOOK_EVERY_S)
    assert not reconciler.ask(1e9)
    reconciler.compare({}, [9], 1e9)
    assert reconciler.compare({}, [9], 1e9) == Findings()
    assert not reconciler.ask(1e9 + LOOK_EVERY_S - 0.1)
    assert reconciler.ask(1e9 + LOOK_EVERY_S)


@given(st.lists(st.tuples(st.sets(st.integers(1, 8)), st.sets(st.integers(1, 8))), max_size=8))
def test_it_finds_what_differs_twice_in_a_row_and_no_more(looks):
    reconciler, strangers, missing = Reconciler(opened_at=0.0), set(), set()
    for n, (books, live) in enumerate(looks, start=1):
        found = look(reconciler, [attempt(token) for token in books], live, 2 * n * LOOK_EVERY_S)
        assert set(found.orphans) == strangers & (live - books)
        assert set(found.unknown) == missing & (books - live)
        strangers, missing = live - books, books - live
