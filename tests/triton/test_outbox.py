"""How what waits for an engine becomes operations: merged, in order, with the time that is left by then."""

import math

import pytest

from headrace.control.deadlines import Budget
from headrace.triton import outbox
from headrace.triton.outbox import Outbox

NOW = 1000.0


class Refusals(list):
    def __call__(self, seqs, error):
        self.append((tuple(seqs), error["reason"], error["metadata"]))


@pytest.fixture
def refused():
    return Refusals()


@pytest.fixture
def box(refused):
    return Outbox(refused)


def add(box, seq, *, at=NOW, deadline_s=None, queue_s=None, tokens=(), input_bytes=10, **request):
    deadline_at = math.inf if deadline_s is None else at + deadline_s
    box.generate({"seq": seq, **request}, tokens, input_bytes, Budget(at, deadline_at, queue_s))


def sent(operation):
    return [request["seq"] for request in operation.document["requests"]]


def test_sequences_go_before_their_credits_and_credits_before_cancels(box):
    box.cancel([3], "cancelled")
    box.credit(1, 5)
    box.credit(2, 9)
    for seq in (1, 2, 3):
        add(box, seq, tokens=[seq] * seq, prompt_tokens=seq)
    first = box.next(NOW)
    assert (first.op, sent(first), first.seqs, first.tokens) == ("generate", [1, 2, 3], (1, 2, 3), [1, 2, 2, 3, 3, 3])
    assert box.next(NOW).document == {"limits": [(1, 5), (2, 9)]}
    assert box.next(NOW).document == {"seqs": [3], "reason": "cancelled"}
    assert box.next(NOW) is None


def test_the_time_that_waiting_took_is_not_granted_again(box):
    add(box, 1, deadline_s=5.0, queue_s=2.0)
    add(box, 2)
    add(box, 3, deadline_s=1.2505)
    requests = box.next(NOW + 1.25).document["requests"]
    assert requests == [{"seq": 1, "deadline_ms": 3750, "queue_ms": 750}, {"seq": 2}, {"seq": 3, "deadline_ms": 1}]


def test_a_request_without_a_budget_is_left_as_it_is(box):
    box.generate({"seq": 1, "deadline_ms": 70}, (), 0, None)
    assert box.next(NOW).document == {"requests": [{"seq": 1, "deadline_ms": 70}]}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"deadline_s": 1.0}, "DEADLINE_EXCEEDED"),
        ({"queue_s": 1.0}, "QUEUE_TIMEOUT"),
        ({"deadline_s": 9.0, "queue_s": 1.0}, "QUEUE_TIMEOUT"),
        ({"deadline_s": 1.0, "queue_s": 0.5}, "DEADLINE_EXCEEDED"),
    ],
    ids=["the deadline", "the wait", "the wait before the deadline", "both: the caller's"],
)
def test_what_has_expired_is_refused_with_its_reason_and_not_sent(box, refused, limits, reason):
    add(box, 1, **limits)
    add(box, 2)
    assert sent(box.next(NOW + 1.0)) == [2]
    assert refused == [((1,), reason, {"stage": "queue"})]


def test_if_all_have_expired_what_follows_them_goes_out(box, refused):
    add(box, 1, deadline_s=1.0)
    box.cancel([1], "cancelled")
    assert box.next(NOW + 2.0).op == "cancel"
    assert len(refused) == 1


def test_large_inputs_are_split_over_operations(box):
    for seq in (1, 2, 3):
        add(box, seq, input_bytes=outbox.GENERATE_BYTES_MAX // 2 + 1)
    add(box, 4, input_bytes=2 * outbox.GENERATE_BYTES_MAX)  # alone it may be larger
    assert [sent(box.next(NOW)) for _ in range(4)] == [[1], [2], [3], [4]]


def test_many_small_ones_are_split_by_their_number(box):
    for seq in range(outbox.GENERATES_PER_OPERATION + 1):
        add(box, seq)
    assert [len(sent(box.next(NOW))) for _ in range(2)] == [outbox.GENERATES_PER_OPERATION, 1]


def test_of_the_credits_of_a_sequence_the_highest_counts(box):
    assert [box.credit(1, limit) for limit in (10, 30, 20, 30)] == [True, True, False, False]
    assert box.next(NOW).document == {"limits": [(1, 30)]}


def test_who_is_cancelled_or_over_gets_no_credit(box):
    for seq in (1, 2, 3):
        box.credit(seq, 10)
    box.cancel([1], "deadline")
    box.forget(2)
    box.forget(9)
    assert box.next(NOW).document == {"limits": [(3, 10)]}
    assert box.next(NOW).document == {"seqs": [1], "reason": "deadline"}
