"""Over-committed KV cells: more run at a time, the newest give way, and nobody's output changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.harness import Hand, prepared
from headrace.engine.ledger import Ledger


def request(hand: Hand, seq: int, words: int = 10, **changes: Any) -> Any:
    return prepared(hand.backend, seq, "the " * words, **{"max_tokens": 100, **changes})


def active(hand: Hand) -> int:
    active = hand.loop.stats()["active"]
    assert isinstance(active, int)
    return active


@pytest.mark.parametrize(("over_commit", "runs"), [(1.0, 1), (2.0, 2), (4.0, 4)])
def test_more_run_where_few_use_what_they_may(over_commit: float, runs: int) -> None:
    hand = Hand(kv_cells=220, over_commit=over_commit)
    hand.submit(*(request(hand, n, words=8, max_tokens=192) for n in range(1, 5)))
    assert active(hand) == runs


def test_without_over_commit_all_is_reserved_and_nobody_gives_way() -> None:
    hand = Hand(kv_cells=230)
    hand.submit(*(request(hand, n) for n in range(1, 5)))
    assert hand.loop.stats()["kv_reserved"] == 2 * len(request(hand, 1).prompt) + 200
    hand.run()
    assert hand.events("preempted") == []


def test_when_cells_run_short_the_newest_gives_way_and_the_oldest_goes_on() -> None:
    hand = Hand(kv_cells=150, over_commit=4.0)
    hand.submit(*(request(hand, n) for n in range(1, 4)))
    assert active(hand) == 3
    hand.run()
    assert hand.events("preempted")[0]["seq"] == 3
    assert [e["seq"] for e in hand.events("finished")] == [1, 2, 3], "in the order of acceptance"
    assert 1 not in [e["seq"] for e in hand.events("preempted")], "the oldest is never asked"
    preempted = [e["seq"] for e in hand.events("preempted")]
    assert len(preempted) == len(set(preempted)), "who comes back has all that it needs"
    hand.assert_idle()


@pytest.mark.parametrize(
    ("priorities", "first"), [((3, 3, 3), 3), ((1, 3, 3), 1), ((3, 1, 4), 2), ((4, 4, 1), 3), ((1, 1, 4), 2)]
)
def test_the_newest_of_the_lowest_priority_gives_way_first_and_once(priorities: tuple[int, ...], first: int) -> None:
    hand = Hand(kv_cells=150, over_commit=4.0)
    hand.submit(*(request(hand, n, priority=priority) for n, priority in enumerate(priorities, 1)))
    assert active(hand) == 3
    hand.run()
    preempted = [event["seq"] for event in hand.events("preempted")]
    assert preempted[0] == first
    assert len(preempted) == len(set(preempted)), "who came back ranks with the highest"
    assert {event["seq"] for event in hand.events("finished")} == {1, 2, 3}
    hand.assert_idle()


def test_work_of_low_priority_that_came_back_is_not_computed_again_for_who_comes_later() -> None:
    hand = Hand(kv_cells=150, over_commit=4.0)
    hand.submit(request(hand, 1, priority=1), request(hand, 2, priority=4))
    while not hand.events("resumed"):
        hand.turn()
    assert [event["seq"] for event in hand.events("preempted")] == [1]
    hand.submit(request(hand, 3, priority=4))
    assert active(hand) == 2
    hand.run()
    assert [event["seq"] for event in hand.events("preempted")] == [1, 3]
    assert [event["seq"] for event in hand.events("finished")] == [2, 1, 3]
    hand.assert_idle()


def test_a_paused_one_that_is_newest_gives_way_and_waits_for_its_reader() -> None:
    hand = Hand(kv_cells=130, over_commit=4.0)
    hand.submit(request(hand, 1), request(hand, 2, credit=3))
    hand.run()
    assert [e["seq"] for e in hand.events("preempted")] == [2]
    assert not hand.events("resumed")
    hand.grant(2, -1)
    hand.run()
    assert [e["seq"] for e in hand.events("finished")] == [1, 2]
    hand.assert_idle()


def test_what_is_retained_goes_before_anybody_gives_way() -> None:
    hand = Hand(kv_cells=150, over_commit=4.0)
    hand.submit(prepared(hand.backend, 1, "of " * 60, max_tokens=2))
    hand.run()
    assert hand.loop.stats()["kv_cached"] > 0
    hand.submit(request(hand, 2, max_tokens=130))
    hand.run()
    assert hand.events("preempted") == []
    assert hand.finished(2)["reason"] == "length"


def test_an_engine_that_runs_ahead_gives_way_too() -> None:
    hand = Hand(kv_cells=150, over_commit=4.0, run_ahead=16)
    hand.submit(*(request(hand, n) for n in range(1, 4)))
    hand.run()
    assert hand.events("preempted")
    assert sorted(e["seq"] for e in hand.events("finished")) == [1, 2, 3]
    hand.assert_idle()


def undisturbed(hand: Hand, entry: Any) -> tuple[list[int], str]:
    alone = Hand(slots=1, kv_cells=100_000)
    alone.submit(replace(entry, credit=-1))
    alone.run()
    return alone.output(entry.seq)


@settings(max_examples=40, deadline=None)
@given(
    over_commit=st.sampled_from((1.0, 1.5, 3.0, 8.0)),
    kv_cells=st.integers(140, 400),
    shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 90), st.booleans()), min_size=1, max_size=8),
    run_ahead=st.sampled_from((0, 8)),
)
def test_whatever_is_preempted_each_output_is_that_of_a_run_alone_and_all_end(
    over_commit: float, kv_cells: int, shapes: list[tuple[int, int, bool]], run_ahead: int
) -> None:
    hand = Hand(kv_cells=kv_cells, over_commit=over_commit, run_ahead=run_ahead)
    entries = [
        request(hand, n, words=words, max_tokens=tokens, credit=2 if is_slow else -1)
        for n, (words, tokens, is_slow) in enumerate(shapes, start=1)
    ]
    hand.submit(*entries)
    granted = 2
    for _ in range(200):
        for _ in range(20):
            hand.turn()
            stats = hand.loop.stats()
            assert stats["kv_reserved"] + stats["kv_cached"] <= kv_cells
            for one in hand.loop._sequences.values():
                assert not one.has_lane or one.stored <= one.booked <= one.cells
        granted += 7
        for entry in entries:
            hand.grant(entry.seq, granted)
        if len(hand.events("finished")) == len(entries):
            break
    hand.run()
    for entry in entries:
        assert hand.finished(entry.seq)["reason"] in ("length", "stop")
        assert hand.output(entry.seq) == undisturbed(hand, entry)
    hand.assert_idle()


def test_the_ledger_extends_within_what_there_is_and_evicts_the_oldest_first() -> None:
    ledger = Ledger(slots=2, cells=10, lanes=4)
    kept = []
    for _ in range(2):
        reservation = ledger.reserve(2)
        assert reservation is not None
        ledger.retain(reservation.lane, 2)
        kept.append(reservation.lane)
    reservation = ledger.reserve(5)
    assert reservation is not None
    assert ledger.extend(reservation.lane, 6) == ()
    assert ledger.extend(reservation.lane, 7) == (kept[0],)
    assert ledger.retained == (kept[1],)
    other = ledger.reserve(2)
    assert other is not None
    assert ledger.extend(reservation.lane, 9) is None
    assert (ledger.reserved_cells, ledger.retained_cells) == (9, 0)
