"""A sampler chain that is made for half an answer draws what the one that drew that half itself would have drawn."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as ll
import numpy as np
import pytest

from headrace.engine.request import Sampling
from headrace.engine.sampling import make_chain

VOCABULARY = 12
TOKENS = 40
PROMPT = [1, 2, 2, 3]


def draw(chain: Any, logits: Sequence[float]) -> int:
    candidates = (ll.llama_token_data * VOCABULARY)()
    for token, logit in enumerate(logits):
        candidates[token] = ll.llama_token_data(token, logit, 0.0)
    array = ll.llama_token_data_array()
    array.data, array.size, array.selected, array.sorted = candidates, VOCABULARY, -1, False
    ll.llama_sampler_apply(chain, ctypes.byref(array))
    token = int(array.data[array.selected].id)
    ll.llama_sampler_accept(chain, token)
    return token


def answer(sampling: Sampling, generated: list[int], rows: Sequence[Sequence[float]]) -> list[int]:
    """The whole answer, by a chain that is made when `generated` is known."""
    chain = make_chain(sampling, PROMPT, generated, VOCABULARY, 1024)
    drawn = [draw(chain, row) for row in rows[len(generated) :]]
    ll.llama_sampler_free(chain)
    return generated + drawn


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5),
        Sampling(presence_penalty=1.0),
        Sampling(frequency_penalty=0.5),
        Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=1.3, seed=8, repetition_penalty=1.2, frequency_penalty=0.4),
    ],
    ids=["repetition", "presence", "frequency", "all", "a seeded draw", "a seeded draw with penalties"],
)
def test_an_answer_goes_on_as_if_one_chain_had_drawn_it(sampling: Sampling) -> None:
    rows = np.random.default_rng(5).uniform(0.5, 2.0, (TOKENS, VOCABULARY)).tolist()
    whole = answer(sampling, [], rows)
    for cut in (1, 2, 7, 20, TOKENS - 1):
        assert answer(sampling, whole[:cut], rows) == whole
    plain = Sampling(temperature=sampling.temperature, seed=sampling.seed)
    if sampling.is_penalised:
        assert answer(plain, [], rows) != whole, "otherwise this would show nothing"


def test_random_numbers_are_not_used_twice() -> None:
    """Even where a filter leaves one candidate, for which llama.cpp takes none."""
    flat = [[0.0] * VOCABULARY] * TOKENS
    hot = Sampling(temperature=1.0, seed=7)
    whole = answer(hot, [], flat)
    assert answer(hot, [0] * 5, flat)[5:] != whole[: TOKENS - 5]
