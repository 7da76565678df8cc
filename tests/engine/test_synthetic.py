"""The synthetic engine: deterministic, reversible, and on time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.backend import Prefill
from headrace.engine.request import Sampling
from headrace.engine.synthetic import END_TOKEN, SyntheticBackend


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def generate(prompt: str, count: int, sampling: Sampling | None = None) -> list[int]:
    backend = SyntheticBackend()
    tokens = backend.tokenize(prompt)
    backend.begin(0, tokens, [], sampling or Sampling(), None)
    drawn = backend.step([], [Prefill(0, 0, tokens, True)]).tokens
    while len(drawn) < count:
        drawn += backend.step([0], []).tokens
    return drawn


@given(st.text())
def test_tokens_are_the_text_again(text: str) -> None:
    backend = SyntheticBackend()
    assert b"".join(backend.piece(token) for token in backend.tokenize(text)).decode() == text


def test_tokens_depend_on_prompt_seed_and_position_only() -> None:
    assert generate("a", 600) == generate("a", 600)
    assert generate("a", 600) != generate("b", 600)
    hot = Sampling(temperature=1.0, seed=7)
    assert generate("a", 99, hot) == generate("a", 99, hot)
    assert generate("a", 99, hot) != generate("a", 99, Sampling(temperature=1.0, seed=8))
    assert generate("a", 99, Sampling(seed=7)) == generate("a", 99, Sampling(seed=8)), "greedy has no seed"


@settings(deadline=None)
@given(st.text(max_size=20))
def test_a_long_answer_is_valid_text_of_mostly_whole_pieces(prompt: str) -> None:
    backend = SyntheticBackend()
    drawn = [token for token in generate(prompt, 1024) if token != END_TOKEN]
    pieces = [backend.piece(token) for token in drawn]
    b"".join(pieces).decode()

    def is_whole(piece: bytes) -> bool:
        try:
            piece.decode()
        except UnicodeDecodeError:
            return False
        return True

    cut = sum(not is_whole(piece) for piece in pieces)
    assert 0 < cut < len(pieces) / 10


@pytest.mark.parametrize("cut", [1, 7, 255, 256, 257, 300])
@pytest.mark.parametrize("prompt", ["a", "[[end=290]]", "[[say=one two three]]"])
def test_an_answer_goes_on_after_any_token(prompt: str, cut: int) -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    whole = generate(prompt, 600, sampling)
    backend = SyntheticBackend()
    tokens = backend.tokenize(prompt)
    backend.begin(3, tokens, whole[:cut], sampling, None)
    drawn = backend.step([], [Prefill(3, 0, [*tokens, *whole[:cut]], True)]).tokens
    while len(drawn) < 600 - cut:
        drawn += backend.step([3], []).tokens
    assert drawn == whole[cut:]


@pytest.mark.parametrize("end", [0, 1, 255, 256, 300])
def test_a_prompt_can_set_the_end(end: int) -> None:
    drawn = generate(f"[[end={end}]]", end + 1)
    assert drawn.index(END_TOKEN) == end


def test_a_prompt_can_set_the_words() -> None:
    backend = SyntheticBackend()
    expected = backend.tokenize("Ω 🌊!")
    assert generate("please [[say=Ω 🌊!]]", len(expected) + 1) == [*expected, END_TOKEN]


def test_decoding_keeps_an_absolute_schedule() -> None:
    clock = Clock()
    backend = SyntheticBackend(decode_rate=50, clock=clock, sleep=clock.sleep)
    for lane in range(3):
        backend.begin(lane, [1], [], Sampling(), None)
    begin = clock.now_s
    for _ in range(100):
        backend.step([0, 1, 2], [])
        clock.now_s += 0.004  # what the loop needs itself must not be added to the period
    assert clock.now_s - begin == pytest.approx(100 / 50 + 0.004)


def test_a_long_rest_is_not_made_up_for() -> None:
    clock = Clock()
    backend = SyntheticBackend(decode_rate=50, clock=clock, sleep=clock.sleep)
    backend.begin(0, [1], [], Sampling(), None)
    backend.step([0], [])
    clock.now_s += 60
    backend.step([0], [])
    assert clock.slept == pytest.approx([0.02, 0.02])


def test_prefill_has_its_own_rate_and_the_slower_one_counts() -> None:
    clock = Clock()
    backend = SyntheticBackend(prefill_rate=1000, decode_rate=50, clock=clock, sleep=clock.sleep)
    backend.begin(0, [1], [], Sampling(), None)
    backend.begin(1, [1] * 100, [], Sampling(), None)
    backend.step([], [Prefill(1, 0, [1] * 100, True)])
    backend.step([0], [Prefill(1, 0, [1] * 10, False)])
    assert clock.slept == pytest.approx([0.1, 0.02])


def test_logprobs_are_sorted_and_hold_the_token() -> None:
    backend = SyntheticBackend()
    backend.begin(0, [1], [], Sampling(), 3)
    sampled = backend.step([0], [])
    detail = sampled.details[0]
    assert [value for _, value in detail.top] == sorted((value for _, value in detail.top), reverse=True)
    assert detail.top[0] == (sampled.tokens[0], detail.logprob)
    assert len({token for token, _ in detail.top}) == 3
