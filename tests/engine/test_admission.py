"""The queue in front of the slots: the order of acceptance, and when a head that did not fit is tried again."""

from __future__ import annotations

from typing import cast

from engine.harness import prepared
from headrace.engine.admission import AdmissionQueue
from headrace.engine.owner import Owner
from headrace.engine.sequence import Sequence
from headrace.engine.synthetic import SyntheticBackend


def sequences(count: int) -> list[Sequence]:
    backend = SyntheticBackend()
    return [Sequence.of(prepared(backend, n, "x"), cast(Owner, None), n) for n in range(count)]


def test_whoever_comes_back_gets_the_place_that_acceptance_gave() -> None:
    ones = sequences(5)
    queue = AdmissionQueue()
    for number in (0, 3, 4, 1, 2):
        queue.put(ones[number])
    order = []
    while (head := queue.head) is not None:
        order.append(head.order)
        queue.remove(head)
    assert order == [0, 1, 2, 3, 4]


def test_a_blocked_head_is_tried_again_when_something_has_changed() -> None:
    first, second, third = sequences(3)
    queue = AdmissionQueue()
    queue.put(second)
    queue.block(0)
    assert (queue.head, queue.relief_ns) == (None, 0)
    queue.put(third)
    queue.reopen_at(10**9)
    assert queue.head is None, "somebody behind it, and mere time, change nothing"
    queue.put(first)
    assert queue.head is first
    queue.block(0)
    queue.remove(first)
    assert queue.head is second
    queue.block(0)
    queue.reopen()
    assert queue.head is second


def test_a_blocked_head_is_tried_again_at_the_first_relief() -> None:
    (one,) = sequences(1)
    queue = AdmissionQueue()
    queue.put(one)
    queue.block(50)
    queue.hear_of_relief(60)
    queue.hear_of_relief(40)
    assert queue.relief_ns == 40
    queue.reopen_at(39)
    assert queue.head is None
    queue.reopen_at(40)
    assert (queue.head, queue.relief_ns) == (one, 0)
