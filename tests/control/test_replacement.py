"""An old revision stays until the new one can serve, and no longer."""

import pytest

from headrace.control.replacement import Replacements
from headrace.control.resources import Alias, AliasTarget, Engine, Execution, Replica, ReplicaState, Revision
from headrace.control.revocation import Revocation
from headrace.control.snapshot import RoutingSnapshot

EXECUTION = Execution(Engine.SYNTHETIC, context_tokens=100, slots=1, kv_cells=100)
A, B, C = (Revision(model, "", "", EXECUTION) for model in ("a", "b", "c"))
WAIT_S = 100.0


def snapshot(ready=(), failed=(), revoked=(), **aliases):
    replicas = [(revision, ReplicaState.READY) for revision in ready]
    replicas += [(revision, ReplicaState.FAILED) for revision in failed]
    return RoutingSnapshot(
        incarnation="i",
        version=1,
        revisions=(A, B, C),
        revocations=tuple(Revocation(revision.name) for revision in revoked),
        aliases=tuple(
            Alias(f"aliases/{name}", tuple(AliasTarget(r.name, 1) for r in revisions))
            for name, revisions in aliases.items()
        ),
        replicas=tuple(
            Replica(f"replicas/{n}", r.name, "schedulers/s", "h:1", state, 1, 1, 100)
            for n, (r, state) in enumerate(replicas)
        ),
    )


def kept(*snapshots, at=1.0):
    replacements = Replacements(WAIT_S)
    for one in snapshots:
        replacements.apply(one, 0.0)
    return replacements.kept(at)


@pytest.mark.parametrize(
    ("snapshots", "stays"),
    [
        ([snapshot(x=[A])], set()),
        ([snapshot(x=[A]), snapshot(x=[B])], {A}),
        ([snapshot(x=[A]), snapshot(x=[B], failed=[B])], {A}),
        ([snapshot(x=[A]), snapshot(x=[B], ready=[A])], {A}),
        ([snapshot(x=[A]), snapshot(x=[B], ready=[B])], set()),
        ([snapshot(x=[A]), snapshot(x=[B]), snapshot(x=[B], ready=[B])], set()),
        ([snapshot(x=[A]), snapshot(x=[B]), snapshot(x=[A], ready=[A])], set()),
        ([snapshot(x=[A]), snapshot()], set()),
        ([snapshot(x=[A]), snapshot(x=[B], revoked=[A])], set()),
        ([snapshot(x=[A]), snapshot(x=[B]), snapshot(x=[B], revoked=[A])], set()),
        ([snapshot(x=[A]), snapshot(x=[B], revoked=[B])], {A}),
        ([snapshot(x=[A]), snapshot(x=[B]), snapshot()], set()),
        ([snapshot(x=[A]), snapshot(x=[B]), snapshot(x=[C])], {A, B}),
        ([snapshot(x=[A]), snapshot(x=[B]), snapshot(x=[C], ready=[C])], set()),
        ([snapshot(x=[A], y=[A]), snapshot(x=[B], y=[C], ready=[B])], {A}),
        ([snapshot(x=[A], y=[A]), snapshot(x=[B], y=[A])], set()),
        ([snapshot(x=[A]), snapshot(x=[B, C], ready=[B])], {A}),
    ],
)
def test_who_stays(snapshots, stays):
    assert kept(*snapshots) == {revision.name for revision in stays}


def test_nobody_waits_for_ever():
    snapshots = snapshot(x=[A]), snapshot(x=[B])
    assert kept(*snapshots, at=WAIT_S - 1) == {A.name}
    assert not kept(*snapshots, at=WAIT_S)
