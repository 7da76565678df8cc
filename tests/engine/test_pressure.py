"""Back-pressure in the loop: running ahead, and, whatever happens in either mode, the output of an undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.harness import Hand, prepared
from headrace.engine.request import Sampling
from headrace.engine.sequence import Prepared

MS = 1_000_000
LONG = "the of and to in is that it was for on are as with they be at one have this from "


def request(hand: Hand, seq: int, prompt: str = LONG, **changes: Any) -> Any:
    return prepared(hand.backend, seq, prompt, **changes)


def logprobs(hand: Hand, seq: int) -> list[tuple[float, list[tuple[int, float]]]]:
    found = []
    for batch in hand.sink.batches:
        for part in batch.parts():
            if part.seq == seq and part.logprobs is not None and part.top is not None:
                found += list(zip(part.logprobs, part.top, strict=True))
    return found


def undisturbed(entry: Prepared) -> Hand:
    hand = Hand(slots=1, kv_cells=100_000)
    hand.submit(replace(entry, credit=-1))
    hand.run()
    return hand


def test_a_sequence_without_credit_runs_on_into_its_buffer_and_is_aborted_when_that_is_full() -> None:
    hand = Hand(run_ahead=8)
    entry = request(hand, 1, max_tokens=40, credit=3)
    hand.submit(entry)
    for _ in range(4):
        hand.turn()
    stats = hand.loop.stats()
    assert (len(hand.output(1)[0]), stats["active"], stats["paused"]) == (3, 1, 0)
    assert 0 < stats["buffered_tokens"] <= stats["generated_tokens"] - 3
    hand.run()
    stats = hand.loop.stats()
    assert hand.events("preempted") == [{"type": "preempted", "seq": 1, "preemptions": 1}]
    assert (stats["generated_tokens"], stats["buffered_tokens"], stats["preempted"]) == (11, 8, 1)
    assert (stats["active"], stats["kv_reserved"]) == (0, 0)
    hand.grant(1, 6)
    hand.run()
    assert len(hand.output(1)[0]) == 6, "the buffer is handed out first"
    assert not hand.events("resumed"), "five of eight are still kept"
    hand.grant(1, 7)
    hand.run()
    assert [e["seq"] for e in hand.events("resumed")] == [1]
    stats = hand.loop.stats()
    assert (len(hand.output(1)[0]), stats["generated_tokens"], stats["buffered_tokens"]) == (7, 15, 8)
    hand.grant(1, -1)
    hand.run()
    assert hand.output(1) == undisturbed(entry).output(1)
    hand.assert_idle()


def test_with_credit_in_time_nothing_is_kept() -> None:
    hand = Hand(run_ahead=4)
    hand.submit(request(hand, 1, max_tokens=40, credit=10))
    for _ in range(7):
        hand.turn()
    hand.grant(1, -1)
    hand.run()
    assert hand.finished(1)["usage"]["emitted"] == 40
    assert not hand.events("preempted")


@pytest.mark.parametrize("prompt", ["[[say=one two three]]", "x"], ids=["stop", "length"])
def test_an_end_waits_for_the_tokens_before_it_but_its_slot_does_not(prompt: str) -> None:
    hand = Hand(slots=1, run_ahead=64)
    entry = request(hand, 1, prompt, max_tokens=20, credit=2)
    hand.submit(entry)
    hand.run()
    assert not hand.events("finished")
    hand.assert_idle()
    freed = hand.now_ns
    kept = hand.loop.stats()["buffered_tokens"]
    assert kept > 0
    hand.submit(request(hand, 2, "y", max_tokens=2))
    hand.run()
    assert hand.finished(2)["reason"] == "length", "the slot is free"
    hand.now_ns += 50 * MS
    hand.grant(1, 2 + kept - 1)
    assert [e["seq"] for e in hand.events("finished")] == [2]
    hand.grant(1, 2 + kept)
    alone = undisturbed(entry)
    assert hand.output(1) == alone.output(1)
    finished = hand.finished(1)
    for name in ("reason", "stop", "usage"):
        assert finished[name] == alone.finished(1)[name]
    assert (finished["timing_ns"]["stopped"], finished["timing_ns"]["finished"]) == (freed, freed)
    assert hand.loop.stats()["buffered_tokens"] == 0


@pytest.mark.parametrize("state", ["running", "aborted", "ended"])
@pytest.mark.parametrize("how", ["cancelled", "deadline", "timeout"])
def test_other_ends_drop_what_is_kept(state: str, how: str) -> None:
    hand = Hand(run_ahead=500 if state != "aborted" else 4)
    end_ns = hand.now_ns + 10 * MS
    limits = {"deadline": {"deadline_ns": end_ns}, "timeout": {"execution_ns": 10 * MS}}.get(how, {})
    hand.submit(request(hand, 1, max_tokens=2000 if state == "running" else 50, credit=2, **limits))
    for _ in range(10 if state == "running" else 60):
        hand.turn()
    kept = hand.loop.stats()["buffered_tokens"]
    assert kept > 0
    assert hand.loop.stats()["preempted"] == (state == "aborted")
    ended_ns, hand.now_ns = hand.now_ns, end_ns
    if how == "cancelled":
        hand.cancel(1)
    else:
        hand.turn()
    finished = hand.finished(1)
    assert finished["reason"] == how
    timing = finished["timing_ns"]
    assert timing["stopped"] == timing["finished"] == (ended_ns if state == "ended" else end_ns)
    assert (finished["usage"]["generated"], finished["usage"]["emitted"]) == (hand.loop.stats()["generated_tokens"], 2)
    assert len(hand.output(1)[0]) == 2
    assert hand.loop.stats()["buffered_tokens"] == hand.loop.stats()["preempted"] == 0
    hand.assert_idle()


def test_what_a_stop_string_swallowed_needs_no_credit() -> None:
    hand = Hand(run_ahead=8)
    entry = request(hand, 1, "[[say= the of water of]]", stop=("of wat",), credit=2)
    hand.submit(entry)
    hand.run()
    assert hand.output(1)[1] == " the "
    assert hand.finished(1)["usage"] == undisturbed(entry).finished(1)["usage"]


def test_an_aborted_sequence_comes_back_to_its_place_in_the_queue() -> None:
    hand = Hand(slots=1, run_ahead=4)
    hand.submit(request(hand, 1, max_tokens=20, credit=2))
    hand.run()
    hand.submit(*(request(hand, n, "x", max_tokens=30) for n in (2, 3)))
    hand.grant(1, -1)
    hand.run()
    assert [e["seq"] for e in hand.events("finished")] == [2, 1, 3]


def test_those_who_ended_with_tokens_kept_count_against_the_queue() -> None:
    hand = Hand(slots=2, max_waiting=1, run_ahead=64)
    hand.submit(*(request(hand, n, "x", max_tokens=9, credit=1) for n in (1, 2)))
    hand.run()
    hand.submit(request(hand, 3, "x"))
    assert [e["seq"] for e in hand.events("refused")] == [3]
    hand.grant(1, -1)
    hand.submit(request(hand, 4, "x"))
    hand.run()
    assert hand.finished(4)["reason"] == "length"


@dataclass
class _Case:
    """What the test knows of one sequence."""

    entry: Prepared
    credit: int
    is_cancelled: bool = False


@dataclass
class _World:
    hand: Hand
    cases: dict[int, _Case] = field(default_factory=dict)

    def check(self) -> None:
        stats = self.hand.loop.stats()
        assert stats["active"] <= stats["slots"]
        assert stats["kv_reserved"] + stats["kv_cached"] <= stats["kv_cells"]
        for seq, case in self.cases.items():
            if case.credit >= 0:
                assert len(self.hand.output(seq)[0]) <= case.credit


_PROMPTS = [
    LONG,
    LONG + "water",
    "x",
    "[[end=5]] " + LONG,
    "[[say=one two 🌊 of of water]]",
    "[[say= the the the]]" + LONG,
]
_SUBMIT = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(_PROMPTS),
        "max_tokens": st.integers(1, 24),
        "stop": st.sampled_from([(), (), ("of w",), ("the the the th", "🌊"), (" water", " the of and")]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({300, 301, 302})]),
        "top_logprobs": st.sampled_from([None, None, 2]),
        "sampling": st.sampled_from([Sampling(), Sampling(temperature=1.0, seed=3)]),
        "ignore_eos": st.booleans(),
        "credit": st.integers(-1, 6),
    }
)
_ACT = st.one_of(
    st.tuples(st.just("submit"), _SUBMIT),
    st.tuples(st.just("grant"), st.tuples(st.integers(0, 99), st.integers(1, 6))),
    st.tuples(st.just("grant"), st.tuples(st.integers(0, 99), st.integers(1, 6))),
    st.tuples(st.just("turn"), st.integers(1, 8)),
    st.tuples(st.just("time"), st.sampled_from([1, 100, 250])),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
)


@settings(max_examples=150, deadline=None)
@given(
    acts=st.lists(_ACT, max_size=50),
    slots=st.integers(1, 3),
    cells=st.integers(80, 160),
    run_ahead=st.sampled_from([0, 0, 1, 2, 5, 64]),
    chunk=st.sampled_from([3, 64]),
)
def test_whatever_happens_the_output_is_that_of_an_undisturbed_run(
    acts: list[tuple[str, Any]], slots: int, cells: int, run_ahead: int, chunk: int
) -> None:
    hand = Hand(slots=slots, kv_cells=cells, max_waiting=6, run_ahead=run_ahead, prefill_chunk=chunk)
    world = _World(hand)
    for name, value in acts:
        _act(world, name, value)
        world.check()
    for seq, case in world.cases.items():
        case.credit = -1
        hand.grant(seq, -1)
    hand.run()
    refused = {e["seq"] for e in hand.events("refused")}
    ends = [e["seq"] for e in hand.events("finished")]
    assert sorted([*ends, *refused]) == sorted(world.cases)
    for seq in ends:
        _compare(hand, seq, world.cases[seq])
    stats = hand.loop.stats()
    hand.assert_idle()
    assert stats["preempted"] == stats["buffered_tokens"] == 0
    numbers = [(e["seq"], e["preemptions"]) for e in hand.events("resumed")]
    assert len(numbers) == len(set(numbers))
    assert set(numbers) <= {(e["seq"], e["preemptions"]) for e in hand.events("preempted")}


def _act(world: _World, name: str, value: Any) -> None:
    hand, cases = world.hand, world.cases
    if name == "submit":
        entry = request(hand, len(cases) + 1, **value)
        if len(entry.prompt) + entry.max_tokens <= hand.kv_cells:
            cases[entry.seq] = _Case(entry, entry.credit)
            hand.submit(entry)
    elif name == "turn":
        for _ in range(value):
            hand.turn()
    elif name == "time":
        hand.now_ns += value * MS
        hand.turn()
    elif cases and name == "cancel":
        case = cases[1 + value % len(cases)]
        case.is_cancelled = True
        hand.cancel(case.entry.seq)
    elif cases:
        case = cases[1 + value[0] % len(cases)]
        if case.credit >= 0:
            case.credit = min(case.credit + value[1], 99)
            hand.grant(case.entry.seq, case.credit)


def _compare(hand: Hand, seq: int, case: _Case) -> None:
    finished = hand.finished(seq)
    ids, text = hand.output(seq)
    assert finished["usage"]["emitted"] == len(ids)
    if finished["reason"] == "cancelled":
        assert case.is_cancelled
        # It ended early, so what might have become a stop string is shown.
        expected_ids, expected_text = undisturbed(replace(case.entry, stop=())).output(seq)
        assert ids == expected_ids[: len(ids)]
        assert expected_text.startswith(text.rstrip("�"))
        return
    alone = undisturbed(case.entry)
    assert (ids, text) == alone.output(seq)
    if case.entry.top_logprobs is not None:
        assert logprobs(hand, seq) == logprobs(alone, seq)
    for name in ("reason", "stop"):
        assert finished[name] == alone.finished(seq)[name]
    assert finished["usage"] == {**alone.finished(seq)["usage"], "cached": finished["usage"]["cached"]}
