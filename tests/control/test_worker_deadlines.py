"""Who is refused because it cannot be in time, how waits end, and the slots that short ones have to themselves."""

import math

import pytest

from headrace.control.attempt_book import Cause
from headrace.control.errors import Reason
from headrace.control.priority import Priority
from headrace.control.service_times import STALE_S, Served
from headrace.control.wait_forecast import MARGIN
from headrace.control.worker_queue import END_TOKENS_MAX, SHORT_MEMORY_S
from support.attempts import RUN
from support.queues import SERVED, Bench

LONG = {"max_tokens": 90, "input_bytes": 2000}  # a prompt of 500 tokens: not short


@pytest.mark.parametrize(
    ("remaining_s", "stage", "expected_ms"),
    [(0.4, "firstToken", 500), (0.6, "end", 2400), (2.3, "end", 2400), (2.5, None, 0), (None, None, 0)],
)
def test_one_that_cannot_be_in_time_is_refused_at_once(remaining_s, stage, expected_ms):
    """0.5 s to the first token, 0.1 s for each of the 19 others."""
    bench = Bench()
    bench.learn()
    if stage is None:
        assert bench.dispatch(1, remaining_s=remaining_s) == [1]
        return
    refused = bench.refused(1, remaining_s=remaining_s)
    assert refused.reason is Reason.DEADLINE_UNMEETABLE
    assert refused.metadata["stage"] == stage
    assert float(refused.metadata["expectedMs"]) == pytest.approx(expected_ms, abs=1)
    assert refused.metadata["remainingMs"] == str(round(remaining_s * 1000))
    assert not bench.ledger.attempts


def test_nobody_is_refused_where_nothing_was_measured_or_long_ago():
    bench = Bench()
    bench.learn(count=7)
    assert bench.dispatch(1, remaining_s=0.01) == [1]
    bench = Bench()
    bench.learn()
    bench.now = STALE_S + 0.1
    assert bench.dispatch(1, remaining_s=0.01) == [1]


def test_a_long_answer_is_refused_only_for_its_first_token():
    bench = Bench()
    bench.book.context_tokens = 4096
    limit = END_TOKENS_MAX + 1
    for n in range(100, 108):
        bench.dispatch(n, max_tokens=limit)
        bench.begin(n)
        bench.finish(n, served=Served(10, 0.5, 0.1, limit, 30.0))
    assert bench.dispatch(1, max_tokens=limit, remaining_s=1.0)[-1] == 1
    assert bench.refused(2, max_tokens=limit, remaining_s=0.4).metadata["stage"] == "firstToken"


def test_the_wait_counts_and_a_light_tenant_does_not_wait_for_a_heavy_one_s_backlog():
    bench = Bench()
    bench.dispatch(1, 2, tenant="heavy")
    bench.begin(1, 2)
    # One is staged, nine wait, due before the next one: (9 + 1 + 1) x 2 s on two slots.
    bench.dispatch(*range(3, 13), tenant="heavy", remaining_s=7.5)
    for _ in range(8):
        bench.ledger.times.add(bench.ledger.attempts[1].load_class, SERVED, bench.now)
    refused = bench.refused(20, tenant="heavy", remaining_s=8.0)
    assert refused.reason is Reason.DEADLINE_UNMEETABLE
    expected_ms = 11_000 + 1_000 * MARGIN * math.sqrt(11.0)  # one a second comes free, more or less
    assert float(refused.metadata["expectedMs"]) == pytest.approx(expected_ms + 500, abs=5)
    assert refused.retry_after_s == pytest.approx(expected_ms / 1000, abs=0.01)
    bench.dispatch(21, tenant="light", remaining_s=8.0)  # (1 + 1 + 1) x 2 s on two slots
    assert bench.refused(22, tenant="heavy", queue_s=5.0).metadata["stage"] == "wait"
    bench.dispatch(23, tenant="heavy", queue_s=20.0)
    bench.dispatch(24, tenant="other", priority=Priority.CRITICAL, remaining_s=7.0)


def test_those_who_came_before_anything_was_measured_are_not_taken_for_slow_afterwards():
    bench = Bench(slots=1)
    bench.dispatch(*range(1, 11))
    bench.begin(1)
    for _ in range(8):
        bench.ledger.times.add(bench.ledger.attempts[1].load_class, Served(10, 0.01, 0.001, 20, 0.03), bench.now)
    bench.dispatch(20, remaining_s=1.0)  # ten of 30 ms are before it
    for _ in range(8):  # and the work that waits is worth more as the worker becomes slower
        bench.ledger.times.add(bench.ledger.attempts[1].load_class, Served(10, 0.01, 0.001, 20, 3.0), bench.now)
    assert bench.refused(21, remaining_s=0.5, tenant="b", **LONG).reason is Reason.DEADLINE_UNMEETABLE


def test_one_that_can_no_more_be_in_time_ends_when_its_turn_comes():
    bench = Bench(slots=1, stage_ahead=0)
    bench.dispatch(1)
    bench.begin(1)
    bench.dispatch(2, remaining_s=4.0)  # nothing was measured: it may wait
    bench.dispatch(3, remaining_s=90.0)
    for _ in range(8):
        bench.ledger.times.add(bench.ledger.attempts[2].load_class, Served(10, 0.5, 0.1, 20, 2.0), bench.now)
    bench.advance(2.0)
    bench.finish(1)
    assert bench.handed == [1, 3]
    assert bench.ended[2].reason is Reason.DEADLINE_UNMEETABLE
    assert bench.ledger.counts.refused == {("DEADLINE_UNMEETABLE", "end"): 1}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"remaining_s": 3.0}, Reason.DEADLINE_EXCEEDED), ({"queue_s": 3.0}, Reason.QUEUE_TIMEOUT)],
    ids=["deadline", "queue timeout"],
)
def test_a_wait_ends_at_its_limit_without_the_engine(limits, reason):
    bench = Bench(slots=1, stage_ahead=0)
    bench.dispatch(1, **limits)
    bench.dispatch(2, **limits)
    assert bench.ledger.next_due() == 3.0
    bench.advance(2.9)
    assert not bench.ended
    bench.advance(0.1)
    assert {token: failure.reason for token, failure in bench.ended.items()} == {2: reason}
    assert bench.ended[2].metadata == {"stage": "queue", "waitedMs": "3000"}
    assert bench.ledger.next_due() > 1e9
    assert bench.ledger.overdue(99.0, 2.0)[0].token == 1  # what the engine has, it is told of


