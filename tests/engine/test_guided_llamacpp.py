"""Guided decoding on llama.cpp, turned by hand: a tiny model that would say anything else, and says what it must."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.harness import GREEDY, Hand, prepared
from headrace.engine.automaton import Automaton
from headrace.engine.config import EngineConfig
from headrace.engine.guide import STUCK, Guide, Vocabulary, compile_guide
from headrace.engine.llamacpp import LlamaBackend
from headrace.engine.request import Guided, RefusalError, Sampling
from headrace.engine.sampling import draw, make_chain
from support import tiny_llama

SLOTS, CELLS = 4, 1024
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["river", "sea"]},
        "deep": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}, "maxItems": 3},
        "salt": {"type": "boolean"},
    },
    "required": ["name", "kind", "deep", "salt"],
}
BY_SCHEMA = Guided("json_schema", json.dumps(SCHEMA))
SAMPLED = Sampling(temperature=2.0, seed=5)
PENALISED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.3, seed=9)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path.write_bytes(tiny_llama.model_gguf())
    config = EngineConfig(
        engine="llamacpp", model_path=str(path), context_tokens=512, slots=SLOTS, kv_cells=CELLS, threads=1
    )
    backend = LlamaBackend(config, lanes=2 * SLOTS)
    backend.warm_up()
    yield backend
    backend.close()


def close(hand: Hand) -> None:
    hand.assert_idle()
    hand.loop.close()
    for lane in range(2 * SLOTS):
        hand.backend.free(lane)


def ask(backend: LlamaBackend, guided: Guided, count: int = 1, **changes: Any) -> list[tuple[str, dict[str, Any]]]:
    """The text and the end of each of `count` answers at once."""
    hand = Hand(backend, slots=SLOTS, kv_cells=CELLS)
    guide = backend.compile(guided)
    asked = {"max_tokens": 200, **changes}
    for seq in range(1, count + 1):
        hand.submit(prepared(backend, seq, "the water", guide=guide, **asked))
    hand.run()
    close(hand)
    return [(hand.output(seq)[1], hand.finished(seq)) for seq in range(1, count + 1)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_an_answer_is_valid_by_its_schema(backend: LlamaBackend, sampling: Sampling) -> None:
    for text, end in ask(backend, BY_SCHEMA, count=SLOTS, sampling=sampling):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert (end["reason"], end["stop"]) == ("stop", {"kind": "eos", "value": tiny_llama.END})


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_matches_its_regex_and_is_one_of_its_choices(backend: LlamaBackend, sampling: Sampling) -> None:
    ((text, _),) = ask(backend, Guided("regex", "(ab|𐎠é){2,5}[0-9]{3}"), sampling=sampling)
    assert re.fullmatch("(ab|𐎠é){2,5}[0-9]{3}", text)
    ((text, _),) = ask(backend, Guided("choice", choices=("sea", "see", "river")), sampling=sampling)
    assert text in ("sea", "see", "river")


def test_an_object_is_json_as_far_as_it_goes(backend: LlamaBackend) -> None:
    ((text, end),) = ask(backend, Guided("json_object"), sampling=Sampling(temperature=1.5, seed=3), max_tokens=300)
    assert text.startswith("{")
    if end["reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_the_same_seed_says_the_same(backend: LlamaBackend) -> None:
    first, second = ask(backend, BY_SCHEMA, sampling=SAMPLED), ask(backend, BY_SCHEMA, sampling=SAMPLED)
    other = ask(backend, BY_SCHEMA, sampling=Sampling(temperature=2.0, seed=6))
    assert first[0][0] == second[0][0] != other[0][0]


def test_others_beside_it_say_what_they_would_have_said_alone(backend: LlamaBackend) -> None:
    hand = Hand(backend, slots=SLOTS, kv_cells=CELLS)
    hand.submit(prepared(backend, 1, "ab", guide=backend.compile(BY_SCHEMA), max_tokens=200, sampling=SAMPLED))
    hand.submit(prepared(backend, 2, "ab", max_tokens=10))
    hand.run()
    assert hand.output(2)[1] == "cdefghijkl"
    jsonschema.validate(json.loads(hand.output(1)[1]), SCHEMA)
    close(hand)


def test_logprobs_are_the_models_own(backend: LlamaBackend) -> None:
    """The model would say something else nearly always: then the token has little probability, never none."""
    hand = Hand(backend, slots=1, kv_cells=CELLS)
    guide = backend.compile(Guided("regex", "QQQ"))
    hand.submit(prepared(backend, 1, "ab", guide=guide, max_tokens=20, top_logprobs=2))
    hand.run()
    logprobs = [value for batch in hand.sink.batches for value in batch.logprobs or ()]
    assert len(logprobs) == 3
    assert all(-20 < value < -3 for value in logprobs)
    likeliest = [batch.top_ids[0] for batch in hand.sink.batches if batch.top_ids]
    assert likeliest[0] == tiny_llama.token_of(ord("c"))
    close(hand)


def test_a_preempted_answer_goes_on_where_it_was(backend: LlamaBackend) -> None:
    ((expected, _),) = ask(backend, BY_SCHEMA)
    hand = Hand(backend, slots=1, kv_cells=512)
    hand.submit(prepared(backend, 1, "the water", guide=backend.compile(BY_SCHEMA), max_tokens=200, credit=5))
    hand.run()
    for number, credit in ((1, 17), (2, -1)):
        hand.submit(prepared(backend, 10 + number, [7] * 300, max_tokens=6, ignore_eos=True))
        hand.now_ns += 200_000_000
        hand.run()
        assert len(hand.events("preempted")) == number
        hand.grant(1, credit)
        hand.run()
    assert hand.output(1)[1] == expected
    close(hand)


def test_an_answer_that_cannot_go_on_ends_with_the_reason_and_spoils_nobody(backend: LlamaBackend) -> None:
    twice = [{"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": n, "maxItems": 9} for n in (1, 2, 3)]
    guided = Guided("json_schema", json.dumps({"$defs": {"n": {"anyOf": twice}}, "$ref": "#/$defs/n"}))
    hand = Hand(backend, slots=SLOTS, kv_cells=CELLS)
    hand.submit(prepared(backend, 1, "ab", guide=backend.compile(guided), max_tokens=200))
    hand.submit(prepared(backend, 2, "ab", max_tokens=30, ignore_eos=True))
    hand.run()
    end = hand.finished(1)
    assert (end["reason"], end["error"]["reason"], end["error"]["field"]) == ("error", "INVALID_REQUEST", "guided")
    assert end["usage"]["generated"] < 100
    assert (hand.finished(2)["reason"], hand.finished(2)["usage"]["generated"]) == ("length", 30)
    assert hand.loop.stats()["generated_tokens"] == end["usage"]["generated"] + 30
    close(hand)


def test_penalties_count_what_a_guide_let_through(backend: LlamaBackend) -> None:
    guided = Guided("regex", "[WV]{9}")
    assert ask(backend, guided)[0][0] == "V" * 9
    assert ask(backend, guided, sampling=Sampling(temperature=0.0, frequency_penalty=2.0))[0][0] == "VWVWVWVWV"


def test_a_chain_that_is_made_again_uses_no_random_number_twice(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of a guided answer may have taken two."""
    made: list[int] = []
    monkeypatch.setattr(
        "headrace.engine.llamacpp.make_chain", lambda *given: made.append(given[-1]) or make_chain(*given)
    )
    ask(backend, Guided("regex", "aaa"), sampling=SAMPLED)
    assert made == [2]
    row = np.zeros(tiny_llama.VOCABULARY, np.float32)
    draws = []
    for generated, each in (([1, 2], 2), ([1, 2, 3, 4], 1)):
        chain = make_chain(SAMPLED, [5], generated, tiny_llama.VOCABULARY, 512, each)
        draws.append([draw(chain, row) for _ in range(8)])
    assert draws[0] == draws[1]


