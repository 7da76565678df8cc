"""The routing snapshot: all that routing needs at one moment, as one value that cannot be inconsistent.

`compile_snapshot` builds it from what is stored, leaving out what does not hold together and saying why;
`RoutingSnapshot` refuses to exist when its references do not resolve. Readers swap whole snapshots.

Sans-io.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from headrace.control.errors import Failure, Reason
from headrace.control.resources import Alias, Artifact, Replica, Revision, canonical_digest

T = TypeVar("T", Artifact, Revision, Alias, Replica)

SOFT_AGE_S = 30.0
HARD_AGE_S = 3600.0


class InconsistentSnapshot(ValueError):
    """A snapshot's parts do not fit together; the message says which."""


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    """One consistent view.

    Raises:
        InconsistentSnapshot: a name occurs twice or a reference does not resolve.
    """

    incarnation: str
    version: int
    artifacts: tuple[Artifact, ...] = ()
    revisions: tuple[Revision, ...] = ()
    aliases: tuple[Alias, ...] = ()
    replicas: tuple[Replica, ...] = ()
    soft_age_s: float = SOFT_AGE_S
    hard_age_s: float = HARD_AGE_S
    publish_time_ms: int = 0
    """Unix time, for people; no decision uses it."""
    digest: str = field(init=False)
    revision_by_name: Mapping[str, Revision] = field(init=False, repr=False, compare=False)
    alias_by_name: Mapping[str, Alias] = field(init=False, repr=False, compare=False)
    artifact_by_name: Mapping[str, Artifact] = field(init=False, repr=False, compare=False)
    replicas_of: Mapping[str, tuple[Replica, ...]] = field(init=False, repr=False, compare=False)
    """Replicas in any state, by revision name."""

    def __post_init__(self) -> None:
        """Index, check, and derive the digest."""
        artifacts = _index("artifact", self.artifacts)
        revisions = _index("revision", self.revisions)
        aliases = _index("alias", self.aliases)
        _index("replica", self.replicas)
        for revision in self.revisions:
            if revision.artifact and revision.artifact not in artifacts:
                raise InconsistentSnapshot(f"{revision.name} needs {revision.artifact}, which is not here")
        for alias in self.aliases:
            if not alias.targets or any(t.weight < 1 for t in alias.targets):
                raise InconsistentSnapshot(f"{alias.name} needs a target, and weights of 1 or more")
            for target in alias.targets:
                if target.revision not in revisions:
                    raise InconsistentSnapshot(f"{alias.name} names {target.revision}, which is not here")
        by_revision: dict[str, list[Replica]] = {name: [] for name in revisions}
        for replica in self.replicas:
            if replica.revision not in revisions:
                raise InconsistentSnapshot(f"{replica.name} serves {replica.revision}, which is not here")
            by_revision[replica.revision].append(replica)
        put = object.__setattr__
        put(self, "artifact_by_name", artifacts)
        put(self, "revision_by_name", revisions)
        put(self, "alias_by_name", aliases)
        put(self, "replicas_of", MappingProxyType({name: tuple(found) for name, found in by_revision.items()}))
        parts = (self.artifacts, self.revisions, self.aliases, self.replicas)
        put(self, "digest", canonical_digest(v for part in parts for v in part))

    def named_revisions(self) -> tuple[Revision, ...]:
        """Revisions that some alias names, each once, by name: those that ought to be served."""
        wanted = {t.revision for alias in self.aliases for t in alias.targets}
        return tuple(r for r in self.revisions if r.name in wanted)


def compile_snapshot(
    *,
    incarnation: str,
    version: int,
    artifacts: Iterable[Artifact],
    revisions: Iterable[Revision],
    aliases: Iterable[Alias],
    replicas: Iterable[Replica],
    soft_age_s: float = SOFT_AGE_S,
    hard_age_s: float = HARD_AGE_S,
    publish_time_ms: int = 0,
) -> tuple[RoutingSnapshot, tuple[str, ...]]:
    """Compile a snapshot out of stored resources.

    What does not resolve is left out, so that one broken record cannot stop the rest from being published.

    Returns:
        The snapshot, and one sentence for each thing that was left out.
    """
    problems: list[str] = []
    kept_artifacts = {a.name: a for a in sorted(artifacts, key=lambda a: a.name)}
    kept_revisions: dict[str, Revision] = {}
    for revision in sorted(revisions, key=lambda r: r.name):
        if revision.artifact and revision.artifact not in kept_artifacts:
            problems.append(f"{revision.name} was left out: {revision.artifact} does not exist")
        else:
            kept_revisions[revision.name] = revision
    kept_aliases = []
    for alias in sorted(aliases, key=lambda a: a.name):
        missing = [t.revision for t in alias.targets if t.revision not in kept_revisions]
        if missing or not alias.targets:
            problems.append(f"{alias.name} was left out: {', '.join(missing) or 'its target'} does not exist")
        else:
            kept_aliases.append(alias)
    kept_replicas = []
    for replica in sorted(replicas, key=lambda r: r.name):
        if replica.revision in kept_revisions:
            kept_replicas.append(replica)
        else:
            problems.append(f"{replica.name} was left out: {replica.revision} does not exist")
    snapshot = RoutingSnapshot(
        incarnation=incarnation,
        version=version,
        artifacts=tuple(kept_artifacts.values()),
        revisions=tuple(kept_revisions.values()),
        aliases=tuple(kept_aliases),
        replicas=tuple(kept_replicas),
        soft_age_s=soft_age_s,
        hard_age_s=hard_age_s,
        publish_time_ms=publish_time_ms,
    )
    return snapshot, tuple(problems)


def check_successor(current: RoutingSnapshot | None, new: RoutingSnapshot) -> None:
    """Refuse a snapshot that would take a reader back in time.

    Raises:
        Failure: SEQUENCE_GAP, when the version does not rise within one incarnation.
    """
    if current is not None and current.incarnation == new.incarnation and new.version <= current.version:
        raise Failure(
            Reason.SEQUENCE_GAP,
            f"snapshot version {new.version} does not follow version {current.version}; it was refused.",
            metadata={"haveVersion": str(current.version), "gotVersion": str(new.version)},
        )


def _index(kind: str, values: tuple[T, ...]) -> Mapping[str, T]:
    found: dict[str, T] = {}
    for value in values:
        if value.name in found:
            raise InconsistentSnapshot(f"the {kind} {value.name} occurs twice")
        found[value.name] = value
    return MappingProxyType(found)