def test_what_waits_here_is_no_business_of_the_engine_s_late_ones():
    bench = Bench(slots=1, stage_ahead=0)
    bench.dispatch(1, 2, remaining_s=3.0)
    assert [a.token for a in bench.ledger.overdue(99.0, 2.0)] == [1]  # though nobody has looked at the queue yet
    assert bench.ledger.attempts[2].cause is None
    bench.advance(99.0)
    assert bench.ended[2].reason is Reason.DEADLINE_EXCEEDED


def test_a_cancel_of_one_that_waits_ends_it_at_once_and_tells_the_engine_nothing():
    bench = Bench(slots=1, stage_ahead=0)
    bench.dispatch(1, 2, 3, 4)
    assert bench.ledger.cancel(2, 1, Cause.CANCELLED, 1.0) is None
    assert bench.ledger.credit(3, 1, 99) is None
    assert bench.ledger.attempts[3].credit_limit == 99
    assert bench.ledger.close_session(1, 2.0) == {"replicas/a": [1]}
    bench.advance()
    assert bench.ended == dict.fromkeys((2, 3, 4), Cause.CANCELLED)
    assert (bench.ledger.counts.cancels_asked, bench.ledger.counts.cancels_confirmed) == (4, 3)
    assert (bench.book.waiting, bench.ledger.waiting_bytes) == (1, 10)


def test_the_end_of_a_drain_s_grace_ends_those_who_wait_and_the_start_does_not():
    bench = Bench(slots=1, stage_ahead=0)
    bench.dispatch(1, 2, 3)
    bench.begin(1)
    bench.ledger.drain_worker("replicas/a")
    assert bench.refused(4).reason is Reason.DRAINING
    assert bench.finish(1) == [1, 2]
    assert bench.ledger.cancel_worker("replicas/a", Cause.DRAINED, bench.now) == [2]
    bench.advance()
    assert bench.ended == {3: Cause.DRAINED}


def test_a_lost_worker_takes_those_who_wait_with_it():
    bench = Bench(slots=1, stage_ahead=0)
    bench.dispatch(1, 2)
    assert [(a.token, had) for a, had in bench.ledger.close_worker("replicas/a")] == [(1, False), (2, False)]
    assert (bench.ledger.waiting_bytes, bench.ledger.attempts, bench.ledger.queues) == (0, {}, {})
    bench.advance()
    assert not bench.ended


def test_what_the_engine_was_not_given_it_cannot_speak_of():
    bench = Bench(slots=1, stage_ahead=0)
    bench.dispatch(1, 2)
    assert bench.ledger.admit(2, RUN, 5, 0.0) is None
    assert bench.ledger.finish(2, RUN) is None
    assert bench.ledger.counts.late == 2


def test_the_load_tells_what_waits_and_for_how_long():
    bench = Bench()
    bench.learn()
    bench.dispatch(1, 2, 3, 4)
    bench.begin(1, 2)
    bench.book.admits_from = Priority.BATCH
    load = bench.ledger.load("replicas/a", bench.now)
    assert (load.active, load.waiting, load.waiting_tokens) == (2, 2, 50)
    assert load.queue_wait_s == pytest.approx((2.0 + 2.0 + 2.0) / 2)
    assert (load.concurrency_limit, load.admits_from, load.prefill_tokens_per_s) == (2, Priority.BATCH, 20)
    assert Bench().ledger.load("replicas/a").queue_wait_s == 0.0


# Load classes


def short_and_long(share=0.25):
    """Eight slots, two of them for short ones if they want them."""
    bench = Bench(slots=8, stage_ahead=0, short_share=share, requests_max=64, kv_times_max=99.0)
    bench.book.kv_cells = 0
    return bench


def test_long_ones_borrow_what_short_ones_do_not_use():
    bench = short_and_long()
    assert len(bench.dispatch(*range(1, 13), **LONG)) == 8


def test_what_short_ones_have_used_of_late_is_kept_for_them():
    bench = short_and_long()
    bench.dispatch(101, 102, 103)  # three at a time: more than the two that are theirs
    bench.begin(101, 102, 103)
    bench.dispatch(*range(1, 13), **LONG)
    assert len(bench.handed) == 8  # they hold their share
    bench.finish(101, 102, 103)
    assert len([token for token in bench.handed if token < 100]) == 6
    assert bench.dispatch(104)[-1] == 104  # at once, though long ones wait
    bench.advance(SHORT_MEMORY_S * 10)
    bench.ledger.look_again()
    bench.advance()
    assert len([token for token in bench.handed if token < 100]) == 7  # and lent again


def test_short_ones_may_use_every_slot():
    assert len(short_and_long().dispatch(*range(1, 13))) == 8


def test_without_a_share_nothing_is_kept():
    bench = short_and_long(share=0.0)
    bench.dispatch(101, 102)
    bench.begin(101, 102)
    bench.dispatch(*range(1, 13), **LONG)
    bench.finish(101, 102)
    assert len([token for token in bench.handed if token < 100]) == 8
