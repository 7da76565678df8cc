"""Labels: the busiest names have one, the others share one, and there are never more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.control.top_labels import OTHER, TopLabels


def test_the_first_ones_get_labels_and_a_clearly_busier_one_takes_one_over() -> None:
    labels = TopLabels(2)
    assert [labels.label(name) for name in "aabc"] == ["a", "a", "b", OTHER]
    assert labels.label("c", 1.0) == OTHER
    assert labels.rotate() == (), "twice as busy is not clearly busier"
    assert labels.label("c", 5.0) == OTHER
    assert labels.rotate() == ("b",)
    assert labels.labelled == {"a", "c"}
    assert labels.label("c") == "c"
    assert labels.label("b") == OTHER


def test_what_was_counts_less_and_less() -> None:
    labels = TopLabels(1)
    labels.label("old", 1000.0)
    rotations = 0
    while not labels.rotate():
        labels.label("new", 100.0)
        rotations += 1
    assert rotations == 4
    assert labels.labelled == {"new"}


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 100), st.booleans()), max_size=300), st.integers(1, 5))
def test_there_are_never_more_labels_than_allowed(steps: list[tuple[int, float, bool]], labels_max: int) -> None:
    labels, told = TopLabels(labels_max), set()
    for number, amount, rotated in steps:
        label = labels.label(f"t{number}", amount)
        if label != OTHER:
            told.add(label)
        if rotated:
            told -= set(labels.rotate())
        assert told <= labels.labelled
        assert len(labels.labelled) <= labels_max
