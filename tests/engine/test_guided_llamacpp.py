"""Guided decoding on llama.cpp, turned by hand: a tiny model that would say anything else, and says what it must."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.harness import GREEDY, Hand, prepared
from engine.test_guides import END, tokenizer_of
from headrace.engine.config import EngineConfig
from headrace.engine.guide import STUCK, Guide, compile_guide
from headrace.engine.llamacpp import LlamaBackend
from headrace.engine.request import Guided, RefusalError, Sampling
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


def config_in(folder: Path) -> EngineConfig:
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_llama.model_gguf())
    return EngineConfig(
        engine="llamacpp", model_path=str(path), context_tokens=512, slots=SLOTS, kv_cells=CELLS, threads=1
    )


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(config_in(tmp_path_factory.mktemp("tiny")), lanes=2 * SLOTS)
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
    asked = {"max_tokens": 400, **changes}
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
    hand.submit(prepared(backend, 1, "ab", guide=backend.compile(BY_SCHEMA), max_tokens=400, sampling=SAMPLED))
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
    hand.submit(prepared(backend, 1, "the water", guide=backend.compile(BY_SCHEMA), max_tokens=400, credit=5))
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
    guided = Guided("grammar", "root ::= x\nx ::= x x | x x x | [a-zA-Z] |")
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


# A vocabulary by itself


def guide_of(guided: Guided, generated: list[int], *more: bytes) -> tuple[Guide, int]:
    """With all bytes, an end, and these; and how many tokens there are."""
    return Guide(compile_guide(guided, tokenizer_of(*more)), frozenset({END}), generated), END + 1 + len(more)


def row_of(size: int, **likely: float) -> Any:
    """Logits: those of named tokens, of all others less."""
    row = np.full(size, -10.0, np.float32)
    for name, value in likely.items():
        row[int(name[1:])] = value
    return row


def test_the_likeliest_that_may_follow_is_taken_and_the_end_only_where_it_is_complete() -> None:
    guide, size = guide_of(Guided("regex", "(ab)+"), [], b"x", b"ax", b"ab", b"abab")
    row = row_of(size, t256=9.0, t257=8.0, t258=7.0, t259=1.0, t260=2.0)
    assert [guide.likeliest(row) for _ in range(2)] == [260, END]
    guide, _ = guide_of(Guided("regex", "(ab)+"), [], b"x", b"ax", b"ab", b"abab")
    row[END] = -5.0
    assert [guide.likeliest(row) for _ in range(3)] == [260, 260, 260]


def test_a_draw_has_all_that_may_follow_and_nothing_else() -> None:
    guide, size = guide_of(Guided("regex", "(ab)+"), [], b"x", b"ax", b"ab", b"abab")
    seen: list[list[int]] = []

    def draw(allowed: Any) -> int:
        seen.append(list(allowed))
        return int(allowed[-1])

    row = np.zeros(size, np.float32)
    assert [guide.drawn(row, draw) for _ in range(2)] == [260, 260]
    assert guide.drawn(row, lambda allowed: END) == END
    assert seen == [[ord("a"), 259, 260], [ord("a"), END, 259, 260]]


def test_tokens_of_the_model_that_are_no_text_are_never_taken() -> None:
    guide, size = guide_of(Guided("regex", ".*"), [], b"")
    assert guide.likeliest(row_of(size, t257=9.0, t97=1.0)) == ord("a")


@pytest.mark.parametrize("count", [0, 1, 50, 3000])
def test_an_answer_is_led_through_its_guide_again_however_long_it_is(count: int) -> None:
    guided = Guided("json_schema", '{"type": "array", "items": {"enum": ["ab"]}}')
    again, size = guide_of(guided, list(b"[" + b'"ab", ' * count))
    row = row_of(size, t91=4.0, t34=3.0, t97=2.0, t98=1.0)
    assert [again.likeliest(row) for _ in range(3)] == list(b'"ab')


def test_a_long_answer_needs_no_more_for_its_last_token_than_for_its_first() -> None:
    guide, size = guide_of(Guided("json_object"), [])
    text = b'{"a":[' + b'{"b":[1,"x"]},' * 400 + b"1]}"
    assert [guide.likeliest(row_of(size, **{f"t{byte}": 1.0})) for byte in text] == list(text)
    assert guide.likeliest(row_of(size, t97=1.0)) == END


def test_one_that_grows_beyond_its_bounds_is_given_up_alone() -> None:
    grammar = Guided("grammar", "root ::= root root | root root root | [a-z]")
    guide, size = guide_of(grammar, [])
    row = row_of(size, t97=1.0)
    taken = [guide.likeliest(row) for _ in range(300)]
    assert taken[0] == ord("a")
    assert taken[-1] == STUCK
    said = taken[: taken.index(STUCK)]
    again, _ = guide_of(grammar, said)
    assert again.likeliest(row) == STUCK


def test_a_worker_without_the_library_says_so_and_guides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.engine.llamacpp.HAS_GUIDES", False)
    other = LlamaBackend(config_in(tmp_path), lanes=2 * SLOTS)
    assert other.facts.guided == frozenset()
    other.close()
    assert capsys.readouterr().err.count("llguidance is not installed") == 1


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_what_is_faulty_is_refused_before_anything_is_computed(backend: LlamaBackend, kind: str) -> None:
    with pytest.raises(RefusalError) as caught:
        backend.compile(Guided(kind, "{("))
    assert caught.value.field == f"guided.{kind}"
