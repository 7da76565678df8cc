"""An answer that another engine began: wherever it was cut, both parts together are the uninterrupted one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.harness import Hand, prepared
from headrace.engine.continuation import Known, replay
from headrace.engine.request import Continuation, RefusalError
from headrace.engine.synthetic import END_TOKEN, SyntheticBackend

BACKEND = SyntheticBackend()


@dataclass(frozen=True)
class Answer:
    """What one engine made of a request: the parts as they were told, and the end."""

    parts: list[tuple[list[int], bytes]]
    finished: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        return [token for ids, _ in self.parts for token in ids]

    @property
    def text(self) -> bytes:
        return b"".join(text for _, text in self.parts)

    @property
    def end(self) -> tuple[str, Any]:
        return self.finished["reason"], self.finished["stop"]


def run(prompt: str, hand: Hand | None = None, **changes: Any) -> Answer:
    hand = hand or Hand()
    hand.submit(prepared(hand.backend, 1, prompt, **changes))
    hand.run()
    parts = []
    for batch in hand.sink.batches:
        id_at = text_at = 0
        for count, length in zip(batch.token_counts, batch.text_lengths, strict=True):
            part = batch.text[text_at : text_at + length]
            part.decode("utf-8")  # each part is whole characters
            parts.append((batch.token_ids[id_at : id_at + count], part))
            id_at, text_at = id_at + count, text_at + length
    hand.assert_idle()
    return Answer(parts, hand.finished(1))


def known_of(ids: list[int], text_bytes: int, **changes: Any) -> Known:
    return replay(
        Continuation(tuple(ids), text_bytes),
        BACKEND.piece,
        stop_strings=changes.get("stop", ()),
        stop_token_ids=changes.get("stop_token_ids", ()),
        end_tokens=() if changes.get("ignore_eos") else {END_TOKEN},
    )


def go_on(prompt: str, ids: list[int], text_bytes: int, hand: Hand | None = None, **changes: Any) -> Answer:
    return run(prompt, hand, known=known_of(ids, text_bytes, **changes), **changes)


def boundaries(text: bytes) -> list[int]:
    """Where text can end without cutting a character."""
    return [at for at in range(len(text) + 1) if at == len(text) or text[at] & 0xC0 != 0x80]


def assert_same_from_everywhere(prompt: str, run_ahead: int = 0, **changes: Any) -> None:
    """Cut behind every token that was handed out, with each amount of its text delivered that there can be."""
    whole = run(prompt, Hand(run_ahead=run_ahead), **changes)
    for known in range(1, len(whole.ids) + 1):
        ids = whole.ids[:known]
        joined = b"".join(BACKEND.piece(token) for token in ids)
        for delivered in boundaries(whole.text):
            if delivered > len(joined.decode(errors="ignore").encode()):
                break
            part = go_on(prompt, ids, delivered, Hand(run_ahead=run_ahead), **changes)
            where = f"{known} tokens known, {delivered} bytes delivered"
            assert whole.text[:delivered] + part.text == whole.text, where
            assert ids + part.ids == whole.ids, where
            assert part.end == whole.end, where
            usage, all_of_it = part.finished["usage"], whole.finished["usage"]
            assert usage["generated"] + known == all_of_it["generated"], where
            assert usage["emitted"] + known == all_of_it["emitted"], where
            assert (usage["prompt"], usage["emitted"]) == (all_of_it["prompt"], len(part.ids)), where


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain words and emoji": ("where does it flow", {"max_tokens": 40}),
    "several bytes a character": ("[[say=Wässer über вода 水 🌊!]]", {"max_tokens": 60}),
    "a stop string in one token": ("[[say=one the two of three]]", {"max_tokens": 30, "stop": (" of",)}),
    "a stop string over tokens": ("[[say=xENxENDING on]]", {"max_tokens": 30, "stop": ("ENDING",)}),
    "a stop string that nearly comes": ("[[say=aENaENDaENDIN]]", {"max_tokens": 30, "stop": ("ENDING",)}),
    "a stop string of characters cut in tokens": ("[[say=вода водка]]", {"max_tokens": 60, "stop": ("водк",)}),
    "words that nearly are a stop string": (
        "[[say= of the and of the of the of the x]]",
        {"max_tokens": 30, "stop": (" of the x",)},
    ),
    "the first of two": ("[[say=abcabd]]", {"max_tokens": 30, "stop": ("abd", "bd")}),
    "half a character at the end": ("[[say=aaa水]]", {"max_tokens": 5}),
    "a token that stops": ("[[say=abc]]", {"max_tokens": 30, "stop_token_ids": frozenset({ord("c")})}),
    "past the end token": ("[[end=3]]", {"max_tokens": 9, "ignore_eos": True}),
}


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
@pytest.mark.parametrize("run_ahead", [0, 4], ids=["pauses", "runs ahead"])
def test_every_cut_of_an_answer_is_continued_to_the_same_answer(case: str, run_ahead: int) -> None:
    prompt, changes = CASES[case]
    assert_same_from_everywhere(prompt, run_ahead, **changes)


@settings(max_examples=60, deadline=None)
@given(
    said=st.text(st.sampled_from("abc eü水🌊"), min_size=1, max_size=12),
    stop=st.lists(st.text(st.sampled_from("abc eü水🌊"), min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 30),
)
def test_whatever_is_said_and_stops_it(said: str, stop: list[str], max_tokens: int) -> None:
    assert_same_from_everywhere(f"[[say={said}]]", stop=tuple(stop), max_tokens=max_tokens)


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_an_engine_that_runs_ahead_hands_a_continued_answer_out_as_credit_comes(case: str) -> None:
    prompt, changes = CASES[case]
    whole = run(prompt, **changes)
    for known in range(1, len(whole.ids) + 1):
        ids = whole.ids[:known]
        ready = b"".join(BACKEND.piece(token) for token in ids).decode(errors="ignore").encode()
        for delivered in {0, min(len(ready), len(whole.text)), boundaries(whole.text[: len(ready)])[-1]}:
            hand = Hand(run_ahead=3)
            continued = known_of(ids, delivered, **changes)
            hand.submit(prepared(BACKEND, 1, prompt, known=continued, **changes, credit=known))
            for credit in range(known, changes["max_tokens"] + 1):
                hand.grant(1, credit)
                hand.run()
                more, text = hand.output(1)
                assert known + len(more) <= credit
                joined = b"".join(BACKEND.piece(token) for token in ids + more).decode(errors="replace").encode()
                assert not more or text.encode() == joined[delivered : len(whole.text)], "ids and text agree"
            more, text = hand.output(1)
            assert (ids + more, whole.text[:delivered].decode() + text) == (whole.ids, whole.text.decode())
            assert (hand.finished(1)["reason"], hand.finished(1)["stop"]) == whole.end


def test_parts_as_they_were_told_are_what_a_caller_knows() -> None:
    prompt, changes = CASES["a stop string over tokens"]
    whole = run(prompt, **changes)
    for count in range(1, len(whole.parts) + 1):
        before = Answer(whole.parts[:count], whole.finished)
        after = go_on(prompt, before.ids, len(before.text), **changes)
        assert (before.ids + after.ids, before.text + after.text) == (whole.ids, whole.text)


@pytest.mark.parametrize(
    ("ids", "changes", "end"),
    [
        (list(b"abc"), {"max_tokens": 3}, ("length", None)),
        (list(b"abc"), {"max_tokens": 9, "stop": ("bc",)}, ("stop", {"kind": "string", "value": "bc"})),
        ([*list(b"ab"), END_TOKEN], {"max_tokens": 9}, ("stop", {"kind": "eos", "value": END_TOKEN})),
        (list(b"abc"), {"max_tokens": 9, "stop_token_ids": frozenset({99})}, ("stop", {"kind": "token", "value": 99})),
        (list(b"abc"), {"max_tokens": 3, "stop": ("c",)}, ("stop", {"kind": "string", "value": "c"})),
    ],
    ids=["length", "a string", "the end token", "a token", "a stop comes before the length"],
)
@pytest.mark.parametrize("run_ahead", [0, 4], ids=["pauses", "runs ahead"])
def test_a_complete_answer_is_finished_at_once_with_its_reason_and_needs_no_credit(
    ids: list[int], changes: dict[str, Any], end: tuple[str, Any], run_ahead: int
) -> None:
    hand = Hand(slots=1, max_waiting=0, run_ahead=run_ahead)
    hand.submit(prepared(hand.backend, 9, "x", max_tokens=500))  # the one slot is taken: nothing is waited for
    steps = hand.loop.stats()["steps"]
    hand.submit(prepared(hand.backend, 1, "abc", known=known_of(ids, 0, **changes), **changes, credit=0))
    finished = hand.finished(1)
    assert (finished["reason"], finished["stop"]) == end
    assert (finished["usage"]["generated"], finished["usage"]["emitted"], finished["usage"]["prompt"]) == (0, 0, 3)
    assert hand.loop.stats()["steps"] == steps + 1, "only the other one's"
    kinds = [e["type"] for batch in hand.sink.batches for e in batch.events if e.get("seq") == 1]
    assert kinds == ["admitted", "finished"]
    told = {"string": b"a" if changes.get("stop") == ("bc",) else b"ab", "eos": b"ab", "token": b"ab"}
    assert hand.output(1) == ([], (told[end[1]["kind"]] if end[1] else b"abc").decode())


def test_known_tokens_use_up_credit_and_wait_for_more() -> None:
    whole = run("where", max_tokens=20)
    hand = Hand()
    known = known_of(whole.ids[:6], len(b"".join(BACKEND.piece(i) for i in whole.ids[:6])))
    hand.submit(prepared(hand.backend, 1, "where", max_tokens=20, known=known, credit=6))
    hand.run()
    assert (hand.output(1)[0], hand.loop.stats()["paused"]) == ([], 1)
    hand.grant(1, 9)
    hand.run()
    assert (len(hand.output(1)[0]), hand.loop.stats()["paused"]) == (3, 1)
    hand.grant(1, -1)
    hand.run()
    assert whole.ids[:6] + hand.output(1)[0] == whole.ids


def test_a_continued_sequence_is_preempted_as_any_other() -> None:
    long = "the of and to in is that it was for on are as with they be at one have this from "
    whole = run(long, max_tokens=20)
    hand = Hand(slots=1)
    text = b"".join(BACKEND.piece(i) for i in whole.ids[:6])
    known = known_of(whole.ids[:6], len(text))
    hand.submit(prepared(hand.backend, 1, long, max_tokens=20, known=known, credit=9))
    hand.run()
    hand.submit(prepared(hand.backend, 2, "x", max_tokens=5))
    hand.now_ns += 200_000_000
    hand.run()
    hand.grant(1, -1)
    hand.run()
    assert hand.events("resumed")
    assert whole.ids[:6] + hand.output(1)[0] == whole.ids


def test_other_draws_that_complete_a_stop_string_end_the_answer_though_its_beginning_is_out() -> None:
    """The lost engine said "aE" and then no "ND": "E" was delivered. The new one says "ND"."""
    part = go_on("[[say=aEND]]", list(b"aE"), 2, max_tokens=9, stop=("END",))
    assert (part.ids, part.text, part.end) == ([], b"", ("stop", {"kind": "string", "value": "END"}))
    assert (part.finished["usage"]["generated"], part.finished["usage"]["emitted"]) == (2, 0)


def test_known_tokens_are_prefilled_as_the_answer_and_counted_apart() -> None:
    hand = Hand()
    prompt = "the of and to in is that it was for on are as with they be at one"
    whole = run(prompt, max_tokens=30)
    go_on(prompt, whole.ids[:20], 0, hand, max_tokens=30)
    stats = hand.loop.stats()
    size = len(hand.backend.tokenize(prompt))
    assert (stats["prompt_tokens"], stats["reprefilled_tokens"], stats["generated_tokens"]) == (size, 20, 10)
    again = go_on(prompt, whole.ids[:20], 0, hand_with(hand), max_tokens=30)
    assert again.finished["usage"]["cached"] == size, "at most the prompt's own"


def hand_with(used: Hand) -> Hand:
    """The same engine, for another sequence 1."""
    used.sink.batches.clear()
    return used


def test_logprobs_of_known_tokens_are_not_told_again() -> None:
    whole = run("where", max_tokens=10, top_logprobs=2)
    hand = Hand()
    text = len(b"".join(BACKEND.piece(i) for i in whole.ids[:4]))
    part = go_on("where", whole.ids[:4], text, hand, max_tokens=10, top_logprobs=2)
    logprobs = [value for batch in hand.sink.batches for value in batch.logprobs or []]
    assert len(logprobs) == len(part.ids) == 6


@pytest.mark.parametrize(
    ("ids", "text_bytes", "words"),
    [(list(b"abc"), 4, "3 bytes"), (list("a水".encode()), 2, "inside"), (list("a水".encode())[:3], 2, "1 bytes")],
    ids=["more than there is", "inside a character", "of half a character"],
)
def test_text_that_cannot_have_been_delivered_is_refused(ids: list[int], text_bytes: int, words: str) -> None:
    with pytest.raises(RefusalError, match=words) as refused:
        go_on("x", ids, text_bytes)
    assert refused.value.field == "continuation.text_bytes"


@pytest.mark.parametrize(
    "case", ["a stop string that nearly comes", "several bytes a character", "half a character at the end"]
)
@pytest.mark.parametrize("run_ahead", [0, 4], ids=["pauses", "runs ahead"])
def test_what_a_drain_cuts_off_is_continued_as_if_nothing_had_been_held_back(case: str, run_ahead: int) -> None:
    prompt, changes = CASES[case]
    whole = run(prompt, **changes)
    for steps in range(1, whole.finished["usage"]["generated"]):
        hand = Hand(run_ahead=run_ahead)
        hand.submit(prepared(hand.backend, 1, prompt, **changes, credit=max(1, steps - 2)))
        for _ in range(3 * steps):
            hand.turn()
        if not hand.events("finished"):
            hand.cancel(1, reason="drained")
            assert hand.finished(1)["reason"] == "cancelled"
        ids, text = hand.output(1)
        assert whole.text.startswith(text.encode()), "no beginning of a stop string, and no half character"
        assert hand.finished(1)["usage"]["emitted"] == len(ids) <= max(1, steps - 2)
        if ids:
            after = go_on(prompt, ids, len(text.encode()), **changes)
            assert (ids + after.ids, text.encode() + after.text) == (whole.ids, whole.text)
