"""The engine loop on the synthetic engine, turned by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.harness import Hand, ListSink, prepared
from headrace.engine.operations import Cancel, Enumerate, OpenStream, Submit
from headrace.engine.request import RefusalError, Rejected, Sampling
from headrace.engine.synthetic import END_TOKEN


def request(hand: Hand, seq: int, prompt: str = "the water", **changes: Any) -> Any:
    return prepared(hand.backend, seq, prompt, **changes)


def test_the_story_of_one_sequence() -> None:
    hand = Hand()
    hand.submit(request(hand, 7, max_tokens=5))
    hand.run()
    assert [e["seq"] for e in hand.events("admitted")] == [7]
    finished = hand.finished(7)
    assert finished["reason"] == "length"
    ids, text = hand.output(7)
    assert len(ids) == 5
    assert text == b"".join(hand.backend.piece(i) for i in ids).decode()
    usage = finished["usage"]
    assert (usage["prompt"], usage["generated"], usage["emitted"]) == (len(hand.backend.tokenize("the water")), 5, 5)
    hand.assert_idle()


def test_greedy_repeats_itself_and_a_seed_fixes_the_draw() -> None:
    hand = Hand()
    warm = Sampling(temperature=1.0, seed=5)
    hand.submit(
        request(hand, 1),
        request(hand, 2),
        request(hand, 3, sampling=warm),
        request(hand, 4, sampling=warm),
    )
    hand.run()
    assert hand.output(1) == hand.output(2)
    assert hand.output(3) == hand.output(4)
    assert hand.output(1) != hand.output(3)


def test_sequences_share_steps() -> None:
    hand = Hand()
    hand.submit(*(request(hand, n, max_tokens=10) for n in range(1, 5)))
    hand.run()
    assert hand.loop.stats()["steps"] <= 12
    assert hand.loop.stats()["generated_tokens"] == 40


def test_more_than_the_slots_wait_their_turn_and_more_than_the_queue_are_refused() -> None:
    hand = Hand(slots=2, max_waiting=3)
    hand.submit(*(request(hand, n) for n in range(1, 8)))
    assert [e["seq"] for e in hand.events("refused")] == [6, 7]
    assert {e["error"]["reason"] for e in hand.events("refused")} == {"OVERLOADED"}
    hand.run()
    assert [e["seq"] for e in hand.events("admitted")] == [1, 2, 3, 4, 5]
    hand.assert_idle()


def test_a_sequence_waits_for_cells_and_is_not_overtaken() -> None:
    hand = Hand(kv_cells=60)
    hand.submit(request(hand, 1, max_tokens=40), request(hand, 2, max_tokens=40), request(hand, 3, max_tokens=4))
    assert [e["seq"] for e in hand.events("admitted")] == [1]
    hand.run()
    assert [e["seq"] for e in hand.events("admitted")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "reason", "stop"),
    [
        ({"max_tokens": 3}, "length", None),
        ({"prompt": "[[say=one two]]"}, "stop", {"kind": "eos", "value": END_TOKEN}),
        ({"prompt": "[[say= of water of]]", "stop": ("wat",)}, "stop", {"kind": "string", "value": "wat"}),
    ],
    ids=["max_tokens", "the model's own end", "a stop string"],
)
def test_ends(changes: dict[str, Any], reason: str, stop: dict[str, Any] | None) -> None:
    hand = Hand()
    hand.submit(request(hand, 1, **changes))
    hand.run()
    assert (hand.finished(1)["reason"], hand.finished(1)["stop"]) == (reason, stop)


def test_a_stop_token_ends_it_and_is_not_shown() -> None:
    hand = Hand()
    hand.submit(request(hand, 1))
    hand.run()
    third = hand.output(1)[0][2]
    hand.submit(request(hand, 2, stop_token_ids=frozenset({third})))
    hand.run()
    assert hand.finished(2)["stop"] == {"kind": "token", "value": third}
    assert third not in hand.output(2)[0]
    assert hand.finished(2)["usage"]["generated"] == len(hand.output(2)[0]) + 1


def test_text_is_whole_even_where_tokens_cut_characters() -> None:
    hand = Hand()
    hand.submit(request(hand, 1, max_tokens=400))
    hand.run()
    ids, text = hand.output(1)
    assert any(emoji in text for emoji in "🌊💧🚰"), "the synthetic engine cuts emoji in two tokens"
    assert text == b"".join(hand.backend.piece(i) for i in ids).decode()


def test_credit_pauses_a_sequence_and_the_others_go_on() -> None:
    hand = Hand()
    hand.submit(request(hand, 1, max_tokens=20, credit=3), request(hand, 2, max_tokens=20))
    hand.run()
    assert len(hand.output(1)[0]) == 3
    assert hand.finished(2)["reason"] == "length"
    stats = hand.loop.stats()
    assert (stats["paused"], stats["active"]) == (1, 1)
    assert stats["kv_reserved"] > 0, "a paused sequence keeps its KV"
    hand.grant(1, 2)
    hand.run()
    assert len(hand.output(1)[0]) == 3, "a lower limit is ignored"
    hand.grant(1, 20)
    hand.run()
    assert len(hand.output(1)[0]) == 20
    hand.assert_idle()


def test_no_credit_at_all_prefills_and_waits() -> None:
    hand = Hand()
    hand.submit(request(hand, 1, credit=0))
    hand.run()
    assert hand.output(1) == ([], "")
    hand.grant(1, -1)
    hand.run()
    assert len(hand.output(1)[0]) == 16


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "paused"])
def test_a_cancel_in_any_phase_frees_everything_and_is_confirmed_once(when: str) -> None:
    hand = Hand(slots=1, prefill_chunk=4)
    if when == "waiting":
        hand.submit(request(hand, 9, credit=0))
    hand.submit(request(hand, 1, "the water of the river " * 4, credit=2 if when == "paused" else -1, max_tokens=50))
    if when == "decoding":
        while not hand.output(1)[0]:
            hand.turn()
    if when == "paused":
        hand.run()
    hand.cancel(1)
    hand.cancel(1)
    assert hand.finished(1)["reason"] == "cancelled"
    hand.cancel(9)
    hand.assert_idle()


def test_deadlines_end_what_runs_and_refuse_what_waits() -> None:
    hand = Hand(slots=1)
    late = hand.now_ns + 5_000
    hand.submit(
        request(hand, 1, max_tokens=2000, deadline_ns=late),
        request(hand, 2, deadline_ns=late),
        request(hand, 3, max_tokens=2),
    )
    hand.now_ns = late
    hand.turn()
    assert hand.finished(1)["reason"] == "deadline"
    (refused,) = hand.events("refused")
    assert (refused["seq"], refused["error"]["reason"]) == (2, "DEADLINE_EXCEEDED")
    hand.run()
    assert hand.finished(3)["reason"] == "length"
    hand.assert_idle()


def test_a_long_prompt_is_taken_in_bounded_chunks_beside_decoding() -> None:
    hand = Hand(prefill_chunk=8)
    hand.submit(request(hand, 1, max_tokens=100))
    hand.turn()
    shown = len(hand.output(1)[0])
    hand.submit(request(hand, 2, "the of and to in is that it " * 10))
    steps = 0
    while not hand.output(2)[0]:
        hand.turn()
        steps += 1
    assert steps >= 9, "80 tokens in chunks of 8"
    assert len(hand.output(1)[0]) - shown >= steps, "the other went on, one token a step"


def test_a_lost_owner_takes_its_sequences_with_it() -> None:
    hand = Hand()
    hand.submit(request(hand, 1, max_tokens=1000))
    hand.turn()
    hand.sink.is_lost = True
    hand.turn()
    hand.assert_idle()
    assert hand.sink.is_closed


def test_a_new_stream_supersedes_the_old_one() -> None:
    hand = Hand()
    old = hand.sink
    hand.submit(request(hand, 1, max_tokens=1000))
    hand.sink = ListSink()
    hand.turn(OpenStream(hand.sink))
    assert old.is_closed
    assert hand.events("hello")
    hand.assert_idle()
    hand.submit(request(hand, 2))
    hand.run()
    assert hand.finished(2)["reason"] == "length"


def test_an_owner_s_next_stream_goes_on_where_the_one_before_ends() -> None:
    hand = Hand(slots=2)
    old = hand.sink
    hand.submit(request(hand, 1, max_tokens=40), request(hand, 2, max_tokens=40), request(hand, 3, max_tokens=40))
    for _ in range(5):
        hand.turn()
    hand.sink = new = ListSink()
    hand.turn(OpenStream(new, goes_on=True))
    assert old.is_closed
    assert old.batches[-1].events[-1]["type"] == "alive"
    hand.run()
    assert new.batches[0].events[0]["type"] == "hello"
    new.batches[:0] = old.batches
    for seq in (1, 2, 3):
        assert hand.finished(seq)["reason"] == "length"
        assert len(hand.output(seq)[0]) == 40
    hand.assert_idle()


def test_a_stream_that_goes_on_where_there_is_none_begins() -> None:
    hand = Hand()
    hand.sink.is_lost = True
    hand.turn()
    hand.sink = ListSink()
    hand.turn(OpenStream(hand.sink, goes_on=True))
    assert hand.events("hello")
    hand.submit(request(hand, 2))
    hand.run()
    assert hand.finished(2)["reason"] == "length"


def test_a_list_tells_the_owners_live_sequences_in_order_with_their_ends() -> None:
    hand = Hand(slots=1)
    hand.submit(request(hand, 1, max_tokens=3), request(hand, 2, max_tokens=1000))
    hand.turn(Submit((request(hand, 9, max_tokens=1000),), ListSink()))
    hand.turn(Cancel((1,), "cancelled"), Enumerate())
    told = [event for batch in hand.sink.batches for event in batch.events]
    told = [event for event in told if event["type"] in ("finished", "sequences")]
    assert [event["type"] for event in told] == ["finished", "sequences"]
    assert told[1]["seqs"] == [2], "neither what has ended nor what another stream owns"


def test_a_shared_beginning_is_reused_and_changes_nothing() -> None:
    prompt = "the of and to in is that it was for on are as with they be at one have this from "
    hand = Hand()
    hand.submit(request(hand, 1, prompt))
    hand.run()
    hand.submit(request(hand, 2, prompt))
    hand.run()
    assert hand.output(1) == hand.output(2)
    cached = hand.finished(2)["usage"]["cached"]
    assert 0 < cached < hand.finished(2)["usage"]["prompt"], "one token of the prompt is always decoded"
    assert hand.loop.stats()["cached_tokens"] == cached


def test_a_refusal_is_told_in_order() -> None:
    hand = Hand()
    hand.submit(Rejected(3, RefusalError("INVALID_REQUEST", "Wrong.", "prompt")))
    (refused,) = hand.events("refused")
    assert (refused["seq"], refused["error"]["field"]) == (3, "prompt")


def test_the_same_sequence_twice_runs_once() -> None:
    hand = Hand()
    hand.submit(request(hand, 1), request(hand, 1))
    hand.run()
    assert hand.finished(1)["reason"] == "length"


def test_a_failure_ends_every_sequence_with_an_id_and_silence() -> None:
    hand = Hand()
    hand.submit(request(hand, 1, max_tokens=1000), request(hand, 2, max_tokens=1000))
    hand.loop.fail("id-1")
    for seq in (1, 2):
        assert hand.finished(seq)["reason"] == "error"
        assert hand.finished(seq)["error"]["metadata"] == {"errorId": "id-1"}


def test_a_reader_that_is_behind_stops_the_steps_not_the_cancels() -> None:
    hand = Hand()
    hand.submit(request(hand, 1, max_tokens=1000))
    hand.sink.is_congested = True
    before = hand.loop.stats()["steps"]
    for _ in range(5):
        hand.turn()
    assert hand.loop.stats()["steps"] == before
    hand.cancel(1)
    hand.assert_idle()


_ACT = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 12), st.integers(1, 30)),
    st.tuples(st.just("cancel"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("grant"), st.integers(1, 12), st.integers(0, 30)),
    st.tuples(st.just("turn"), st.integers(1, 5), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_ACT, max_size=60), st.integers(1, 3), st.integers(40, 200))
def test_whatever_happens_each_sequence_ends_once_and_nothing_is_held(
    acts: list[tuple[str, int, int]], slots: int, cells: int
) -> None:
    hand = Hand(slots=slots, kv_cells=cells, max_waiting=4)
    submitted: list[int] = []
    number = 0
    for name, value, extra in acts:
        if name == "submit":
            number += 1
            submitted.append(number)
            hand.submit(request(hand, number, "the of and to " * value, max_tokens=min(extra, 10), credit=extra - 15))
        elif name == "cancel" and submitted:
            hand.cancel(submitted[value % len(submitted)])
        elif name == "grant" and submitted:
            hand.grant(submitted[value % len(submitted)], extra)
        else:
            for _ in range(value):
                hand.turn()
        stats = hand.loop.stats()
        assert stats["active"] <= slots
        assert stats["kv_reserved"] + stats["kv_cached"] <= cells
    for seq in submitted:
        hand.grant(seq, -1)
    for _ in range(500):
        hand.turn()
    for seq in submitted:
        hand.cancel(seq)
    ends = [e["seq"] for e in hand.events("finished")] + [e["seq"] for e in hand.events("refused")]
    assert sorted(ends) == sorted(submitted)
    for event in hand.events("finished"):
        assert event["usage"]["emitted"] == len(hand.output(event["seq"])[0])
    hand.assert_idle()
