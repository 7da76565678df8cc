"""Who loses slot and KV to the head of the queue: table by table, then in the loop turned by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.harness import Hand, ListSink, prepared
from headrace.engine.contract import merge
from headrace.engine.operations import OpenStream
from headrace.engine.preemption import Paused, choose, next_look_ns

MS = 1_000_000
LONG = "the of and to in is that it was for on are as with they be at one have this from "


@pytest.mark.parametrize(
    ("paused", "slots", "cells", "expected"),
    [
        ([(1, 10, 5), (2, 10, 6)], 1, 0, [1]),
        ([(1, 10, 5), (2, 10, 6)], 0, 10, [1]),
        ([(1, 10, 5), (2, 10, 6)], 1, 20, [1, 2]),
        ([(1, 10, 5), (2, 10, 6)], 1, 21, []),
        ([(1, 3, 5), (2, 20, 6)], 1, 15, [2]),
        ([(1, 3, 5), (2, 4, 6), (3, 20, 7)], 0, 23, [1, 3]),
        ([(1, 3, 5), (2, 4, 6), (3, 20, 7)], 0, 24, [2, 3]),
        ([(1, 10, 5), (2, 10, 101)], 1, 20, []),
        ([(1, 10, 100)], 1, 0, [1]),
        ([(1, 10, 101)], 1, 0, []),
        ([], 1, 0, []),
    ],
    ids=[
        "a slot: the longest paused",
        "cells: the longest paused",
        "as many as needed",
        "nobody in vain",
        "not who is too small to matter",
        "the latest paused is spared first",
        "the smallest set that is enough",
        "who paused just now is left alone",
        "exactly long enough",
        "not yet",
        "nobody",
    ],
)
def test_choice(paused: list[tuple[int, int, int]], slots: int, cells: int, expected: list[int]) -> None:
    assert choose([Paused(*one) for one in paused], slots=slots, cells=cells, ripe_ns=100) == expected


@pytest.mark.parametrize(
    ("priorities", "slots", "cells", "expected"),
    [
        ([3, 3, 3], 1, 0, [1]),
        ([4, 3, 1], 1, 0, [3]),
        ([4, 1, 1], 1, 0, [2]),
        ([4, 1, 3], 0, 15, [2, 3]),
        ([1, 1, 4], 0, 30, [1, 2, 3]),
    ],
)
def test_the_lowest_priority_goes_first_and_in_it_the_longest_paused(
    priorities: list[int], slots: int, cells: int, expected: list[int]
) -> None:
    paused = [Paused(n, 10, n, priority) for n, priority in enumerate(priorities, 1)]
    assert choose(paused, slots=slots, cells=cells, ripe_ns=100) == expected


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=6), st.integers(0, 1), st.integers(0, 30))
def test_a_choice_is_enough_and_nobody_in_it_is_spare(raw: list[tuple[int, int]], slots: int, cells: int) -> None:
    if not slots and not cells:
        return
    paused = [Paused(n, size, at) for n, (size, at) in enumerate(sorted(raw, key=lambda one: one[1]))]
    ripe = [one for one in paused if one.since_ns <= 5]
    chosen = [paused[seq] for seq in choose(paused, slots=slots, cells=cells, ripe_ns=5)]
    assert set(chosen) <= set(ripe)
    possible = len(ripe) >= slots and sum(one.cells for one in ripe) >= cells
    assert bool(chosen) == possible
    if chosen:
        total = sum(one.cells for one in chosen)
        assert len(chosen) >= slots
        assert total >= cells
        assert all(total - one.cells < cells or len(chosen) - 1 < slots for one in chosen)


def test_the_next_look_is_when_the_next_is_ripe() -> None:
    paused = [Paused(1, 1, 10), Paused(2, 1, 30), Paused(3, 1, 40)]
    assert next_look_ns(paused, ripe_ns=20, after_ns=5) == 35
    assert next_look_ns(paused, ripe_ns=40, after_ns=5) == 0


def request(hand: Hand, seq: int, prompt: str = LONG, **changes: Any) -> Any:
    return prepared(hand.backend, seq, prompt, **changes)


def squeezed(hand: Hand, **changes: Any) -> None:
    """Sequence 1 pauses after three tokens, 2 wants its place, and time passes."""
    hand.submit(request(hand, 1, **{"max_tokens": 30, "credit": 3, **changes}))
    hand.run()
    hand.submit(request(hand, 2, "x", max_tokens=5))
    assert not hand.events("preempted")
    hand.now_ns += 200 * MS
    hand.run()


def undisturbed(seq: int, prompt: str, **changes: Any) -> tuple[list[int], str, dict[str, Any]]:
    hand = Hand()
    hand.submit(request(hand, seq, prompt, **changes))
    hand.run()
    return *hand.output(seq), hand.finished(seq)


@pytest.mark.parametrize("kv_cells", [4096, 54], ids=["for a slot", "for cells"])
def test_a_paused_sequence_gives_way_and_comes_back_as_if_nothing_had_happened(kv_cells: int) -> None:
    hand = Hand(slots=1 if kv_cells > 1000 else 4, kv_cells=kv_cells)
    squeezed(hand)
    assert hand.events("preempted") == [{"type": "preempted", "seq": 1, "preemptions": 1}]
    assert hand.finished(2)["reason"] == "length"
    stats = hand.loop.stats()
    assert (stats["preempted"], stats["preemptions"], stats["active"], stats["kv_reserved"]) == (1, 1, 0, 0)
    prompted = stats["prompt_tokens"]
    hand.grant(1, 10)
    hand.run()
    (resumed,) = hand.events("resumed")
    prompt = len(hand.backend.tokenize(LONG))
    assert (resumed["seq"], resumed["preemptions"]) == (1, 1)
    stats = hand.loop.stats()
    assert resumed["cached_tokens"] + stats["reprefilled_tokens"] == prompt + 3
    assert stats["prompt_tokens"] == prompted, "a prompt is counted once"
    assert (len(hand.output(1)[0]), stats["paused"], stats["preempted"]) == (10, 1, 0), "it pauses as usual"
    hand.grant(1, -1)
    hand.run()
    ids, text, alone = undisturbed(1, LONG, max_tokens=30)
    assert hand.output(1) == (ids, text)
    assert {**hand.finished(1), "timing_ns": 0} == {**alone, "timing_ns": 0}
    assert len(hand.events("admitted")) == 2
    hand.assert_idle()


def test_what_it_leaves_as_prefix_cache_makes_the_return_cheap() -> None:
    hand = Hand(slots=1)
    squeezed(hand)
    hand.grant(1, -1)
    hand.run()
    (resumed,) = hand.events("resumed")
    assert resumed["cached_tokens"] == len(hand.backend.tokenize(LONG)) + 3 - 1, "the last token is never in the KV"
    assert hand.loop.stats()["reprefilled_tokens"] == 1


def test_what_it_leaves_never_hinders_the_admission() -> None:
    hand = Hand(slots=2, kv_cells=60)
    hand.submit(request(hand, 1, max_tokens=30, credit=3))
    hand.run()
    hand.submit(request(hand, 2, "x", max_tokens=59))
    hand.now_ns += 200 * MS
    hand.run()
    assert hand.finished(2)["reason"] == "length"


def test_nobody_is_preempted_before_the_time_or_in_vain() -> None:
    hand = Hand(slots=4, kv_cells=100)
    hand.submit(request(hand, 1, max_tokens=20, credit=3), request(hand, 2, "y", max_tokens=40, credit=-1))
    for _ in range(6):
        hand.turn()
    hand.submit(request(hand, 3, "x", max_tokens=80))
    hand.now_ns += 199 * MS
    hand.turn()
    assert not hand.events("preempted")
    hand.now_ns += 10 * MS
    hand.turn()
    assert not hand.events("preempted"), "81 cells are more than 1 holds, and 2 is not paused"
    hand.run()
    assert hand.finished(3)["reason"] == "length"
    assert [e["seq"] for e in hand.events("preempted")] == [1], "now it lets 3 in"


def test_the_loop_wakes_up_when_somebody_can_be_preempted() -> None:
    hand = Hand(slots=1)
    hand.submit(request(hand, 1, credit=3))
    hand.run()
    hand.submit(request(hand, 2, "x"))
    hand.now_ns += 190 * MS
    hand.turn()
    assert 0 < hand.loop.wait_s() <= 0.010
    hand.now_ns += 10 * MS
    hand.turn()
    assert [e["seq"] for e in hand.events("preempted")] == [1]


def test_a_pause_that_begins_while_somebody_waits_is_watched_too() -> None:
    hand = Hand(slots=1)
    hand.submit(request(hand, 1, credit=8), request(hand, 2, "x"))
    hand.run()
    assert hand.loop.stats()["paused"] == 1
    hand.now_ns += 200 * MS
    hand.run()
    assert hand.finished(2)["reason"] == "length"


@pytest.mark.parametrize("prompt", [LONG, " the"], ids=["a long prompt", "a prompt of one token"])
def test_a_sequence_without_any_credit_gives_way_too(prompt: str) -> None:
    hand = Hand(slots=1)
    hand.submit(request(hand, 1, prompt, max_tokens=30, credit=0))
    hand.run()
    assert hand.loop.stats()["paused"] == 1
    hand.submit(request(hand, 2, "x", max_tokens=5))
    hand.now_ns += 200 * MS
    hand.run()
    assert [e["seq"] for e in hand.events("preempted")] == [1]
    hand.grant(1, -1)
    hand.run()
    assert hand.output(1) == undisturbed(1, prompt, max_tokens=30)[:2]


def test_the_times_of_its_first_admission_and_token_stay() -> None:
    hand = Hand(slots=1)
    began = hand.now_ns
    squeezed(hand)
    hand.grant(1, -1)
    hand.run()
    timing = hand.finished(1)["timing_ns"]
    assert (timing["admitted"], timing["first_token"]) == (began, began)
    assert timing["stopped"] == hand.now_ns > began


def test_who_was_accepted_first_comes_back_first() -> None:
    hand = Hand(slots=1)
    squeezed(hand)
    hand.submit(*(request(hand, n, "x", max_tokens=50) for n in (3, 4, 5)))
    hand.grant(1, -1)
    hand.run()
    ends = [e["seq"] for e in hand.events("finished")]
    assert ends == [2, 3, 1, 4, 5]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_among_the_preempted_the_order_of_acceptance_holds(order: tuple[int, int]) -> None:
    hand = Hand(slots=2)
    hand.submit(*(request(hand, n, max_tokens=20, credit=2) for n in (1, 2)))
    hand.run()
    hand.now_ns += 300 * MS
    hand.submit(*(request(hand, n, "x", max_tokens=40) for n in (3, 4)))
    hand.turn()
    assert {e["seq"] for e in hand.events("preempted")} == {1, 2}
    for seq in order:
        hand.grant(seq, -1)
    hand.run()
    assert [e["seq"] for e in hand.events("resumed")] == [1, 2]


@pytest.mark.parametrize("state", ["preempted", "waiting again"])
@pytest.mark.parametrize("how", ["cancelled", "deadline", "timeout", "owner lost", "superseded", "failed"])
def test_a_preempted_sequence_ends_like_any_other(state: str, how: str) -> None:
    hand = Hand(slots=1)
    end_ns = hand.now_ns + 1000 * MS
    limits = {
        "deadline": {"deadline_ns": end_ns, "execution_ns": 1000 * MS},
        "timeout": {"deadline_ns": end_ns + 1, "execution_ns": 1000 * MS},
    }.get(how, {})
    squeezed(hand, **limits)
    ids, text = hand.output(1)
    if state == "waiting again":
        hand.submit(request(hand, 3, max_tokens=3000))
        hand.grant(1, -1)
        hand.turn()
        assert hand.loop.stats()["waiting"] == 1
    if how == "cancelled":
        hand.cancel(1)
    elif how == "owner lost":
        hand.sink.is_lost = True
        hand.turn()
        assert hand.loop.stats()["preempted"] == hand.loop.stats()["waiting"] == 0
        hand.assert_idle()
        return
    elif how == "superseded":
        old, hand.sink = hand.sink, ListSink()
        hand.turn(OpenStream(hand.sink))
        ends = [e for batch in old.batches for e in batch.events if e["type"] == "finished" and e["seq"] == 1]
        assert [e["reason"] for e in ends] == ["cancelled"]
        return
    elif how == "failed":
        hand.loop.fail("id-1")
    else:
        hand.now_ns = end_ns
        hand.turn()
    assert hand.finished(1)["reason"] == {"failed": "error"}.get(how, how)
    assert hand.finished(1)["usage"]["emitted"] == len(ids) == 3
    assert hand.output(1) == (ids, text)
    assert hand.loop.stats()["preempted"] == 0
    hand.cancel(3)
    hand.assert_idle()


def test_the_wait_for_another_admission_is_not_bounded_by_queue_ms() -> None:
    hand = Hand(slots=1)
    squeezed(hand, queue_until_ns=hand.now_ns + 250 * MS)
    hand.now_ns += 5000 * MS
    hand.submit(request(hand, 3, "x", max_tokens=50))
    hand.grant(1, -1)
    hand.run()
    assert hand.finished(1)["reason"] == "length"


def test_a_reader_knows_who_is_preempted_even_when_everything_came_at_once() -> None:
    hand = Hand(slots=1)
    squeezed(hand)
    assert _preempted(hand) == {1}
    hand.grant(1, 5)
    hand.run()
    assert _preempted(hand) == set()
    hand.submit(request(hand, 3, "x", max_tokens=5))
    hand.now_ns += 200 * MS
    hand.run()
    assert [e["preemptions"] for e in hand.events("preempted")] == [1, 2]
    assert _preempted(hand) == {1}


def _preempted(hand: Hand) -> set[int]:
    """As the contract tells the reader, of one response that everything was merged into."""
    events = merge(hand.sink.batches).events
    first = [e for e in events if e["type"] == "resumed"]
    rest = [e for e in events if e["type"] == "preempted"]
    lost: dict[int, int] = {}
    back: dict[int, int] = {}
    for event in first + rest:
        seen = lost if event["type"] == "preempted" else back
        seen[event["seq"]] = max(seen.get(event["seq"], 0), event["preemptions"])
    return {seq for seq, number in lost.items() if number > back.get(seq, 0)}


def test_who_holds_no_slot_counts_against_the_queue() -> None:
    hand = Hand(slots=1, max_waiting=1)
    squeezed(hand)
    hand.submit(request(hand, 3, "x", max_tokens=5))
    hand.run()
    assert hand.finished(3)["reason"] == "length", "a free slot is not refused"
    hand.submit(request(hand, 4, "x", max_tokens=500), request(hand, 5, "x"))
    assert [e["seq"] for e in hand.events("refused")] == [5]
    hand.cancel(1)
    hand.submit(request(hand, 6, "x"))
    hand.run()
    assert hand.finished(6)["reason"] == "length"
