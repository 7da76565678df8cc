"""What serves while nobody serves what an alias names: other targets, then the last good ones, then nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.control.errors import Failure
from headrace.control.placement import resolve_revision
from headrace.control.resources import Alias, AliasTarget, Engine, Execution, Replica, ReplicaState, Revision
from headrace.control.revocation import Revocation
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.stand_ins import StandIns

OLD = Revision("m", "", "", Execution(Engine.SYNTHETIC, 100, 4, 400))
NEW = Revision("m", "", "", Execution(Engine.SYNTHETIC, 200, 4, 400))
READY, LOADING, FAILED = ReplicaState.READY, ReplicaState.LOADING, ReplicaState.FAILED


def snapshot(
    targets: dict[Revision, int], *states: tuple[Revision, ReplicaState], revoked: str = ""
) -> RoutingSnapshot:
    return RoutingSnapshot(
        "i",
        1,
        revisions=(OLD, NEW),
        aliases=(Alias("aliases/chat", tuple(AliasTarget(r.name, weight) for r, weight in targets.items())),),
        replicas=tuple(
            Replica(f"replicas/{number}", revision.name, "schedulers/s", "h:1", state, 7, slots=4)
            for number, (revision, state) in enumerate(states)
        ),
        revocations=(Revocation(revoked),) if revoked else (),
    )


def served(*story: RoutingSnapshot, draw: float = 0.0) -> Revision:
    stand_ins = StandIns()
    for one in story:
        stand_ins.apply(one)
    return resolve_revision(story[-1], "chat", lambda: draw, stand_ins)


BEFORE = snapshot({OLD: 1}, (OLD, READY))


@pytest.mark.parametrize("state", [LOADING, FAILED])
def test_the_last_good_revision_goes_on_while_its_successor_does_not_serve(state: ReplicaState) -> None:
    moved = snapshot({NEW: 1}, (OLD, READY), (NEW, state))
    assert served(BEFORE, moved) is OLD
    assert served(BEFORE, snapshot({NEW: 1}, (OLD, READY)), moved, moved) is OLD
    assert served(BEFORE, moved, snapshot({NEW: 1}, (OLD, READY), (NEW, READY))) is NEW


def test_without_anybody_who_serves_the_alias_means_what_it_says() -> None:
    assert served(BEFORE, snapshot({NEW: 1}, (NEW, LOADING))) is NEW, "the old one's worker is gone"
    assert served(snapshot({NEW: 1}, (OLD, READY))) is NEW, "a Router that has just started knows no better"
    gone = replace(BEFORE, aliases=())
    assert served(BEFORE, gone, snapshot({NEW: 1}, (OLD, READY))) is NEW, "the alias was deleted in between"


def test_a_revoked_revision_stands_in_for_nobody() -> None:
    assert served(BEFORE, snapshot({NEW: 1}, (OLD, READY), (NEW, LOADING), revoked=OLD.name)) is NEW
    with pytest.raises(Failure):
        served(BEFORE, snapshot({NEW: 1}, (OLD, READY), revoked=NEW.name))


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.99])
def test_a_target_that_nobody_serves_leaves_its_share_to_the_others(draw: float) -> None:
    canary = {OLD: 1, NEW: 9}
    assert served(snapshot(canary, (OLD, READY), (NEW, LOADING)), draw=draw) is OLD
    assert served(snapshot(canary, (OLD, READY), (NEW, READY)), draw=draw) is (OLD if draw < 0.1 else NEW)
