"""What goes before one that comes now, and so how long it will wait."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.fair_shares import QUANTUM
from headrace.control.priority import Priority
from headrace.control.wait_forecast import MARGIN, MEMORY_S, TENANTS_MAX, WAIT_MAX_S, Ahead, Arrivals, Flow, Rival
from headrace.control.wait_queue import PATIENCE_S, Waiting, WaitQueue

NOTHING = {
    "higher": 0.0, "higher_rate": 0.0, "own": 0.0, "rivals": (), "lower_share": 0.0, "paid_at": math.inf,
}  # fmt: skip


def ahead(**fields):
    return Ahead(**(NOTHING | fields))


def mean_s(wait_s, speed):
    """The wait without its margin."""
    half = MARGIN / math.sqrt(speed) / 2
    return (math.sqrt(half**2 + wait_s) - half) ** 2


def waiting(token, tenant="mine", priority=Priority.STANDARD, at=0.0, cost=200, work=1.0, **fields):
    return Waiting(
        token, tenant, priority, cost=cost, cells=cost, arrived_at=at, work=work, **({"deadline_at": math.inf} | fields)
    )


# The wait, of what goes before


@pytest.mark.parametrize(
    ("fields", "expected_s"),
    [
        ({}, 0.0),
        ({"own": 3.0}, 1.5),
        ({"own": 1.0, "higher": 2.0}, 1.5),
        # of 2 in a second 1 goes to those above: 2 in a second less
        ({"own": 3.0, "higher_rate": 1.0}, 3.0),
        ({"own": 3.0, "higher_rate": 2.0}, WAIT_MAX_S),
        # a quarter is owed to those below
        ({"own": 3.0, "lower_share": 0.25}, 2.0),
        # what its own priority is owed is sooner than the end of those above
        ({"own": 3.0, "higher_rate": 2.0, "paid_at": 10.0}, 5.0),
        ({"own": 3.0, "paid_at": 10.0}, 1.5),
        # another tenant: all that it has; a turn's worth; what comes, too, up to a turn's worth
        ({"rivals": (Rival(1.0, 0.0, 9.0),)}, 0.5),
        ({"rivals": (Rival(9.0, 0.0, 3.0),)}, 1.5),
        ({"rivals": (Rival(9.0, 5.0, 3.0),)}, 1.5),
        ({"rivals": (Rival(1.0, 1.0, 9.0),)}, 1.0),
        ({"rivals": (Rival(1.0, 1.0, 1.5),)}, 0.75),
        ({"rivals": (Rival(1.0, 1.0, 9.0), Rival(1.0, 1.5, 4.0))}, (4.0 + 1.0) / (2.0 - 1.0)),
    ],
    ids=str,
)  # fmt: skip
def test_the_wait_is_until_as_much_is_done_as_goes_before(fields, expected_s):
    wait_s = ahead(**fields).wait_s(2.0)
    assert wait_s == WAIT_MAX_S if expected_s == WAIT_MAX_S else mean_s(wait_s, 2.0) == pytest.approx(expected_s)


def test_what_the_engine_has_yet_to_begin_with_is_before_everybody():
    assert mean_s(ahead(own=1.0).wait_s(2.0, before=2.0), 2.0) == pytest.approx(1.5)
    assert mean_s(ahead(own=9.0, paid_at=3.0).wait_s(2.0, before=2.0), 2.0) == pytest.approx(2.5)


def test_a_wait_is_longer_than_its_mean_by_what_is_usual():
    assert ahead(own=8.0).wait_s(2.0) == pytest.approx(4.0 + MARGIN * math.sqrt(4.0 / 2.0))


AMOUNTS = st.floats(0.0, 20.0)
RIVALS = st.lists(st.builds(Rival, AMOUNTS, st.floats(0.0, 3.0), AMOUNTS), max_size=6).map(tuple)


@settings(deadline=None)
@given(
    st.builds(
        Ahead, higher=AMOUNTS, higher_rate=st.floats(0.0, 3.0), own=AMOUNTS, rivals=RIVALS,
        lower_share=st.floats(0.0, 0.35), paid_at=st.just(math.inf),
    ),
    st.floats(0.1, 5.0),
)  # fmt: skip
def test_by_then_the_worker_has_done_just_what_came_before(one, speed):
    """The definition itself, at the moment that is foreseen and a little before it."""

    def left(at):
        rivals = sum(min(r.work + r.rate * at, r.most) for r in one.rivals)
        return one.higher + one.higher_rate * at + one.own + rivals - speed * (1 - one.lower_share) * at

    wait_s = one.wait_s(speed)
    if wait_s < WAIT_MAX_S:
        end = mean_s(wait_s, speed)
        assert left(end) == pytest.approx(0.0, abs=1e-4 * (1 + end))
        assert left(end * 0.9) >= -1e-4 * (1 + end), "it was done before"
    else:
        assert left(WAIT_MAX_S * 0.9) >= 0


@given(st.builds(Rival, AMOUNTS, st.floats(0.0, 3.0), AMOUNTS), AMOUNTS, st.floats(0.0, 1.0))
def test_more_before_it_is_never_a_shorter_wait(rival, own, more):
    def wait_s(one, own_work=own, speed=2.0):
        return ahead(own=own_work, rivals=(one,)).wait_s(speed)

    base = wait_s(rival) - 1e-9
    assert wait_s(rival, own + more) >= base
    assert wait_s(Rival(rival.work + more, rival.rate, rival.most)) >= base
    assert wait_s(Rival(rival.work, rival.rate + more, rival.most)) >= base
    assert wait_s(Rival(rival.work, rival.rate, rival.most + more)) >= base
    assert wait_s(rival, speed=2.0 + more) <= base + 2e-9


# Rates


def test_a_rate_is_that_of_late():
    flow = Flow()
    assert flow.rate(1.0) == 0.0
    for tick in range(1, 1001):
        flow.add(0.5, tick / 10)
        assert flow.rate(tick / 10) <= 5.1
    assert flow.rate(100.0) == pytest.approx(5.0, rel=0.02)
    assert flow.rate(100.0 + MEMORY_S) == pytest.approx(5.0 / math.e, rel=0.02)
    assert flow.rate(1e6) == 0.0


def test_a_few_at_once_are_no_flood():
    flow = Flow()
    for _ in range(5):
        flow.add(1.0, 3.0)
    assert flow.rate(3.0) == pytest.approx(5.0 / MEMORY_S)


def test_rates_of_tenants_are_bounded_and_the_one_that_came_longest_ago_is_forgotten():
    arrivals = Arrivals()
    for n in range(TENANTS_MAX + 1):
        arrivals.add("old" if n == 1 else f"t{n}", 1.0, 1.0)
        arrivals.add("t0", 1.0, 1.0)
    assert len(list(arrivals)) == TENANTS_MAX
    assert arrivals.rate("old", 1.0) == 0.0
    assert arrivals.rate("t0", 1.0) > arrivals.rate("t2", 1.0) > 0
    assert arrivals.work.rate(1.0) == pytest.approx(2 * (TENANTS_MAX + 1) / MEMORY_S)


# What goes before, of a queue


def queue_of(*entries):
    queue = WaitQueue()
    for entry in entries:
        queue.put(entry)
    return queue


def test_what_is_higher_counts_whole_with_what_comes_and_what_is_lower_by_its_share():
    queue = queue_of(
        waiting(1, "a", Priority.CRITICAL, work=3.0), waiting(2, "a", Priority.BATCH, work=9.0),
        waiting(3, "a", Priority.SHEDDABLE, work=9.0),
    )  # fmt: skip
    found = queue.ahead_of(waiting(9), 0.5)
    assert (found.higher, found.own, found.lower_share) == (3.0, 0.0, pytest.approx(0.15))
    assert found.higher_rate == pytest.approx(3.0 / MEMORY_S, rel=0.1)
    found = queue.ahead_of(waiting(9, priority=Priority.CRITICAL), 0.5)
    assert (found.higher, found.higher_rate, found.paid_at) == (0.0, 0.0, math.inf)


def test_what_a_priority_is_owed_has_paid_for_it_after_so_much():
    queue = queue_of(waiting(1, "a", cost=100, work=2.0), waiting(2, "b", Priority.BATCH, cost=100, work=2.0))
    # 100 and 50 tokens at a tenth of all; 100 tokens are 2 of work
    assert queue.ahead_of(waiting(9, priority=Priority.BATCH, cost=50), 0.0).paid_at == pytest.approx(1500 / 50)
    queue.put(waiting(3, "a", cost=100, work=2.0))
    assert queue.next(0.0, may_start=lambda _: True, fits=lambda _: True).token == 1
    # 10 of them are owed now
    assert queue.ahead_of(waiting(9, priority=Priority.BATCH, cost=50), 0.0).paid_at == pytest.approx(1400 / 50)


def test_of_its_own_tenant_only_what_is_due_earlier_goes_before():
    queue = queue_of(waiting(1, deadline_at=5.0), waiting(2, deadline_at=20.0), waiting(3))
    assert queue.ahead_of(waiting(9, deadline_at=10.0, number=99), 0.0).own == pytest.approx(1.0)


def test_another_tenant_gets_no_more_than_turns_give_it_meanwhile():
    queue = queue_of(*(waiting(n, "heavy", cost=100) for n in range(1, 21)))
    rival = queue.ahead_of(waiting(30, cost=300), 0.0).rivals[0]
    assert rival.work == pytest.approx(20.0)
    assert rival.most == pytest.approx(1.0), "one that never came is owed a request: only who stands in front"
    queue.put(waiting(30, cost=300))
    rival = queue.ahead_of(waiting(31, cost=300, number=99), 0.0).rivals[0]
    assert rival.most == pytest.approx(1.0 + 3.0), "behind one of its own: as many tokens as that costs"


def test_one_that_has_just_been_served_is_passed_by_those_who_come():
    queue = queue_of(waiting(1, cost=300), waiting(2, "a", cost=300), waiting(3, "b", cost=300))
    take = {"may_start": lambda _: True, "fits": lambda _: True}
    assert [queue.next(0.2, **take).token for _ in range(2)] == [1, 2]
    rivals = queue.ahead_of(waiting(9, "new", cost=300), 0.5).rivals
    assert [(r.work, r.most) for r in rivals] == [(1.0, pytest.approx(1.0 + QUANTUM / 300))], "nobody passes it"
    rivals = queue.ahead_of(waiting(9, cost=300), 0.5).rivals
    # `a` has some of its turn left and may have as much more as this one waits for; `b` a whole request more
    assert sorted((r.work, r.most) for r in rivals) == [
        (0.0, pytest.approx(1.0 + QUANTUM / 300)), (1.0, pytest.approx(2.0 + QUANTUM / 300)),
    ]  # fmt: skip
    assert all(r.rate > 0 for r in rivals)


def test_another_tenant_whose_turn_has_not_come_does_not_go_before_one_that_is_owed_a_request():
    queue = queue_of(waiting(1, "b", cost=100), waiting(2, "a", cost=100, deadline_at=1.0), waiting(3, "a", cost=300))
    take = {"may_start": lambda _: True, "fits": lambda _: True}
    assert queue.next(0.0, **take).token == 1
    assert [r.work for r in queue.ahead_of(waiting(9, cost=300), 0.5).rivals] == [2.0]
    assert queue.next(0.0, **take).token == 2  # a quantum is left of its turn, and 300 are to be paid
    assert queue.ahead_of(waiting(9, cost=300), 0.5).rivals == ()


@pytest.mark.parametrize("seed", range(20))
def test_where_nobody_comes_later_what_is_foreseen_is_what_happens(seed):
    """Give or take one request of each tenant, since requests are not cut."""
    rng = random.Random(seed)
    queue, take = WaitQueue(), {"may_start": lambda _: True, "fits": lambda _: True}

    def some(token):
        cost = rng.choice((100, 200, 400))
        return waiting(token, rng.choice("abcd"), cost=cost, work=cost / 200, deadline_at=rng.uniform(1, PATIENCE_S))

    for token in range(1, 200):  # turns have gone on for a while
        queue.put(some(token))
        if len(queue) > 20:
            queue.next(0.0, **take)
    mine = some(1000)
    mine.number = 999
    found = queue.ahead_of(mine, 0.0)
    foreseen = found.own + sum(min(r.work, r.most) for r in found.rivals)
    queue.put(mine)
    before = 0.0
    while (entry := queue.next(0.0, **take)) is not mine:
        before += entry.work
    assert foreseen == pytest.approx(before, abs=1 + 3 * 2 + QUANTUM / 200)
