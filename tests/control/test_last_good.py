"""What serves while nobody serves what an alias names: other targets, then what was good last, then nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.errors import Failure
from headrace.control.last_good import with_last_good
from headrace.control.placement import resolve_revision
from headrace.control.resources import Alias, AliasTarget, Engine, Execution, Replica, ReplicaState, Revision
from headrace.control.revocation import Revocation
from headrace.control.snapshot import RoutingSnapshot

OLD, NEW, THIRD = (Revision("m", "", "", Execution(Engine.SYNTHETIC, 100 * n, 4, 400)) for n in (1, 2, 3))
READY, LOADING, FAILED = ReplicaState.READY, ReplicaState.LOADING, ReplicaState.FAILED


def snapshot(
    targets: Mapping[Revision, int], *states: tuple[Revision, ReplicaState], revoked: str = ""
) -> RoutingSnapshot:
    return RoutingSnapshot(
        "i",
        1,
        revisions=(OLD, NEW, THIRD),
        aliases=(Alias("aliases/chat", tuple(AliasTarget(r.name, weight) for r, weight in targets.items())),),
        replicas=tuple(
            Replica(f"replicas/{number}", revision.name, "schedulers/s", "h:1", state, 7, slots=4)
            for number, (revision, state) in enumerate(states)
        ),
        revocations=(Revocation(revoked),) if revoked else (),
    )


def published(*story: RoutingSnapshot) -> RoutingSnapshot:
    """The last of them, as the Registry would publish it after the others."""
    before: RoutingSnapshot | None = None
    for one in story:
        before = with_last_good(one, before)
    assert before is not None
    return before


def served(*story: RoutingSnapshot, draw: float = 0.0) -> Revision:
    return resolve_revision(published(*story), "chat", lambda: draw)


BEFORE = snapshot({OLD: 1}, (OLD, READY))


@pytest.mark.parametrize("state", [LOADING, FAILED])
def test_the_last_good_revision_goes_on_while_its_successor_does_not_serve(state: ReplicaState) -> None:
    moved = snapshot({NEW: 1}, (OLD, READY), (NEW, state))
    assert served(BEFORE, moved) is OLD
    assert served(BEFORE, snapshot({NEW: 1}, (OLD, READY)), moved, moved) is OLD
    done = published(BEFORE, moved, snapshot({NEW: 1}, (OLD, READY), (NEW, READY)))
    assert resolve_revision(done, "chat", lambda: 0.0) is NEW
    assert not done.last_good_revisions(), "its worker may go"


def test_its_worker_is_wanted_also_after_it_was_lost_and_through_several_moves() -> None:
    moved = published(BEFORE, snapshot({NEW: 1}), snapshot({THIRD: 1}, (THIRD, FAILED)))
    assert moved.last_good_revisions() == {OLD.name}
    assert {r.name for r in moved.named_revisions()} == {THIRD.name}
    assert served(BEFORE, snapshot({NEW: 1}), snapshot({NEW: 1}, (NEW, LOADING), (OLD, READY))) is OLD


def test_a_revision_that_lost_its_workers_without_a_move_has_no_stand_in() -> None:
    assert not published(BEFORE, snapshot({OLD: 1})).last_good_revisions()
    done = published(BEFORE, snapshot({NEW: 1}, (NEW, READY)), snapshot({NEW: 1}, (NEW, FAILED), (OLD, READY)))
    assert not done.last_good_revisions(), "it had served once: the move is over"


def test_without_anybody_who_serves_the_alias_means_what_it_says() -> None:
    assert served(BEFORE, snapshot({NEW: 1}, (NEW, LOADING))) is NEW, "the old one's worker is gone"
    gone = replace(BEFORE, aliases=())
    assert served(BEFORE, gone, snapshot({NEW: 1}, (OLD, READY))) is NEW, "the alias was deleted in between"


def test_a_revoked_revision_stands_in_for_nobody() -> None:
    moved = published(BEFORE, snapshot({NEW: 1}, (OLD, READY), (NEW, LOADING), revoked=OLD.name))
    assert resolve_revision(moved, "chat", lambda: 0.0) is NEW
    assert not moved.last_good_revisions()
    late = replace(published(BEFORE, snapshot({NEW: 1}, (OLD, READY))), revocations=(Revocation(OLD.name),))
    assert resolve_revision(late, "chat", lambda: 0.0) is NEW, "revoked after it was named"
    with pytest.raises(Failure):
        served(BEFORE, snapshot({NEW: 1}, (OLD, READY), revoked=NEW.name))


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.99])
def test_a_target_that_nobody_serves_leaves_its_share_to_the_others(draw: float) -> None:
    canary = {OLD: 1, NEW: 9}
    assert served(snapshot(canary, (OLD, READY), (NEW, LOADING)), draw=draw) is OLD
    assert served(snapshot(canary, (OLD, READY), (NEW, READY)), draw=draw) is (OLD if draw < 0.1 else NEW)


REVISIONS = st.sampled_from([OLD, NEW, THIRD])
STEPS = st.builds(
    lambda named, states: snapshot(dict.fromkeys(named, 1), *states.items()),
    st.lists(REVISIONS, min_size=1, max_size=2, unique=True),
    st.dictionaries(REVISIONS, st.sampled_from([READY, LOADING, FAILED])),
)


@given(st.lists(STEPS, min_size=1, max_size=8))
def test_to_publish_again_changes_nothing_and_a_served_alias_has_no_stand_in(story: list[RoutingSnapshot]) -> None:
    done = published(*story)
    assert with_last_good(story[-1], done) == done, "else a Registry would publish for ever"
    (alias,) = done.aliases
    named = {t.revision for t in alias.targets}
    assert named.isdisjoint(t.revision for t in alias.last_good)
    if all(done.ready_of[name] for name in named):
        assert not alias.last_good
    chosen = resolve_revision(done, "chat", lambda: 0.0).name
    usable = named | {t.revision for t in alias.last_good}
    assert chosen in usable
    assert done.ready_of[chosen] or not any(done.ready_of[name] for name in usable)
