"""Hand-over and refusal: what the engine is given and when, what is refused at the door, what ends in the queue."""

import pytest

from headrace.control.errors import Failure, Reason
from headrace.control.priority import Priority
from support.attempts import RUN
from support.queues import SERVED, Bench


def test_the_engine_gets_its_slots_and_one_ahead_and_the_next_as_one_ends():
    bench = Bench()
    assert bench.dispatch(1, 2, 3, 4, 5) == [1, 2, 3]
    bench.begin(1, 2)
    assert bench.handed == [1, 2, 3]
    assert bench.finish(1) == [1, 2, 3, 4]
    bench.begin(3)
    bench.finish(2, 3)
    assert bench.handed == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("ahead", "handed"), [(0, 2), (1, 3), (2, 4)])
def test_how_many_are_ahead_is_a_setting(ahead, handed):
    assert len(Bench(stage_ahead=ahead).dispatch(*range(1, 8))) == handed


def test_a_limit_of_concurrency_is_kept_without_anybody_ahead_and_looked_at_again_when_it_rises():
    bench = Bench(slots=4)
    bench.book.concurrency_limit = 2
    assert bench.dispatch(1, 2, 3, 4) == [1, 2]
    bench.book.concurrency_limit = 3
    bench.ledger.look_again()
    assert bench.advance() == [1, 2, 3]
    bench.book.concurrency_limit = 99  # never more than there are slots
    bench.ledger.look_again()
    bench.dispatch(5, 6)
    assert bench.handed == [1, 2, 3, 4, 5]


def test_kv_is_promised_once_by_estimate_and_then_by_what_the_engine_counted():
    bench = Bench(slots=8, short_share=0.0)
    bench.book.kv_cells = 100
    fields = {"input_bytes": 80, "max_tokens": 20}  # 20 + 20 cells each
    assert bench.dispatch(1, 2, 3, **fields) == [1, 2]
    assert bench.book.staged_cells == 80
    bench.begin(1, prompt=5)  # fewer than were estimated
    assert (bench.book.staged_cells, bench.book.kv_cells_reserved) == (40, 25)
    assert bench.handed == [1, 2]
    bench.begin(2, prompt=5)
    assert bench.handed == [1, 2, 3]


def test_what_the_engine_counts_makes_the_next_estimates_better_but_ids_are_known():
    bench = Bench(slots=16)
    for token in range(1, 9):
        bench.dispatch(token, prompt_estimate=10)
        bench.begin(token, prompt=40)
        bench.finish(token)
    bench.dispatch(20, prompt_estimate=10)
    assert (bench.ledger.attempts[20].prompt_tokens, bench.book.staged_cells) == (40, 60)
    bench.begin(20, prompt=40)
    bench.dispatch(21, prompt_estimate=10, is_prompt_exact=True)
    assert (bench.ledger.attempts[21].prompt_tokens, bench.book.staged_cells) == (10, 30)
    for token in range(30, 60):  # nor do they teach anything
        bench.dispatch(token, prompt_estimate=10, is_prompt_exact=True)
        bench.begin(token, prompt=10)
        bench.finish(token)
    bench.dispatch(70, prompt_estimate=10)
    assert bench.ledger.attempts[70].prompt_tokens == 40


def test_kv_may_be_over_committed():
    bench = Bench(slots=8, short_share=0.0, over_commit=2.0)
    bench.book.kv_cells = 100
    assert bench.dispatch(*range(1, 9), input_bytes=80, max_tokens=20) == [1, 2, 3, 4, 5]


def test_a_worker_that_is_empty_takes_anything():
    bench = Bench()
    bench.book.kv_cells = 10
    assert bench.dispatch(1, 2) == [1]


def test_a_huge_one_is_passed_by_short_ones_and_then_the_engine_keeps_room_for_it():
    bench = Bench(slots=8, short_share=0.0)
    bench.book.kv_cells = 210
    bench.dispatch(1, max_tokens=85)  # 88 cells
    bench.begin(1, prompt=3)
    bench.dispatch(2, max_tokens=85)
    bench.begin(2, prompt=3)
    bench.dispatch(3, max_tokens=90, remaining_s=50.0)  # 93 cells: 34 are left
    assert bench.dispatch(4, max_tokens=7) == [1, 2, 4]
    bench.begin(4, prompt=3)
    due = bench.ledger.next_due()
    assert due == 1.0
    assert bench.advance(due) == [1, 2, 4, 3]  # the engine's queue has it at its head: what comes free is its own
    assert bench.dispatch(5, max_tokens=7) == [1, 2, 4, 3]
    bench.finish(1)
    bench.begin(3, prompt=3)
    assert bench.handed == [1, 2, 4, 3, 5]


def test_preempted_ones_leave_their_slot_to_others():
    bench = Bench(slots=1)
    bench.dispatch(1, 2, 3)
    bench.begin(1)
    assert bench.handed == [1, 2]
    bench.ledger.preempt(1, RUN, 1)
    assert bench.advance() == [1, 2, 3]
    bench.begin(2)
    bench.finish(2)
    bench.begin(3)
    bench.finish(3, 1)
    assert not bench.ledger.attempts


# Priorities, tenants, deadlines


def test_priority_then_fair_turns_then_the_earliest_deadline():
    bench = Bench(slots=1, stage_ahead=0, requests_max=64)
    bench.dispatch(1)
    bench.begin(1)
    bench.dispatch(2, priority=Priority.BATCH)
    bench.dispatch(3, tenant="a", remaining_s=50.0)
    bench.dispatch(4, tenant="a", remaining_s=20.0)
    bench.dispatch(5, tenant="b", remaining_s=55.0)
    bench.dispatch(6, priority=Priority.CRITICAL)
    order = []
    for _ in range(5):
        bench.finish(bench.handed[-1])
        bench.begin(bench.handed[-1])
        order.append(bench.handed[-1])
    assert order[0] == 6
    assert order.index(4) < order.index(3)
    assert order[-1] == 2


