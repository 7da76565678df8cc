"""Which revision and which replica: names, weights, states, and the lighter of two."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.errors import Failure, Reason
from headrace.control.placement import DRAWS_MAX, choose_replica, resolve_revision
from headrace.control.resources import (
    Alias,
    AliasTarget,
    Engine,
    Execution,
    Replica,
    ReplicaState,
    Revision,
)
from headrace.control.revocation import Revocation
from headrace.control.snapshot import RoutingSnapshot

ONE = Revision("m", "", "", Execution(Engine.SYNTHETIC, 100, 4, 400))
TWO = Revision("m", "", "", Execution(Engine.SYNTHETIC, 200, 4, 400))


def replica(name: str, state: ReplicaState = ReplicaState.READY, detail: str = "") -> Replica:
    return Replica(f"replicas/{name}", ONE.name, "schedulers/s", f"{name}:1", state, 7, slots=4, detail=detail)


def snapshot(*replicas: Replica, weights: tuple[int, int] = (1, 1)) -> RoutingSnapshot:
    targets = (AliasTarget(ONE.name, weights[0]), AliasTarget(TWO.name, weights[1]))
    return RoutingSnapshot("i", 1, revisions=(ONE, TWO), aliases=(Alias("aliases/chat", targets),), replicas=replicas)


@pytest.mark.parametrize("name", ["chat", "aliases/chat"])
def test_an_alias_goes_by_either_spelling(name: str) -> None:
    assert resolve_revision(snapshot(), name, lambda: 0.0) is ONE


def test_a_revision_names_itself() -> None:
    assert resolve_revision(snapshot(), TWO.name, lambda: 0.0) is TWO


@pytest.mark.parametrize("name", ["", "nope", "aliases/nope", "models/m/revisions/000000000000"])
def test_an_unknown_model_is_not_found_and_the_field_is_named(name: str) -> None:
    with pytest.raises(Failure) as caught:
        resolve_revision(snapshot(), name, lambda: 0.0)
    assert (caught.value.reason, caught.value.field) == (Reason.MODEL_NOT_FOUND, "model")


def test_weights_split_requests() -> None:
    rng, routes = random.Random(7), snapshot(weights=(9, 1))
    drawn = Counter(resolve_revision(routes, "chat", rng.random).name for _ in range(10_000))
    assert 8_800 < drawn[ONE.name] < 9_200


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 1000), st.integers(1, 1000))
def test_every_draw_gives_a_target(draw: float, first: int, second: int) -> None:
    assert resolve_revision(snapshot(weights=(first, second)), "chat", lambda: draw) in (ONE, TWO)


def choose(routes: RoutingSnapshot, **changes: object) -> Replica:
    facts = {"load": lambda _: 0, "reachable": lambda _: True, "tried": (), "random": random.Random(1).random}
    return choose_replica(routes, ONE, **{**facts, **changes})  # type: ignore[arg-type]


def test_the_lighter_of_two_is_taken() -> None:
    draws = iter([0.0, 0.9])
    chosen = choose(
        snapshot(replica("a"), replica("b")),
        load=lambda r: {"replicas/a": 3, "replicas/b": 1}[r.name],
        random=lambda: next(draws),
    )
    assert chosen.name == "replicas/b"


@pytest.mark.parametrize("state", [s for s in ReplicaState if s is not ReplicaState.READY])
def test_only_ready_replicas_are_taken(state: ReplicaState) -> None:
    routes = snapshot(replica("a", state), replica("b"))
    assert {choose(routes, random=random.Random(n).random).name for n in range(20)} == {"replicas/b"}


def test_neither_tried_nor_unreachable_replicas_are_taken() -> None:
    routes = snapshot(replica("a"), replica("b"), replica("c"))
    assert choose(routes, tried=("replicas/a",), reachable=lambda e: e != "b:1").name == "replicas/c"


def test_a_revoked_replica_is_not_taken() -> None:
    routes = replace(snapshot(replica("a"), replica("b")), revocations=(Revocation("replicas/a"),))
    assert {choose(routes, random=random.Random(n).random).name for n in range(20)} == {"replicas/b"}


@pytest.mark.parametrize("name", ["chat", ONE.name])
def test_a_revoked_revision_is_refused(name: str) -> None:
    routes = replace(snapshot(), revocations=(Revocation(ONE.name), Revocation(TWO.name)))
    with pytest.raises(Failure) as caught:
        resolve_revision(routes, name, lambda: 0.0)
    assert (caught.value.reason, caught.value.field) == (Reason.REVOKED, "model")


def test_an_alias_goes_by_its_other_targets_while_one_is_revoked() -> None:
    routes = replace(snapshot(weights=(99, 1)), revocations=(Revocation(ONE.name),))
    assert {resolve_revision(routes, "chat", lambda d=d: d / 10).name for d in range(10)} == {TWO.name}  # type: ignore[misc]


def test_where_almost_all_are_revoked_the_other_is_found() -> None:
    replicas = [replica(f"r{n:04}") for n in range(500)]
    routes = replace(snapshot(*replicas), revocations=tuple(Revocation(r.name) for r in replicas[:-1]))
    assert {choose(routes, random=random.Random(n).random).name for n in range(20)} == {"replicas/r0499"}


def test_the_only_one_of_many_that_will_do_is_found() -> None:
    routes = snapshot(*(replica(f"r{n:04}") for n in range(2000)))
    assert choose(routes, reachable=lambda endpoint: endpoint == "r1234:1").name == "replicas/r1234"


def test_many_that_fit_are_not_all_looked_at() -> None:
    routes = snapshot(*(replica(f"r{n:04}") for n in range(2000)))
    asked: list[str] = []

    def reachable(endpoint: str) -> bool:
        asked.append(endpoint)
        return int(endpoint[1:5]) % 2 == 0

    looks = []
    for n in range(200):
        asked.clear()
        choose(routes, reachable=reachable, random=random.Random(n).random)
        looks.append(len(asked))
    assert sorted(looks)[190] <= DRAWS_MAX


@pytest.mark.parametrize("fit", [2, 50, 100])
def test_requests_spread_evenly_over_those_that_fit(fit: int) -> None:
    """By drawing or, where few fit, by looking at all."""
    routes = snapshot(*(replica(f"r{n:04}") for n in range(100)))
    drawn, rng = Counter[str](), random.Random(3)
    for _ in range(200 * fit):
        chosen = choose(
            routes,
            reachable=lambda e: int(e[1:5]) < fit,
            load=lambda r: drawn[r.name],
            random=rng.random,
        )
        drawn[chosen.name] += 1
    assert len(drawn) == fit
    assert max(drawn.values()) - min(drawn.values()) <= 30, "the lighter of two evens out"


@pytest.mark.parametrize(
    ("replicas", "reason", "words"),
    [
        ((), Reason.NO_HEALTHY_WORKER, "No worker"),
        ((replica("a", ReplicaState.LOADING),), Reason.MODEL_LOADING, "loading"),
        ((replica("a", ReplicaState.FAILED, "bad digest"),), Reason.NO_HEALTHY_WORKER, "bad digest"),
        ((replica("a", ReplicaState.DRAINING),), Reason.NO_HEALTHY_WORKER, "No worker"),
    ],
    ids=["no replica", "one loads", "one failed, and why", "one drains"],
)
def test_nobody_ready_says_why(replicas: tuple[Replica, ...], reason: Reason, words: str) -> None:
    with pytest.raises(Failure) as caught:
        choose(snapshot(*replicas))
    assert caught.value.reason is reason
    assert words in caught.value.message
