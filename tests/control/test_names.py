"""Resource names: one spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control import names
from headrace.control.errors import InvalidRequest


@pytest.mark.parametrize(
    ("name", "collection", "expected"),
    [("aliases/chat-prod", "aliases", "chat-prod"), ("artifacts/0123456789ab", "artifacts", "0123456789ab")],
)
def test_a_good_name_gives_its_id(name: str, collection: str, expected: str) -> None:
    assert names.parse(name, collection) == expected


@pytest.mark.parametrize(
    ("name", "collection"),
    [
        ("chat", "aliases"),
        ("aliases/", "aliases"),
        ("aliases/Chat", "aliases"),
        ("aliases/a/b", "aliases"),
        ("aliases/-a", "aliases"),
        ("aliases/a-", "aliases"),
        ("aliases/" + "a" * 64, "aliases"),
        ("aliases/a\n", "aliases"),
        ("artifacts/xyz", "artifacts"),
        ("models/m", "aliases"),
    ],
)
def test_a_bad_name_is_refused_with_its_field(name: str, collection: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        names.parse(name, collection, field="alias.name")
    assert caught.value.field == "alias.name"


def test_a_revision_name_round_trips() -> None:
    name = names.revision("gemma-3", "ab" * 32)
    assert names.parse_revision(name) == ("gemma-3", "abababababab")


@pytest.mark.parametrize("name", ["models/m/revisions/xyz", "models/M/revisions/abababababab", "models/m", "", "/" * 3])
def test_a_bad_revision_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        names.parse_revision(name)


@given(st.text(max_size=100))
def test_an_id_can_be_made_of_any_text(text: str) -> None:
    assert names.is_id(names.id_from_text(text))
