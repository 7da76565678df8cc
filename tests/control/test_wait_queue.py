"""The queue of one worker: turns, passing and reserving, expiry, shedding; each is in it once."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.fair_shares import LOOK_MAX, LOOKS_MAX
from headrace.control.priority import Priority
from headrace.control.wait_queue import PASS_S, PASSES_MAX, PATIENCE_S, Waiting, WaitQueue

ANY = {"may_start": lambda _: True, "fits": lambda _: True}


def waiting(token, priority=Priority.STANDARD, tenant="a", at=0.0, cells=100, **fields):
    made = {"cost": cells, "deadline_at": math.inf}
    return Waiting(token, tenant, priority, cells=cells, arrived_at=at, **(made | fields))


def filled(*entries, **settings_):
    queue = WaitQueue(**settings_)
    for entry in entries:
        queue.put(entry)
    return queue


def small(limit):
    return {"may_start": lambda _: True, "fits": lambda entry: entry.cells <= limit}


def test_the_earliest_deadline_goes_first_within_a_tenant_and_ties_by_arrival():
    queue = filled(
        waiting(1), waiting(2, deadline_at=9.0), waiting(3, deadline_at=5.0), waiting(4, deadline_at=9.0), waiting(5)
    )
    assert [queue.next(0.0, **ANY).token for _ in range(5)] == [3, 2, 4, 1, 5]
    assert queue.next(0.0, **ANY) is None


def test_one_without_a_deadline_is_due_after_a_patience_so_that_it_comes_up():
    queue = filled(waiting(1, at=0.0))
    for token in range(2, 200):
        queue.put(waiting(token, at=float(token), deadline_at=token + 5.0))
        served = queue.next(float(token), **ANY)
        if served.token == 1:
            break
    assert served.token == 1
    assert token <= PATIENCE_S + 1


def test_a_huge_one_is_passed_so_many_times_and_then_reserved_for():
    queue = filled(waiting(1, cells=900, deadline_at=1.0))
    for token in range(2, 60):
        queue.put(waiting(token, deadline_at=50.0))
    served = []
    while (entry := queue.next(0.0, **small(500))) is not None:
        served.append(entry.token)
    assert len(served) == PASSES_MAX
    assert queue.reserved.token == 1
    assert queue.next(0.0, **small(500)) is None  # what comes free is kept for it
    assert queue.next(0.0, **small(900)).token == 1
    assert queue.reserved is None
    assert queue.next(0.0, **small(500)).token not in served


def test_many_huge_ones_of_one_tenant_do_not_hide_a_short_one_behind_them():
    queue = filled(*(waiting(n, cells=900, deadline_at=1.0) for n in range(1, 40)), waiting(99, deadline_at=50.0))
    assert queue.next(0.0, **small(500)).token == 99


def test_looks_for_one_that_fits_have_an_end_and_every_tenant_is_looked_at():
    looked = []

    def fits(entry):
        looked.append(entry.token)
        return False

    queue = filled(*(waiting(n, cells=900, tenant=f"t{n % 100}") for n in range(1, 4001)))
    queue.next(0.0, may_start=lambda _: True, fits=fits)
    assert len(looked) <= LOOKS_MAX + LOOK_MAX + 100
    assert len({token % 100 for token in looked}) == 100


def test_a_huge_one_is_passed_for_so_long_and_then_reserved_for():
    queue = filled(waiting(1, cells=900, deadline_at=1.0), waiting(2), waiting(3))
    assert queue.next(10.0, **small(500)).token == 2
    assert queue.next_due(has_room=True) == 10.0 + PASS_S
    assert queue.next_due(has_room=False) == math.inf  # nobody asks `next`
    assert queue.next(10.0 + PASS_S, **small(500)) is None
    assert queue.reserved.token == 1
    assert queue.next_due(has_room=True) == math.inf
    assert queue.take_reserved().token == 1
    assert queue.next(11.0, **small(500)).token == 3


def test_one_that_was_reserved_for_and_leaves_is_forgotten():
    queue = filled(waiting(1, cells=900, deadline_at=1.0), waiting(2))
    assert queue.next(0.0, **small(500)).token == 2
    queue.put(waiting(3))
    assert queue.next(PASS_S, **small(500)) is None
    queue.remove(1)
    assert queue.next(PASS_S, **small(500)).token == 3


def test_a_slot_that_is_not_for_it_neither_passes_nor_reserves():
    queue = filled(waiting(1, deadline_at=1.0), waiting(2, is_short=True))
    only_short = {"may_start": lambda entry: entry.is_short, "fits": lambda _: True}
    assert queue.next(0.0, **only_short).token == 2
    assert queue.next(9.0, **only_short) is None
    assert queue.reserved is None
    assert queue.next(9.0, **ANY).token == 1


def test_waits_end_in_their_order_and_only_of_those_who_still_wait():
    queue = filled(*(waiting(token, expires_at=float(token)) for token in (3, 1, 2)), waiting(4))
    assert queue.next_due(has_room=False) == 1.0
    queue.remove(1)
    assert queue.next_due(has_room=False) == 2.0
    assert queue.expired(1.9) == []
    assert queue.expired(5.0) == [2, 3]
    assert queue.next_due(has_room=False) == math.inf


@pytest.mark.parametrize(
    ("below", "missing", "expected"),
    [
        (Priority.CRITICAL, {"requests": 1}, [3]),
        (Priority.CRITICAL, {"requests": 2}, [3, 1]),
        (Priority.CRITICAL, {"requests": 3}, [3, 1, 4]),
        (Priority.CRITICAL, {"tokens": 150}, [3, 1]),
        (Priority.CRITICAL, {"bytes_": 11}, [3, 1]),
        (Priority.CRITICAL, {"requests": 1, "tokens": 250}, [3, 1, 4]),
        (Priority.CRITICAL, {"requests": 5}, []),  # all of them are not enough: then nobody has to go
        (Priority.BATCH, {"requests": 2}, [3, 1]),
        (Priority.BATCH, {"requests": 3}, []),
        (Priority.SHEDDABLE, {"requests": 1}, []),  # never its own kind
    ],
    ids=str,
)
def test_the_youngest_of_the_lowest_priority_has_to_go(below, missing, expected):
    queue = filled(
        waiting(1, Priority.SHEDDABLE),
        waiting(2, Priority.STANDARD),
        waiting(3, Priority.SHEDDABLE),
        waiting(4, Priority.BATCH),
    )
    need = {"requests": 0, "tokens": 0, "bytes_": 0} | missing
    assert queue.victims(below, size_of=lambda _: 10, **need) == expected
    assert len(queue) == 4  # it only says who


def test_work_ahead_is_that_of_all_who_wait_at_a_priority_and_above():
    queue = filled(
        *(waiting(n, work=1.0) for n in range(1, 22)),
        waiting(40, Priority.CRITICAL, work=3.0),
        waiting(50, Priority.BATCH, work=99.0),
    )
    ahead = {priority.name: queue.work_ahead(priority) for priority in Priority}
    assert ahead == {"CRITICAL": 3.0, "STANDARD": 24.0, "BATCH": 123.0, "SHEDDABLE": 123.0}


def test_the_oldest_of_the_lowest_is_shed_for_age_and_the_oldest_of_the_highest_tells_the_age():
    queue = filled(waiting(1, at=1.0), waiting(2, Priority.BATCH, at=2.0), waiting(3, Priority.BATCH, at=3.0))
    assert queue.oldest_of_lowest().token == 2
    assert queue.head_age_s(5.0) == 4.0
    assert WaitQueue().oldest_of_lowest() is None
    assert WaitQueue().head_age_s(5.0) is None


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_each_is_in_it_once_and_the_sums_add_up(data):
    queue, inside, served, now = WaitQueue(), {}, set(), 0.0
    for token in range(1, data.draw(st.integers(5, 60))):
        now += data.draw(st.sampled_from([0.0, 0.3, 2.0]))
        action = data.draw(st.sampled_from(["put", "put", "put", "next", "next_small", "remove", "expire", "reserved"]))
        if action == "put":
            entry = waiting(
                token,
                data.draw(st.sampled_from(Priority)),
                data.draw(st.sampled_from("abc")),
                now,
                data.draw(st.sampled_from([10, 100, 900])),
                deadline_at=now + data.draw(st.sampled_from([1.0, 5.0, math.inf])),
                expires_at=now + data.draw(st.sampled_from([1.0, math.inf])),
                is_short=data.draw(st.booleans()),
                work=0.5,
            )
            queue.put(entry)
            inside[token] = entry
        elif action.startswith("next"):
            entry = queue.next(now, **(ANY if action == "next" else small(500)))
            if entry is not None:
                assert entry.token not in served
                served.add(entry.token)
                del inside[entry.token]
            elif inside and action == "next":
                raise AssertionError("somebody waits, everything is free, and nobody goes")
        elif action == "remove" and inside:
            token_out = data.draw(st.sampled_from(sorted(inside)))
            assert queue.remove(token_out) is inside.pop(token_out)
        elif action == "expire":
            for gone in queue.expired(now):
                assert inside.pop(gone).expires_at <= now
                queue.remove(gone)
            assert all(entry.expires_at > now for entry in inside.values())
        elif action == "reserved" and queue.reserved is not None:
            served.add(queue.reserved.token)
            del inside[queue.take_reserved().token]
        assert len(queue) == len(inside) == sum(queue.waiting.values())
        assert queue.tokens == sum(entry.cells for entry in inside.values())
        assert queue.shorts == sum(entry.is_short for entry in inside.values())
        behind_all = queue.work_ahead(Priority.SHEDDABLE)
        assert behind_all == pytest.approx(0.5 * len(inside), abs=1e-6)
        assert queue.reserved is None or queue.reserved.token in inside


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(Priority), st.sampled_from("abcd"), st.sampled_from([10, 500])), min_size=30))
def test_nobody_starves(floods):
    """One of the lowest priority waits while others keep coming; it is served within its reserved share."""
    queue = filled(waiting(1, Priority.SHEDDABLE, "poor", cells=50))
    handed_out, token = 0, 1
    for _ in range(20):
        for priority, tenant, cells in floods:
            token += 1
            queue.put(waiting(token, priority if priority > 1 else Priority.BATCH, tenant, cells=cells))
            entry = queue.next(0.0, **ANY)
            handed_out += entry.cells
            if entry.token == 1:
                assert handed_out <= 50 / 0.05 + 500
                return
            if handed_out > 50 / 0.05 + 500:
                raise AssertionError(f"{handed_out} tokens for others, none for it")
