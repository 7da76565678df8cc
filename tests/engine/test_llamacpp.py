"""The llama.cpp engine with the real model, in this process, turned by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.harness import GREEDY, Hand, prepared
from headrace.cli.weights import default_model
from headrace.engine.config import EngineConfig
from headrace.engine.continuation import replay
from headrace.engine.llamacpp import LlamaBackend
from headrace.engine.request import Continuation, Sampling

SLOTS = 8
CELLS = 2048
COUNTING = "1\n2\n3\n4\n5\n6\n"
# The likeliest token leads by so much that rounding, which depends on the batch, cannot decide: docs/decisions.md.
DECISIVE = [COUNTING, "one, one, one, one, one, one, one,", "item 1, item 2, item 3, item 4, item 5,"]
OPEN = "Once upon a time there was a"


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    config = EngineConfig(
        engine="llamacpp",
        revision="models/test/revisions/000000000000",
        incarnation="test",
        model_path=str(default_model(lambda text: None)),
        context_tokens=1024,
        slots=SLOTS,
        kv_cells=CELLS,
        max_waiting=32,
        threads=2,
        prefill_chunk=64,
    )
    backend = LlamaBackend(config, lanes=2 * SLOTS)
    backend.warm_up()
    yield backend
    backend.close()


@pytest.fixture
def hand(backend: LlamaBackend) -> Iterator[Hand]:
    hand = Hand(backend, slots=SLOTS, kv_cells=CELLS, max_waiting=32)
    yield hand
    hand.assert_idle()
    hand.loop.close()
    clean(backend)


@pytest.fixture
def clean_backend(backend: LlamaBackend) -> Iterator[LlamaBackend]:
    """For tests that make their own loops."""
    yield backend
    clean(backend)


def clean(backend: LlamaBackend) -> None:
    for lane in range(2 * SLOTS):
        backend.free(lane)


def ask(hand: Hand, seq: int, prompt: str, **changes: Any) -> tuple[list[int], str]:
    hand.submit(prepared(hand.backend, seq, prompt, **changes))
    hand.run()
    return hand.output(seq)


def test_greedy_counts_on_and_text_agrees_with_ids(hand: Hand) -> None:
    ids, text = ask(hand, 1, COUNTING, max_tokens=12)
    assert text.startswith("7\n8\n9\n")
    assert text == b"".join(hand.backend.piece(i) for i in ids).decode()


@pytest.mark.parametrize("prompt", DECISIVE)
@pytest.mark.parametrize("is_cached", [True, False], ids=["from the prefix cache", "computed anew"])
def test_an_answer_that_was_preempted_twice_equals_the_undisturbed_one(
    clean_backend: LlamaBackend, prompt: str, is_cached: bool
) -> None:
    """Each time another sequence takes the only slot; where it wants all cells, nothing of the first is left."""
    cells = 64
    backend = clean_backend
    undisturbed = Hand(backend, slots=1, kv_cells=CELLS)
    expected = ask(undisturbed, 1, prompt, max_tokens=24, top_logprobs=1)
    undisturbed.loop.close()
    clean(backend)
    hand = Hand(backend, slots=1, kv_cells=cells)
    hand.submit(prepared(backend, 1, prompt, max_tokens=24, top_logprobs=1, credit=5))
    hand.run()
    for number, credit in ((1, 13), (2, -1)):
        other = prepared(backend, 10 + number, [7] * 20, max_tokens=6, ignore_eos=True)
        hand.submit(other if is_cached else replace(other, prompt=[7] * (cells - 6)))
        hand.now_ns += 200_000_000
        hand.run()
        assert len(hand.events("preempted")) == number
        assert hand.finished(10 + number)["reason"] == "length"
        hand.grant(1, credit)
        hand.run()
    assert hand.output(1) == expected
    assert hand.finished(1)["usage"]["generated"] == 24
    resumed = [event["cached_tokens"] for event in hand.events("resumed")]
    length = len(backend.tokenize(prompt))
    assert resumed == ([length + 5 - 1, length + 13 - 1] if is_cached else [0, 0])
    hand.assert_idle()
    hand.loop.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stop": ("\n12\n1",)},
        # On a repetition that the penalty breaks after a while: without the history it would not.
        {"sampling": Sampling(temperature=0.0, frequency_penalty=0.3), "prompt": DECISIVE[1]},
        {"sampling": Sampling(temperature=0.0, repetition_penalty=1.05), "prompt": DECISIVE[1]},
    ],
    ids=["plain", "a stop string", "a frequency penalty", "a repetition penalty"],
)
def test_an_answer_of_a_lost_engine_is_continued_to_the_same_answer(hand: Hand, changes: dict[str, Any]) -> None:
    changes = {"max_tokens": 20, **changes}
    prompt = changes.pop("prompt", COUNTING)
    ids, text = ask(hand, 1, prompt, **changes)
    end = hand.finished(1)
    for seq, cut in enumerate((1, 2, 5, 9, len(ids) - 1, len(ids)), 2):
        delivered = b"".join(hand.backend.piece(i) for i in ids[:cut])
        size = min(len(delivered), len(text.encode()))
        known = replay(
            Continuation(tuple(ids[:cut]), size),
            hand.backend.piece,
            stop_strings=changes.get("stop", ()),
            stop_token_ids=(),
            end_tokens=hand.backend.facts.end_tokens,
        )
        more_ids, more_text = ask(hand, seq, prompt, known=known, **changes)
        assert (ids[:cut] + more_ids, delivered[:size].decode() + more_text) == (ids, text), cut
        assert (hand.finished(seq)["reason"], hand.finished(seq)["stop"]) == (end["reason"], end["stop"])


def test_kv_of_another_salt_is_not_reused(hand: Hand) -> None:
    prompt = "The following list is complete and in order. " + COUNTING
    first = ask(hand, 1, prompt, cache_salt="tenants/a")
    assert ask(hand, 2, prompt, cache_salt="tenants/b") == first
    assert ask(hand, 3, prompt, cache_salt="tenants/a") == first
    assert [hand.finished(seq)["usage"]["cached"] > 0 for seq in (1, 2, 3)] == [False, False, True]


def test_an_engine_that_runs_ahead_says_the_same(clean_backend: LlamaBackend) -> None:
    backend = clean_backend
    undisturbed = Hand(backend, slots=1, kv_cells=CELLS)
    expected = ask(undisturbed, 1, COUNTING, max_tokens=24)
    undisturbed.loop.close()
    clean(backend)
    hand = Hand(backend, slots=1, kv_cells=CELLS, run_ahead=4)
    hand.submit(prepared(backend, 1, COUNTING, max_tokens=24, credit=1))
    for credit in range(1, 25):
        hand.grant(1, credit)
        hand.run()
        assert len(hand.output(1)[0]) == credit
    assert hand.output(1) == expected
    assert len(hand.events("resumed")) > 2
    hand.loop.close()


def test_top_k_of_one_is_greedy(hand: Hand) -> None:
    greedy = ask(hand, 1, OPEN)
    assert ask(hand, 2, OPEN, sampling=Sampling(temperature=0.9, top_k=1, seed=3)) == greedy


def test_a_tiny_top_p_is_greedy(hand: Hand) -> None:
    greedy = ask(hand, 1, OPEN)
    assert ask(hand, 2, OPEN, sampling=Sampling(temperature=0.9, top_p=1e-6, seed=3)) == greedy


def test_min_p_of_one_is_greedy(hand: Hand) -> None:
    greedy = ask(hand, 1, COUNTING)
    assert ask(hand, 2, COUNTING, sampling=Sampling(temperature=0.9, min_p=1.0, seed=3)) == greedy


def test_a_seed_fixes_the_draw_and_another_one_changes_it(hand: Hand) -> None:
    hot = {"max_tokens": 24}
    one = ask(hand, 1, OPEN, sampling=Sampling(temperature=1.2, seed=11), **hot)
    again = ask(hand, 2, OPEN, sampling=Sampling(temperature=1.2, seed=11), **hot)
    other = ask(hand, 3, OPEN, sampling=Sampling(temperature=1.2, seed=12), **hot)
    assert one == again
    assert one != other


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 5.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    ids=lambda p: next(iter(p)),
)
def test_penalties_break_a_repetition(hand: Hand, penalty: dict[str, float]) -> None:
    prompt = "ha ha ha ha ha ha ha ha"
    plain, _ = ask(hand, 1, prompt)
    assert len(set(plain)) == 1
    penalised, _ = ask(hand, 2, prompt, sampling=Sampling(temperature=0.0, **penalty), max_tokens=24)
    assert len(set(penalised)) > 1


def test_logprobs_are_of_the_model_itself(hand: Hand) -> None:
    hand.submit(prepared(hand.backend, 1, COUNTING, top_logprobs=5, max_tokens=6))
    hand.run()
    batches = [batch for batch in hand.sink.batches if batch.logprobs is not None]
    logprobs = [value for batch in batches for value in batch.logprobs or []]
    counts = [count for batch in batches for count in batch.top_counts or []]
    top_ids = [token for batch in batches for token in batch.top_ids or []]
    top = [value for batch in batches for value in batch.top_logprobs or []]
    ids, _ = hand.output(1)
    assert len(logprobs) == len(ids) == 6
    assert counts == [5] * 6
    for index, (token, value) in enumerate(zip(ids, logprobs, strict=True)):
        likeliest = top[5 * index : 5 * index + 5]
        assert value <= 0
        assert likeliest == sorted(likeliest, reverse=True)
        assert top_ids[5 * index] == token, "greedy takes the likeliest"
        assert math.isclose(likeliest[0], value, abs_tol=1e-4)
        assert sum(math.exp(v) for v in likeliest) <= 1 + 1e-6


def test_a_stop_string_over_several_tokens_never_shows(hand: Hand) -> None:
    _, text = ask(hand, 1, COUNTING, stop=("\n9\n1",), max_tokens=30)
    assert text == "7\n8"
    assert hand.finished(1)["stop"] == {"kind": "string", "value": "\n9\n1"}


def test_a_shared_beginning_is_reused_from_what_runs_and_from_what_has_ended(hand: Hand) -> None:
    prompt = "The following list is complete and in order. " + COUNTING
    first = ask(hand, 1, prompt)
    second = ask(hand, 2, prompt)
    hand.submit(prepared(hand.backend, 3, prompt), prepared(hand.backend, 4, prompt))
    hand.run()
    assert second == hand.output(3) == hand.output(4) == first
    for seq in (2, 3, 4):
        usage = hand.finished(seq)["usage"]
        assert 16 <= usage["cached"] < usage["prompt"]


def test_a_long_prompt_in_chunks_equals_the_same_prompt_beside_others(hand: Hand) -> None:
    prompt = "item 1, item 2, item 3, item 4, item 5, " * 8
    alone = ask(hand, 1, prompt)
    hand.submit(*(prepared(hand.backend, n, f"{n} {prompt}") for n in range(2, 6)))
    hand.run()
    assert len(hand.backend.tokenize(prompt)) > 64, "more than one chunk"
    for seq in range(2, 6):
        assert hand.output(seq) == alone


def test_a_cancel_frees_cells_at_once(hand: Hand) -> None:
    hand.submit(*(prepared(hand.backend, n, OPEN, max_tokens=200) for n in range(1, 5)))
    for _ in range(4):
        hand.turn()
    assert hand.loop.stats()["active"] == 4
    hand.cancel(1, 2, 3, 4)
    hand.assert_idle()
    assert {hand.finished(n)["reason"] for n in range(1, 5)} == {"cancelled"}


def test_many_more_sequences_than_slots_all_end_and_balance(hand: Hand) -> None:
    hand.submit(*(prepared(hand.backend, n, f"{n} {OPEN}", max_tokens=6) for n in range(1, 25)))
    hand.run()
    assert [hand.finished(n)["usage"]["generated"] for n in range(1, 25)] == [6] * 24
    stats = hand.loop.stats()
    assert stats["kv_cached"] <= CELLS


def test_special_text_survives(hand: Hand) -> None:
    text = "Grüße, κόσμε, 世界, 🌊!"
    ids = hand.backend.tokenize(text)
    assert b"".join(hand.backend.piece(i) for i in ids).decode() == text


def test_ignoring_the_end_goes_on_past_it(hand: Hand) -> None:
    ids, _ = ask(hand, 1, COUNTING, ignore_eos=True, max_tokens=40, sampling=GREEDY)
    assert len(ids) == 40
