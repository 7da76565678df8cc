"""Which revision: names, weights, revocations."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.errors import Failure, Reason
from headrace.control.placement import resolve_revision
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


@pytest.mark.parametrize("name", ["chat", ONE.name])
def test_a_revoked_revision_is_refused(name: str) -> None:
    routes = replace(snapshot(), revocations=(Revocation(ONE.name), Revocation(TWO.name)))
    with pytest.raises(Failure) as caught:
        resolve_revision(routes, name, lambda: 0.0)
    assert (caught.value.reason, caught.value.field) == (Reason.REVOKED, "model")


def test_an_alias_of_one_target_means_it_only_while_it_is_served_and_not_revoked() -> None:
    alias = Alias("aliases/chat", (AliasTarget(TWO.name, 1),), last_good=(AliasTarget(ONE.name, 1),))
    served = replace(replica("b"), revision=TWO.name)
    routes = replace(snapshot(replica("a"), served), aliases=(alias,))
    assert {resolve_revision(routes, name, lambda: 0.5) for name in ("chat", "aliases/chat", TWO.name)} == {TWO}
    unserved = replace(routes, replicas=(replica("a"), replace(served, state=ReplicaState.LOADING)))
    assert resolve_revision(unserved, "chat", lambda: 0.5) is ONE, "the last good one"
    with pytest.raises(Failure) as caught:
        resolve_revision(replace(routes, revocations=(Revocation(TWO.name),)), "chat", lambda: 0.5)
    assert caught.value.reason is Reason.REVOKED


def test_a_name_means_the_alias_that_is_spelled_so_before_one_of_which_it_is_short() -> None:
    nested = Alias("aliases/aliases/chat", (AliasTarget(TWO.name, 1),))
    routes = snapshot(replica("a"), replace(replica("b"), revision=TWO.name))
    routes = replace(routes, aliases=(*routes.aliases, nested))
    assert resolve_revision(routes, "aliases/chat", lambda: 0.0) is ONE


def test_an_alias_goes_by_its_other_targets_while_one_is_revoked() -> None:
    routes = replace(snapshot(weights=(99, 1)), revocations=(Revocation(ONE.name),))
    assert {resolve_revision(routes, "chat", lambda d=d: d / 10).name for d in range(10)} == {TWO.name}  # type: ignore[misc]
