"""llama.cpp's sampler chains for one sequence, in the order that users of other engines expect.

Repetition is penalised over prompt and answer (as in Hugging Face and vLLM), presence and frequency over the answer
alone (as OpenAI defines them); then top-k, top-p, min-p, temperature, and a draw from the seeded distribution.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as ll
import numpy as np
import numpy.typing as npt

from headrace.engine.request import Sampling

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data."""


def make_chain(
    sampling: Sampling, prompt: Sequence[int], generated: Sequence[int], vocabulary: int, window: int
) -> Any:
    """A new chain, to be given back with `llama_sampler_free`; `window` is the most tokens a sequence can have.

    It is what it would be had it drawn `generated` itself. Only the random numbers may be others of the same seed:
    llama.cpp uses none where a single candidate is left, and which steps those were is not known; none is used twice.
    """
    chain = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
    if sampling.repetition_penalty != 1:
        repetition = ll.llama_sampler_init_penalties(vocabulary, window, sampling.repetition_penalty, 0.0, 0.0)
        for token in (*prompt, *generated):
            ll.llama_sampler_accept(repetition, token)
        ll.llama_sampler_chain_add(chain, repetition)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        spoken = ll.llama_sampler_init_penalties(
            vocabulary, window, 1.0, sampling.frequency_penalty, sampling.presence_penalty
        )
        for token in generated:
            ll.llama_sampler_accept(spoken, token)
        ll.llama_sampler_chain_add(chain, spoken)
    if sampling.temperature == 0:
        ll.llama_sampler_chain_add(chain, ll.llama_sampler_init_greedy())
        return chain
    if sampling.top_k:
        ll.llama_sampler_chain_add(chain, ll.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1:
        ll.llama_sampler_chain_add(chain, ll.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0:
        ll.llama_sampler_chain_add(chain, ll.llama_sampler_init_min_p(sampling.min_p, 1))
    ll.llama_sampler_chain_add(chain, ll.llama_sampler_init_temp(sampling.temperature))
    dice = ll.llama_sampler_init_dist(_seed(sampling.seed or 0))
    _use_up(dice, len(generated))
    ll.llama_sampler_chain_add(chain, dice)
    return chain


def draw(chain: Any, row: npt.NDArray[np.float32], allowed: npt.NDArray[np.int64]) -> int:
    """A draw from the logits of some tokens; `llama_sampler_accept` has to follow for what is taken."""
    candidates = np.zeros(len(allowed), _CANDIDATE)
    candidates["id"] = allowed
    candidates["logit"] = row[allowed]
    array = ll.llama_token_data_array()
    data: Any = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(ll.llama_token_data))
    array.data, array.size, array.selected, array.sorted = data, len(candidates), -1, False
    ll.llama_sampler_apply(chain, ctypes.byref(array))
    return int(array.data[array.selected].id)


def _use_up(draw: Any, count: int) -> None:
    """Takes `count` random numbers, by draws from two equal candidates."""
    candidates = (ll.llama_token_data * 2)()
    array = ll.llama_token_data_array()
    for _ in range(count):
        for index in range(2):
            candidates[index] = ll.llama_token_data(index, 0.0, 0.0)
        array.data, array.size, array.selected, array.sorted = candidates, 2, -1, False
        ll.llama_sampler_apply(draw, ctypes.byref(array))


def _seed(seed: int) -> int:
    """64 bits folded to llama.cpp's 32; its LLAMA_DEFAULT_SEED (all ones) would mean a random one."""
    folded = (seed ^ (seed >> 32)) & 0xFFFFFFFF
    return folded if folded != 0xFFFFFFFF else 0x7FFFFFFF
