"""The longest common beginning, against the obvious way to find it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.harness import Hand, prepared
from headrace.engine.prefix_cache import MATCH_MIN, Match, PrefixIndex

# Two letters and long runs, so that beginnings are shared often and for longer than MATCH_MIN.
prompts = st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 1, 2]), min_size=1, max_size=3 * MATCH_MIN)


def common(left: list[int], right: list[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


@given(st.lists(st.tuples(prompts, st.integers(0, 3 * MATCH_MIN)), max_size=4), prompts)
def test_the_best_lane_is_found_and_one_token_is_left_to_decode(
    lanes: list[tuple[list[int], int]], prompt: list[int]
) -> None:
    index = PrefixIndex()
    lengths = {}
    for lane, (tokens, computed) in enumerate(lanes):
        index.put(lane, tokens, min(computed, len(tokens)))
        lengths[lane] = min(common(tokens[:computed], prompt), len(prompt) - 1)
    match = index.match(prompt)
    best = max(lengths.values(), default=0)
    if best < MATCH_MIN:
        assert match is None
    else:
        assert match is not None
        assert match.length == best == lengths[match.lane]


@given(prompts, st.sampled_from(["", "tenants/a", "tenants/b"]), st.sampled_from(["", "tenants/a", "tenants/b"]))
def test_only_the_same_salt_matches(prompt: list[int], kept: str, asked: str) -> None:
    index = PrefixIndex()
    index.put(0, prompt, len(prompt), kept)
    match = index.match(prompt, asked)
    assert (match is not None) == (kept == asked and len(prompt) > MATCH_MIN)


def test_what_is_not_computed_yet_or_forgotten_is_no_match() -> None:
    index = PrefixIndex()
    prompt = list(range(40))
    index.put(3, prompt, 0)
    assert index.match(prompt) is None
    index.grow(3, 20)
    assert index.match(prompt) == Match(3, 20)
    index.grow(3, 40)
    assert index.match(prompt) == Match(3, 39)
    index.remove(3)
    assert index.match(prompt) is None


def test_kv_is_reused_within_one_tenant_and_not_between_two() -> None:
    prompt = list(range(65, 65 + 30))
    hand = Hand()
    # The first two run at once, the others come behind them, so that active and retained lanes are asked.
    for seq, salt in enumerate(["tenants/a", "", "tenants/b", "tenants/a", "tenants/b", "", "tenants/c"], 1):
        hand.submit(prepared(hand.backend, seq, prompt, cache_salt=salt))
        if seq != 1:
            hand.run()
    cached = {event["seq"]: event["cached_tokens"] for event in hand.events("admitted")}
    assert cached == {1: 0, 2: 0, 3: 0, 4: 29, 5: 29, 6: 29, 7: 0}
