"""Load classes: what counts as alike, and that there are few."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.control.load_class import OUTPUT_BOUNDS, PROMPT_BOUNDS, load_class, tokens_of_bytes


def test_bounds_belong_to_the_class_below_them():
    kind = load_class("r", "low", 256, 128)
    assert (kind.prompt_bound, kind.output_bound, kind.effort) == (256, 128, "low")
    assert kind == load_class("r", "low", 65, 33)
    assert kind != load_class("r", "low", 257, 128)
    assert kind != load_class("r", "low", 256, 129)
    assert kind != load_class("r", "high", 256, 128)
    assert kind != load_class("s", "low", 256, 128)


def test_only_a_short_prompt_with_a_short_answer_is_short():
    assert load_class("r", "", 256, 128).is_short
    assert not load_class("r", "", 257, 128).is_short
    assert not load_class("r", "", 256, 129).is_short
    assert not load_class("r", "", 10**6, 1).is_short  # no bound is not a low one
    assert not load_class("r", "", 1, 10**6).is_short


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_whatever_is_asked_there_are_few_classes(prompt, output):
    kind = load_class("r", "", prompt, output)
    assert kind.prompt_bound in (*PROMPT_BOUNDS, 0)
    assert kind.output_bound in (*OUTPUT_BOUNDS, 0)
    assert not kind.prompt_bound or prompt <= kind.prompt_bound


def test_text_has_a_token_for_four_bytes_and_one_at_least():
    assert [tokens_of_bytes(size) for size in (0, 1, 4, 5, 400)] == [1, 1, 1, 2, 100]
