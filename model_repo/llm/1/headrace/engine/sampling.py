"""llama.cpp's sampler chains for one sequence, in the order that users of other engines expect.

Repetition is penalised over prompt and answer (as in Hugging Face and vLLM), presence and frequency over the answer
alone (as OpenAI defines them); then top-k, top-p, min-p, temperature, and a draw from the seeded distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as ll

from headrace.engine.request import Sampling


def make_chain(sampling: Sampling, prompt: Sequence[int], vocabulary: int, window: int) -> Any:
    """A new chain, to be given back with `llama_sampler_free`; `window` is the most tokens a sequence can have."""
    chain = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
    if sampling.repetition_penalty != 1:
        repetition = ll.llama_sampler_init_penalties(vocabulary, window, sampling.repetition_penalty, 0.0, 0.0)
        for token in prompt:
            ll.llama_sampler_accept(repetition, token)
        ll.llama_sampler_chain_add(chain, repetition)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        spoken = ll.llama_sampler_init_penalties(
            vocabulary, window, 1.0, sampling.frequency_penalty, sampling.presence_penalty
        )
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
    ll.llama_sampler_chain_add(chain, ll.llama_sampler_init_dist(_seed(sampling.seed or 0)))
    return chain


def _seed(seed: int) -> int:
    """64 bits folded to llama.cpp's 32; its LLAMA_DEFAULT_SEED (all ones) would mean a random one."""
    folded = (seed ^ (seed >> 32)) & 0xFFFFFFFF
    return folded if folded != 0xFFFFFFFF else 0x7FFFFFFF
