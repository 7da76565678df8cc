"""Guided decoding: what a request may ask for, and who can do it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headrace.control.errors import Failure, Reason
from headrace.control.filters import Demand
from headrace.control.guided import BYTES_MAX, CHOICES_MAX, KINDS, check_guided, guide_violations
from headrace.control.resources import ReplicaState
from support.fleets import REVISION, Fleet, replica, snapshot

GOOD: dict[str, dict[str, Any]] = {
    "json_schema": {"text": '{"type": "object"}'},
    "json_object": {"is_object": True},
    "regex": {"text": "[a-z]+"},
    "choice": {"choices": ["yes", "no"]},
    "grammar": {"text": 'root ::= "x"'},
}


def fields(kind: str | None, **changes: Any) -> list[str]:
    given: dict[str, Any] = {"text": "", "choices": [], "is_object": False, "continues": False, "ignores_end": False}
    return [one.field for one in guide_violations(kind, **{**given, **changes})]


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_guide_is_taken_and_not_with_what_excludes_it(kind: str) -> None:
    assert fields(kind, **GOOD[kind]) == []
    assert fields(kind, **GOOD[kind], continues=True, ignores_end=True) == ["recovery", "stop.ignore_eos"]


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (None, {}, "guided_decoding"),
        ("json_schema", {"text": ""}, "guided_decoding.json_schema"),
        ("json_schema", {"text": "{"}, "guided_decoding.json_schema"),
        ("json_schema", {"text": "[]"}, "guided_decoding.json_schema"),
        ("json_schema", {"text": "[" * 30_000}, "guided_decoding.json_schema"),
        ("json_schema", {"text": '{"title": "' + "é" * (BYTES_MAX // 2) + '"}'}, "guided_decoding.json_schema"),
        ("json_object", {"is_object": False}, "guided_decoding.json_object"),
        ("regex", {"text": ""}, "guided_decoding.regex"),
        ("regex", {"text": "a" * (BYTES_MAX + 1)}, "guided_decoding.regex"),
        ("grammar", {"text": "a" * (BYTES_MAX + 1)}, "guided_decoding.grammar"),
        ("choice", {"choices": []}, "guided_decoding.choice.strings"),
        ("choice", {"choices": ["a"] * (CHOICES_MAX + 1)}, "guided_decoding.choice.strings"),
        ("choice", {"choices": ["a", ""]}, "guided_decoding.choice.strings[1]"),
        ("choice", {"choices": ["a", "b" * BYTES_MAX]}, "guided_decoding.choice.strings"),
    ],
)
def test_a_faulty_guide_names_its_field(kind: str | None, changes: dict[str, Any], field: str) -> None:
    assert fields(kind, **changes) == [field]


def test_a_guide_of_just_the_size_is_taken() -> None:
    assert fields("regex", text="a" * BYTES_MAX) == []
    assert fields("choice", choices=["a" * (BYTES_MAX // CHOICES_MAX)] * CHOICES_MAX) == []


def test_what_nobody_can_do_is_refused_with_what_they_can() -> None:
    able = frozenset({"choice", "regex"})
    here = snapshot(replica("a", guided=able), replica("b"))
    check_guided(here, REVISION, "")
    check_guided(here, REVISION, "choice")
    with pytest.raises(Failure) as caught:
        check_guided(here, REVISION, "grammar")
    assert caught.value.reason is Reason.GUIDED_DECODING_UNSUPPORTED
    assert caught.value.field == "guided_decoding.grammar"
    assert caught.value.metadata == {"requestedKind": "grammar", "supportedKinds": "choice, regex"}
    assert caught.value.message.endswith("they do choice, regex.")


def test_while_nobody_serves_it_nobody_knows() -> None:
    loading = snapshot(replica("a", state=ReplicaState.LOADING))
    check_guided(loading, REVISION, "grammar")
    with pytest.raises(Failure) as caught:
        check_guided(snapshot(replica("a")), REVISION, "grammar")
    assert "they do no guided decoding" in caught.value.message


def test_only_those_that_can_do_it_are_drawn_from() -> None:
    able = replica("able", guided=frozenset({"regex"}))
    fleet = Fleet(able, *(replica(f"r{n}") for n in range(50)))
    pools, ready = fleet.routing.pools, fleet.snapshot.ready_of[REVISION.name]
    assert [one.replica for one in pools.pool(REVISION.name, ready, frozenset(), "regex")] == [able]
    assert len(pools.pool(REVISION.name, ready, frozenset())) == 51


def test_one_of_many_that_can_do_it_is_found_and_without_one_the_reason_is_told() -> None:
    able = replica("able", guided=frozenset({"regex"}))
    dice = Random(3).random
    fleet = Fleet(able, *(replica(f"r{n}") for n in range(50)))
    for _ in range(20):
        assert fleet.choose(dice, Demand(guided="regex")).name == able.name
    with pytest.raises(Failure) as caught:
        fleet.choose(dice, Demand(guided="choice"))
    assert caught.value.reason is Reason.GUIDED_DECODING_UNSUPPORTED
    with pytest.raises(Failure) as caught:
        fleet.choose(dice, Demand(guided="regex"), tried=(able.name,))
    assert caught.value.reason is Reason.NO_HEALTHY_WORKER
