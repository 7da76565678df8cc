"""What a replica has just refused is not asked for again, and nothing else is refused for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.known_waits import HOLD_MAX_S, KEYS_MAX, Asked, KnownWaits
from headrace.control.priority import Priority

ASKED = Asked("r", "tenants/a", Priority.STANDARD, 100, 50.0, 3.0)
BOTH = ("one", "two")


def told(
    *replicas: str, asked: Asked = ASKED, expected_s: float = 3.4, limit_s: float = 3.0, now: float = 10.0
) -> KnownWaits:
    made = KnownWaits()
    for replica in replicas:
        made.learn(asked, replica, expected_s=expected_s, limit_s=limit_s, retry_after_s=3.4, now=now)
    return made


def test_what_every_replica_refused_is_refused_as_long_as_the_wait_must_be_too_long() -> None:
    known = told(*BOTH)
    assert known.refuses(ASKED, BOTH, 10.0) == pytest.approx(3.4)
    assert known.refuses(ASKED, BOTH, 10.39) == pytest.approx(3.01)
    assert known.refuses(ASKED, BOTH, 10.4) is None
    assert known.refused == 2


def test_nothing_is_believed_for_long() -> None:
    known = told(*BOTH, expected_s=60.0)
    assert known.refuses(ASKED, BOTH, 10.0 + HOLD_MAX_S - 0.01) is not None
    assert known.refuses(ASKED, BOTH, 10.0 + HOLD_MAX_S) is None


@pytest.mark.parametrize("replicas", [("one",), ("one", "three")])
def test_a_replica_that_was_not_asked_is_asked(replicas: tuple[str, ...]) -> None:
    assert told(*replicas).refuses(ASKED, BOTH, 10.0) is None


def test_without_a_replica_placement_says_why() -> None:
    assert told(*BOTH).refuses(ASKED, (), 10.0) is None


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({}, True),
        ({"tokens": 101}, True),
        ({"tokens": 99}, False),
        ({"deadline_at": 51.0}, True),
        ({"deadline_at": 49.0}, False),
        ({"priority": Priority.BATCH}, True),
        ({"priority": Priority.BATCH, "queue_s": 60.0}, False),
        ({"queue_s": 3.2}, True),
        ({"queue_s": 3.35}, False),
        ({"queue_s": 1.0}, True),
        ({"priority": Priority.CRITICAL}, False),
        ({"tenant": "tenants/b"}, False),
        ({"revision": "q"}, False),
    ],
)
def test_only_what_would_stand_behind_it_is_refused(change: dict[str, Any], *, is_refused: bool) -> None:
    known = told(*BOTH)
    assert (known.refuses(dataclasses.replace(ASKED, **change), BOTH, 10.1) is not None) is is_refused


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({}, True),
        ({"deadline_at": 12.9}, True),
        ({"deadline_at": 13.1}, False),  # by then it would be done
        ({"deadline_at": 11.9}, False),  # it comes earlier within its tenant
        ({"queue_s": 0.1}, True),
        ({"queue_s": 60.0}, True),  # how long it may wait does not help it
        ({"tokens": 99, "deadline_at": 12.5}, False),
    ],
)
def test_what_would_miss_its_deadline_behind_one_that_does_is_refused(
    change: dict[str, Any], *, is_refused: bool
) -> None:
    known, late = KnownWaits(), dataclasses.replace(ASKED, deadline_at=12.0)
    for replica in BOTH:
        known.learn(late, replica, expected_s=3.0, limit_s=2.0, retry_after_s=2.5, now=10.0, is_deadline=True)
    assert (known.refuses(dataclasses.replace(late, **change), BOTH, 10.1) is not None) is is_refused
    assert known.refuses(late, BOTH, 10.0 + HOLD_MAX_S) is None


def test_a_higher_priority_is_asked_for_and_critical_is_never_learned() -> None:
    known = told(*BOTH, asked=dataclasses.replace(ASKED, priority=Priority.BATCH))
    assert known.refuses(ASKED, BOTH, 10.0) is None
    critical = dataclasses.replace(ASKED, priority=Priority.CRITICAL)
    known = told(*BOTH, asked=critical)
    assert len(known) == 0
    assert known.refuses(critical, BOTH, 10.0) is None


def test_the_smallest_that_was_refused_counts_as_long_as_it_does() -> None:
    known = told(*BOTH)
    larger = dataclasses.replace(ASKED, tokens=500)
    for replica in BOTH:
        known.learn(larger, replica, expected_s=9.0, limit_s=3.0, retry_after_s=9.0, now=10.1)
    assert known.refuses(ASKED, BOTH, 10.2) is not None
    for replica in BOTH:
        known.learn(larger, replica, expected_s=9.0, limit_s=3.0, retry_after_s=9.0, now=10.5)
    assert known.refuses(ASKED, BOTH, 10.6) is None
    assert known.refuses(larger, BOTH, 10.6) is not None


def test_what_is_kept_is_bounded() -> None:
    known = KnownWaits()
    for number in range(KEYS_MAX + 10):
        asked = dataclasses.replace(ASKED, tenant=f"tenants/{number}")
        known.learn(asked, "one", expected_s=9.0, limit_s=3.0, retry_after_s=1.0, now=0.0)
    assert len(known) == KEYS_MAX


@given(expected=st.floats(0.0, 10.0), limit=st.floats(0.0, 10.0), after=st.floats(0.0, 2.0), tokens=st.integers(1, 200))
def test_a_refusal_holds_for_whoever_would_still_wait_too_long(
    expected: float, limit: float, after: float, tokens: int
) -> None:
    known = told(*BOTH, expected_s=expected, limit_s=limit)
    refused = known.refuses(dataclasses.replace(ASKED, tokens=tokens, queue_s=limit), BOTH, 10.0 + after) is not None
    if refused:
        assert expected - after > limit - 1e-6, "by then it might have been taken"
        assert tokens >= ASKED.tokens
