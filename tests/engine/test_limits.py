"""Limits of time: which one is told, and that nothing is admitted behind one."""

from __future__ import annotations

from typing import Any, cast

import pytest

from engine.harness import Hand, prepared
from headrace.engine.limits import Limit, LimitWatch, passed
from headrace.engine.operations import Submit
from headrace.engine.owner import Owner
from headrace.engine.sequence import Sequence
from headrace.engine.synthetic import SyntheticBackend

MS = 1_000_000


def sequence(*, is_begun: bool, **limits: int) -> Sequence:
    one = Sequence.of(prepared(SyntheticBackend(), 1, "x", **limits), cast(Owner, None))
    one.is_begun = is_begun
    one.admitted_ns = 100 if is_begun else 0
    return one


@pytest.mark.parametrize(
    ("limits", "waiting", "begun"),
    [
        ({}, None, None),
        ({"deadline_ns": 150}, Limit.DEADLINE, Limit.DEADLINE),
        ({"deadline_ns": 151}, None, None),
        ({"queue_until_ns": 150}, Limit.QUEUE, None),
        ({"queue_until_ns": 151}, None, None),
        ({"execution_ns": 50}, None, Limit.EXECUTION),
        ({"execution_ns": 51}, None, None),
        ({"deadline_ns": 150, "queue_until_ns": 1, "execution_ns": 1}, Limit.DEADLINE, Limit.DEADLINE),
        ({"deadline_ns": 999, "queue_until_ns": 1, "execution_ns": 1}, Limit.QUEUE, Limit.EXECUTION),
    ],
)
def test_which_limit_has_passed_at_150(limits: dict[str, int], waiting: Limit | None, begun: Limit | None) -> None:
    assert passed(sequence(is_begun=False, **limits), 150) is waiting
    assert passed(sequence(is_begun=True, **limits), 150) is begun


def test_the_watch_knows_the_earliest() -> None:
    watch = LimitWatch()
    watch.watch(sequence(is_begun=False))
    assert watch.next_ns == 0
    late = sequence(is_begun=False, deadline_ns=500)
    watch.watch(late)
    watch.watch(sequence(is_begun=True, execution_ns=100, deadline_ns=400))
    assert watch.next_ns == 200
    watch.restart([late])
    assert watch.next_ns == 500
    watch.restart([])
    assert watch.next_ns == 0


def request(hand: Hand, seq: int, **changes: Any) -> Any:
    return prepared(hand.backend, seq, "the water", received_ns=hand.now_ns, **changes)


@pytest.mark.parametrize("deadline_ms", [0, 20, 10])
def test_a_wait_that_was_too_long_is_refused_and_the_deadline_wins(deadline_ms: int) -> None:
    hand = Hand(slots=1)
    deadline = hand.now_ns + deadline_ms * MS if deadline_ms else 0
    hand.submit(
        request(hand, 1, max_tokens=1000),
        request(hand, 2, queue_until_ns=hand.now_ns + 10 * MS, deadline_ns=deadline),
        request(hand, 3, max_tokens=3),
    )
    hand.now_ns += 10 * MS - 1
    hand.turn()
    assert not hand.events("refused")
    hand.now_ns += 1
    hand.turn()
    (refused,) = hand.events("refused")
    assert refused["seq"] == 2
    if deadline_ms == 10:
        assert refused["error"]["reason"] == "DEADLINE_EXCEEDED"
    else:
        assert (refused["error"]["reason"], refused["error"]["metadata"]) == ("QUEUE_TIMEOUT", {"waitedMs": 10})
    hand.run()
    assert hand.finished(3)["reason"] == "length"


def test_queue_ms_ends_with_the_first_admission() -> None:
    hand = Hand()
    hand.submit(request(hand, 1, queue_until_ns=hand.now_ns + 1, credit=2))
    hand.now_ns += 1000 * MS
    hand.grant(1, -1)
    hand.run()
    assert hand.finished(1)["reason"] == "length"


@pytest.mark.parametrize("state", ["decoding", "paused", "prefilling"])
def test_an_execution_that_was_too_long_ends_between_two_steps(state: str) -> None:
    hand = Hand(slots=1, prefill_chunk=1 if state == "prefilling" else 64)
    hand.submit(request(hand, 1, max_tokens=3000, credit=4 if state == "paused" else -1, execution_ns=10 * MS))
    hand.submit(request(hand, 2, execution_ns=10 * MS, max_tokens=3))
    if state == "paused":
        hand.run()
    hand.now_ns += 10 * MS - 1
    hand.turn()
    assert not hand.events("finished")
    hand.now_ns += 1
    hand.turn()
    assert hand.finished(1)["reason"] == "timeout"
    hand.run()
    assert hand.finished(2)["reason"] == "length", "its own clock begins when it is admitted"
    hand.assert_idle()


def test_the_loop_wakes_up_for_the_first_limit() -> None:
    hand = Hand(slots=1)
    hand.submit(request(hand, 1, credit=2, execution_ns=10 * MS))
    hand.run()
    hand.turn()
    assert hand.loop.wait_s() == pytest.approx(0.010)


@pytest.mark.parametrize("limit", ["deadline_ns", "queue_until_ns"])
def test_nothing_is_admitted_whose_limit_has_passed(limit: str) -> None:
    """Even in the very turn in which it arrives: an operation may have lain in the inbox."""
    hand = Hand()
    late = request(hand, 1, **{limit: hand.now_ns})
    hand.turn(Submit((late, request(hand, 2))))
    assert [e["seq"] for e in hand.events("refused")] == [1]
    assert [e["seq"] for e in hand.events("admitted")] == [2]
    hand.run()
    hand.assert_idle()


def test_stopped_comes_before_what_is_given_back() -> None:
    class Slow(SyntheticBackend):
        """Giving KV back takes a millisecond."""

        hand: Hand

        def free(self, lane: int) -> None:
            self.hand.now_ns += MS

    backend = Slow()
    hand = backend.hand = Hand(backend)
    hand.submit(request(hand, 1, max_tokens=500), request(hand, 2, credit=2))
    hand.turn()
    asked = hand.now_ns
    hand.cancel(1)
    timing = hand.finished(1)["timing_ns"]
    assert (timing["stopped"], timing["finished"]) == (asked, asked + MS)
    hand.run()
    hand.now_ns += 5 * MS
    asked = hand.now_ns
    hand.cancel(2)
    assert hand.finished(2)["timing_ns"]["stopped"] == asked, "it could have gone on until then"


def test_a_cancel_in_the_queue_has_both_times_too() -> None:
    hand = Hand(slots=1)
    hand.submit(request(hand, 1, credit=0), request(hand, 2))
    hand.cancel(2)
    timing = hand.finished(2)["timing_ns"]
    assert (timing["admitted"], timing["stopped"], timing["finished"]) == (0, hand.now_ns, hand.now_ns)
