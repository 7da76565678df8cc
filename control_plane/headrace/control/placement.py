"""Which revision serves a request, and why nobody does. Which replica does is `headrace.control.routing`'s.

Sans-io: the snapshot and a source of chance are arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.control.errors import Failure, Reason
from headrace.control.resources import ReplicaState, Revision
from headrace.control.snapshot import RoutingSnapshot

Random = Callable[[], float]
"""Draws from [0, 1)."""


def resolve_revision(snapshot: RoutingSnapshot, model: str, random: Random) -> Revision:
    """Find the revision that `model` names: a revision itself, or an alias, whose weights then decide.

    Targets that are revoked have no weight; nor have those that nobody serves, as long as somebody serves another one.
    Where nobody serves any, the last good ones stand in.

    Raises:
        Failure: MODEL_NOT_FOUND, or REVOKED.
    """
    sole = snapshot.sole_of.get(model)
    if sole is not None:
        return sole
    exact = snapshot.revision_by_name.get(model)
    if exact is not None:
        check_not_revoked(snapshot, exact)
        return exact
    alias = snapshot.alias_by_name.get(model) or snapshot.alias_by_name.get(f"aliases/{model}")
    if alias is None:
        raise Failure(
            Reason.MODEL_NOT_FOUND,
            "No model of that name is registered; `headrace status` lists the aliases.",
            field="model",
            metadata={"resourceName": model[:128], "snapshotVersion": str(snapshot.version)},
        )
    targets = [target for target in alias.targets if target.revision not in snapshot.revocation_of]
    if not targets:
        raise _revoked(snapshot, alias.name)
    served = [target for target in targets if snapshot.ready_of.get(target.revision)]
    if not served:
        last_good = [t for t in alias.last_good if t.revision not in snapshot.revocation_of]
        served = [target for target in last_good if snapshot.ready_of.get(target.revision)]
    targets = served or targets
    point = random() * sum(target.weight for target in targets)
    for target in targets:
        point -= target.weight
        if point < 0:
            return snapshot.revision_by_name[target.revision]
    return snapshot.revision_by_name[targets[-1].revision]


def check_not_revoked(snapshot: RoutingSnapshot, revision: Revision) -> None:
    """Refuse to start anything on a revision that was revoked.

    Raises:
        Failure: REVOKED.
    """
    if snapshot.is_revoked(revision.name):
        raise _revoked(snapshot, revision.name)


def _revoked(snapshot: RoutingSnapshot, name: str) -> Failure:
    return Failure(
        Reason.REVOKED,
        "This model was revoked; name another one.",
        field="model",
        metadata={"resourceName": name, "snapshotVersion": str(snapshot.version)},
    )


def no_replica(snapshot: RoutingSnapshot, revision: Revision) -> Failure:
    """Why nobody can take a request for `revision`: MODEL_LOADING or NO_HEALTHY_WORKER."""
    replicas = snapshot.replicas_of[revision.name]
    metadata = {"revision": revision.name, "snapshotVersion": str(snapshot.version), "replicas": str(len(replicas))}
    if any(r.state is ReplicaState.LOADING for r in replicas):
        return Failure(
            Reason.MODEL_LOADING, "The model's workers are still loading it; try again shortly.", metadata=metadata
        )
    failed = next((r for r in replicas if r.state is ReplicaState.FAILED), None)
    why = f" One of them failed: {failed.detail}" if failed is not None and failed.detail else ""
    return Failure(
        Reason.NO_HEALTHY_WORKER, f"No worker serves this revision now; try again shortly.{why}", metadata=metadata
    )
