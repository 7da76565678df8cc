"""The sequences of a warm-up: every declared batch size is run, whatever the sizes are."""

import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.control.warm_shapes import FULL_CONTEXT_S, WarmSequence, decode, full_context, prefill


def batches(group, chunk):
    """Sizes of the decoding batch, step by step: `chunk` prompts of one token a step, whose prefill draws one."""
    left, sizes, begun = [one.max_tokens for one in group], set(), 0
    while any(left):
        decoding = [n for n in range(begun) if left[n]]
        if decoding:
            sizes.add(len(decoding))
        for n in [*decoding, *range(begun, min(begun + chunk, len(group)))]:
            left[n] -= 1
        begun = min(begun + chunk, len(group))
    return sizes


@given(st.lists(st.integers(1, 300), min_size=1, max_size=10), st.integers(1, 200))
def test_every_size_is_a_batch(sizes, chunk):
    group = decode(sizes, chunk, context_tokens=10_000)
    assert len(group) == max(sizes)
    assert set(sizes) <= batches(group, chunk)
    assert max(one.max_tokens for one in group) <= len(set(sizes)) + math.ceil(max(sizes) / chunk)


@given(st.lists(st.integers(1, 64), max_size=8), st.integers(1, 64), st.integers(2, 64))
def test_nothing_is_longer_than_the_context(sizes, chunk, context):
    group = (*decode(sizes, chunk, context), *prefill(chunk, context), *full_context(context, chunk=chunk, chunk_s=0.0))
    assert all(one.prompt_tokens + one.max_tokens <= context for one in group)
    assert all(one.prompt_tokens >= 1 and one.max_tokens >= 1 for one in group)


def test_the_full_context_is_run_only_where_it_is_cheap():
    limit_s = FULL_CONTEXT_S * 100 / 1000
    assert full_context(1000, chunk=100, chunk_s=limit_s) == (WarmSequence(999, 1),)
    assert full_context(1000, chunk=100, chunk_s=limit_s * 1.01) == ()
    assert full_context(100, chunk=100, chunk_s=0.0) == ()  # the chunk was it