# At the door


@pytest.mark.parametrize(
    ("settings", "stage", "limit"),
    [
        ({"requests_max": 3}, "requests", ("limit", "3")),
        ({"kv_times_max": 0.05}, "tokens", ("limitTokens", "50")),
        ({"bytes_max": 55}, "bytes", ("limitBytes", "55")),
    ],
    ids=["requests", "tokens", "bytes"],
)
def test_each_bound_refuses_with_its_own_numbers_and_is_never_exceeded(settings, stage, limit):
    bench = Bench(**settings)
    refused = None
    for token in range(1, 100):
        try:
            bench.dispatch(token)
        except Failure as failure:
            refused = failure
            break
        assert bench.queue.depth <= bench.queue.requests_max
        assert bench.queue.waiting.tokens <= bench.queue.tokens_max
        assert bench.ledger.waiting_bytes <= bench.queue.bytes_max
    assert refused is not None
    assert refused.reason is Reason.OVERLOADED
    assert refused.metadata["stage"] == stage
    assert refused.metadata[limit[0]] == limit[1]
    assert refused.retry_after_s == 0.5  # nothing was measured
    assert bench.ledger.counts.refused == {("OVERLOADED", stage): 1}


def test_a_refusal_says_when_to_come_again_by_measured_times():
    bench = Bench(slots=2, requests_max=4)
    bench.learn()
    bench.dispatch(1, 2)
    bench.begin(1, 2)
    bench.dispatch(3, 4, 5, 6)  # 2 s each on two slots; one of them is staged
    refused = bench.refused(7)
    assert refused.retry_after_s == pytest.approx((3 * 2 + 2 + 2) / 2)


def test_a_burst_may_fill_all_slots_and_the_whole_queue():
    bench = Bench(slots=8, requests_max=16)
    bench.dispatch(*range(1, 8 + 16 + 1))
    assert bench.queue.depth == 16
    assert bench.refused(100).metadata["queueDepth"] == "16"
    bench.begin(*range(1, 9))
    assert bench.queue.depth == 16  # nothing has changed by their admission


def test_whoever_ranks_higher_takes_the_place_of_the_youngest_of_the_lowest():
    bench = Bench(requests_max=3)
    bench.dispatch(1, 2)
    bench.begin(1, 2)
    bench.dispatch(3, priority=Priority.SHEDDABLE)  # staged: the engine has it
    bench.dispatch(4, 5, priority=Priority.SHEDDABLE)
    assert bench.refused(6, priority=Priority.SHEDDABLE).metadata["stage"] == "requests"
    bench.dispatch(7, priority=Priority.BATCH)
    bench.dispatch(8)
    assert {token: (f.reason, f.metadata["stage"]) for token, f in bench.ended.items()} == {
        5: (Reason.OVERLOADED, "shed"),
        4: (Reason.OVERLOADED, "shed"),
    }
    bench.dispatch(9, priority=Priority.CRITICAL)
    assert bench.ended.keys() == {4, 5, 7}
    assert bench.refused(10).metadata["stage"] == "requests"  # what was handed over is not shed, whatever it is
    assert set(bench.ledger.attempts) == {1, 2, 3, 8, 9}


def test_low_priorities_are_refused_while_the_policy_says_so():
    bench = Bench()
    bench.book.admits_from = Priority.STANDARD
    refused = bench.refused(1, priority=Priority.BATCH)
    assert refused.reason is Reason.OVERLOADED
    assert refused.metadata == {"stage": "priority", "priority": "BATCH", "admitsFrom": "STANDARD"}
    assert bench.dispatch(2) == [2]


def test_the_queue_s_age_sheds_the_oldest_of_the_lowest():
    bench = Bench(slots=1, stage_ahead=0)
    bench.dispatch(1, 2)
    bench.dispatch(3, 4, priority=Priority.BATCH)
    bench.ledger.shed("replicas/a", 1, bench.now)
    bench.ledger.shed("replicas/unknown", 1, bench.now)
    bench.advance()
    assert list(bench.ended) == [3]
    bench.ledger.shed("replicas/a", 9, bench.now)
    bench.advance()
    assert set(bench.ledger.attempts) == {1}


class Policy:
    def __init__(self):
        self.departures = []
        self.measured = []

    def departed(self, wait_s, now):
        self.departures.append(wait_s)

    def served(self, served, busy, now):
        self.measured.append((served.hold_s, busy))


def test_a_policy_hears_of_waits_and_of_what_was_measured():
    bench = Bench(slots=1, stage_ahead=0)
    bench.queue.policy = Policy()
    bench.dispatch(1, 2)
    bench.begin(1)
    bench.now = 3.0
    bench.finish(1, served=SERVED)
    assert bench.queue.policy.departures == [0.0, 3.0]
    assert bench.queue.policy.measured == [(2.0, 1)]
    assert bench.queue.head_age_s(3.0) is None


def test_a_tenants_weight_is_its_share():
    bench = Bench(slots=1, stage_ahead=0, requests_max=200)
    bench.book.kv_cells = 100_000
    bench.dispatch(1)
    for token in range(100, 200):
        weight, tenant = (3, "heavy") if token % 2 else (1, "light")
        bench.dispatch(token, tenant=tenant, weight=weight, input_bytes=800, max_tokens=300)
    while len(bench.handed) < 41:
        bench.begin(bench.handed[-1])
        bench.finish(bench.handed[-1])
    assert 28 <= sum(token % 2 for token in bench.handed[1:]) <= 32, "three of four"
