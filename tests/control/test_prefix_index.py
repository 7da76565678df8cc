"""Hashes of blocks, and the guess of what each replica keeps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.prefix_index import (
    ASKED_MAX,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    BLOCKS_PER_PROMPT,
    PrefixIndex,
    salt,
    text_blocks,
    token_blocks,
)

SALT = salt("tenants/t", "models/m/revisions/0", "")


@given(st.lists(st.binary(max_size=700), max_size=6))
def test_hashes_do_not_depend_on_how_a_text_is_cut(parts: list[bytes]) -> None:
    assert text_blocks(parts, SALT) == text_blocks([b"".join(parts)], SALT)
    assert len(text_blocks(parts, SALT)) == sum(map(len, parts)) // BLOCK_BYTES


@given(st.lists(st.integers(0, 2), min_size=8, max_size=8), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_as_many_hashes_are_equal_as_blocks_are_from_the_first_on(one: list[int], two: list[int]) -> None:
    same = next((n for n, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), 8)
    first, second = (text_blocks([bytes([n]) * BLOCK_BYTES for n in blocks], SALT) for blocks in (one, two))
    assert [a == b for a, b in zip(first, second, strict=True)] == [n < same for n in range(8)]
    first, second = (token_blocks([n for n in blocks for _ in range(BLOCK_TOKENS)], SALT) for blocks in (one, two))
    assert [a == b for a, b in zip(first, second, strict=True)] == [n < same for n in range(8)]


@pytest.mark.parametrize("other", [("u", "r", "a"), ("t", "s", "a"), ("t", "r", "b"), ("tr", "", "a")])
def test_tenants_revisions_and_adapters_never_meet(other: tuple[str, str, str]) -> None:
    text = [b"the same text, long enough " * 20]
    assert not set(text_blocks(text, salt("t", "r", "a"))) & set(text_blocks(text, salt(*other)))


def test_a_huge_prompt_is_hashed_up_to_a_bound() -> None:
    assert len(text_blocks([b"x" * 10_000_000], SALT)) == BLOCKS_PER_PROMPT
    assert len(token_blocks([1] * 1_000_000, SALT)) == BLOCKS_PER_PROMPT
    assert token_blocks([-1] * 64, SALT) != token_blocks([1] * 64, SALT)


def prompt(*blocks: int) -> tuple[int, ...]:
    return text_blocks([bytes([n]) * BLOCK_BYTES for n in blocks], SALT)


def test_the_longest_beginning_is_found_and_its_latest_user() -> None:
    index = PrefixIndex()
    index.keep("a", prompt(1, 2, 3))
    index.keep("b", prompt(1, 2, 9))
    asked = prompt(1, 2, 3, 4)
    assert [index.depth(name, asked) for name in "abc"] == [3, 2, 0]
    assert index.keeper(asked) == "a"
    assert index.keeper(prompt(1, 2)) == "b"
    assert [name in index.keepers(asked) for name in "abc"] == [True, True, False]
    index.keep("a", prompt(1))
    assert index.keeper(prompt(1)) == "a"
    assert index.keeper(prompt(1, 2)) == "b"
    assert index.keeper(prompt(7)) == "" == index.keeper(())
    index.keep("c", prompt(1, 2))
    assert index.keeper(prompt(1, 2), {"a", "b"}.__contains__) == "b", "the latest one that may"
    assert index.keeper(prompt(1, 2), {"z"}.__contains__) == ""
    asked_of: list[str] = []
    for n in range(ASKED_MAX + 8):
        index.keep(f"r{n}", prompt(9))
    assert index.keeper(prompt(9), lambda name: bool(asked_of.append(name))) == ""
    assert len(asked_of) == ASKED_MAX
    assert "a" not in index.keepers(prompt(7))


def test_what_an_engine_did_not_keep_is_forgotten_with_all_that_is_older() -> None:
    index = PrefixIndex()
    index.keep("a", prompt(5, 6))
    index.keep("a", prompt(1, 2, 3, 4))
    index.keep("a", prompt(7, 8))
    index.correct("a", prompt(1, 2, 3, 4), expected=4, found_share=0.5)
    assert [index.depth("a", p) for p in (prompt(5, 6), prompt(1, 2, 3, 4), prompt(7, 8))] == [0, 2, 2]
    assert index.trust("a") < 0.8
    before = index.trust("a")
    index.correct("a", prompt(7, 8), expected=2, found_share=1.0)
    assert index.trust("a") > before
    assert index.depth("a", prompt(7, 8)) == 2


def test_who_keeps_nothing_is_soon_not_trusted() -> None:
    index = PrefixIndex()
    for _ in range(12):
        index.keep("a", prompt(1, 2))
        index.correct("a", prompt(1, 2), expected=2, found_share=0.0)
    assert index.trust("a") == 0.0
    index.forget("a")
    assert index.trust("a") == 0.8


def test_a_replica_whose_guesses_are_all_gone_is_passed_over_when_room_is_made() -> None:
    index = PrefixIndex(blocks_max=3)
    index.keep("a", prompt(1, 2))
    index.correct("a", prompt(1, 2), expected=2, found_share=0.0)
    index.keep("b", prompt(1, 2, 3))
    index.keep("c", prompt(4))
    assert len(index) == 3
    assert index.depth("c", prompt(4)) == 1


KEEPS = st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=1, max_size=6))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(KEEPS, st.sampled_from("abc"), st.floats(0, 1)), max_size=40))
def test_it_is_bounded_and_never_keeps_a_block_without_its_beginning(steps: list[object]) -> None:
    index, last = PrefixIndex(blocks_max=12, blocks_per_replica=7), ("a", [1])
    for step in steps:
        if isinstance(step, str):
            index.forget(step)
            assert index.depth(step, prompt(*last[1])) == 0
        elif isinstance(step, float):
            blocks = prompt(*last[1])
            index.correct(last[0], blocks, index.depth(last[0], blocks), step)
        else:
            last = step  # type: ignore[assignment]
            index.keep(last[0], prompt(*last[1]))
        assert len(index) <= 12
        total = 0
        for name in "abc":
            kept = set(index._shelves[name].blocks) if name in index._shelves else set()
            assert len(kept) <= 7
            total += len(kept)
            for a in range(4):
                held = [block in kept for block in prompt(a, *last[1])]
                assert held == sorted(held, reverse=True)
        assert total == len(index)
    for name in "abc":
        index.forget(name)
    assert len(index) == 0
    assert not index._holders