# A vocabulary by itself


def test_work_is_bounded_by_token_and_not_by_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.guide.WORK_MAX", 60)
    guide = guide_of([b"a", b""], compile_guide(Guided("regex", "a{200}")), frozenset({1}))
    row = np.array([1.0, 0.0], np.float32)
    assert [guide.likeliest(row) for _ in range(201)] == [0] * 200 + [1]


def guide_of(pieces: list[bytes], automaton: Automaton, ends: frozenset[int]) -> Guide:
    return Guide(automaton, Vocabulary(len(pieces), pieces.__getitem__, ends))


def test_a_vocabulary_that_lacks_a_byte_is_stuck() -> None:
    guide = guide_of([b"a", b"ab", b"", b""], compile_guide(Guided("regex", "abc")), frozenset({3}))
    row = np.array([1.0, 0.5, 9.0, 8.0], np.float32)
    assert [guide.likeliest(row) for _ in range(2)] == [0, STUCK]


def test_tokens_that_only_begin_well_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [b"ax%d" % number for number in range(500)] + [b"ab", b""]
    automaton = compile_guide(Guided("regex", "ab"))
    row = np.array([*np.linspace(9, 1, 500), 0.5, 0.0], np.float32)
    assert guide_of(pieces, automaton, frozenset({501})).likeliest(row) == 500
    monkeypatch.setattr("headrace.engine.guide.WORK_MAX", 400)
    assert guide_of(pieces, automaton, frozenset({501})).likeliest(row) == STUCK


def test_an_answer_that_is_led_through_its_guide_again_needs_no_more_than_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token of many bytes, each of which has to be worked out anew."""
    pieces = [b"a" * 90, b"b", b""]
    automaton = compile_guide(Guided("regex", "(a|aa|aaa){1,60}b"))
    monkeypatch.setattr("headrace.engine.guide.WORK_MAX", 3000)
    again = Guide(automaton, Vocabulary(3, pieces.__getitem__, frozenset({2})), [0])
    assert again.likeliest(np.array([0.0, 1.0, 2.0], np.float32)) == 1


def test_a_guide_that_is_lost_on_the_way_stops_its_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [b"a" * 90, b"b", b""]
    automaton = compile_guide(Guided("regex", "(a|aa|aaa){1,60}b|b"))
    monkeypatch.setattr("headrace.engine.automaton.CONFIGURATIONS_MAX", 40)
    again = Guide(automaton, Vocabulary(3, pieces.__getitem__, frozenset({2})), [0])
    assert again.likeliest(np.array([0.0, 1.0, 2.0], np.float32)) == STUCK


def test_a_token_may_be_drawn_that_begins_well_and_a_second_draw_has_only_those_that_fit() -> None:
    guide = guide_of([b"x", b"ax", b"ab", b"abab", b""], compile_guide(Guided("regex", "(ab)+")), frozenset({4}))
    row = np.array([3.0, 2.0, 1.0, 0.5, 9.0], np.float32)
    seen: list[list[int]] = []

    def redraw(allowed: Any) -> int:
        seen.append(list(allowed))
        return int(allowed[-1])

    assert guide.drawn(0, row, redraw) == 3
    assert guide.drawn(4, row, redraw) == 4  # it may end here
    assert guide.drawn(1, row, redraw) == 4
    assert seen == [[2, 3], [2, 3, 4]]


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_what_is_faulty_is_refused_before_anything_is_computed(backend: LlamaBackend, kind: str) -> None:
    with pytest.raises(RefusalError) as caught:
        backend.compile(Guided(kind, "{("))
    assert caught.value.field == f"guided.{kind}"
