"""The routing snapshot: all that routing needs at one moment, as one value that cannot be inconsistent.

`compile_snapshot` builds it from what is stored, leaving out what does not hold together and saying why;
`RoutingSnapshot` refuses to exist when its references do not resolve. Readers swap whole snapshots, which share the
parts that did not change.

Sans-io.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Protocol, TypeVar

from headrace.control.errors import Failure, Reason
from headrace.control.resources import Alias, Artifact, Replica, ReplicaState, Revision
from headrace.control.revocation import Revocation
from headrace.control.tenants import ApiKey, Directory, Tenant, contested_certificates, directory, join

T = TypeVar("T", Artifact, Revision, Alias, Replica, Revocation, Tenant)
M = TypeVar("M", Revision, Alias)

SOFT_AGE_S = 30.0
HARD_AGE_S = 3600.0


class InconsistentSnapshot(ValueError):
    """A snapshot's parts do not fit together; the message says which."""


@dataclass(frozen=True, slots=True)
class Part:
    """A share of a snapshot's content, with its indexes: checked and indexed once, used in many snapshots.

    Raises:
        InconsistentSnapshot: what can be seen here alone: a name that occurs twice, an alias without a target.
    """

    artifacts: tuple[Artifact, ...] = ()
    revisions: tuple[Revision, ...] = ()
    aliases: tuple[Alias, ...] = ()
    replicas: tuple[Replica, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    artifact_by_name: Mapping[str, Artifact] = field(init=False, repr=False, compare=False)
    revision_by_name: Mapping[str, Revision] = field(init=False, repr=False, compare=False)
    alias_by_name: Mapping[str, Alias] = field(init=False, repr=False, compare=False)
    replica_names: frozenset[str] = field(init=False, repr=False, compare=False)
    replicas_of: Mapping[str, tuple[Replica, ...]] = field(init=False, repr=False, compare=False)
    ready_of: Mapping[str, tuple[Replica, ...]] = field(init=False, repr=False, compare=False)
    directory: Directory = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index and check."""
        for alias in self.aliases:
            if not alias.targets or any(t.weight < 1 for t in alias.targets):
                raise InconsistentSnapshot(f"{alias.name} needs a target, and weights of 1 or more")
        replicas_of: dict[str, list[Replica]] = {}
        for replica in self.replicas:
            replicas_of.setdefault(replica.revision, []).append(replica)
        put = object.__setattr__
        put(self, "directory", directory(self.tenants))
        if len(self.directory.by_name) != len(self.tenants):
            raise InconsistentSnapshot("a tenant occurs twice")
        ready_of = {name: [r for r in found if r.state is ReplicaState.READY] for name, found in replicas_of.items()}
        put(self, "artifact_by_name", _index("artifact", self.artifacts))
        put(self, "revision_by_name", _index("revision", self.revisions))
        put(self, "alias_by_name", _index("alias", self.aliases))
        put(self, "replica_names", frozenset(_index("replica", self.replicas)))
        put(self, "replicas_of", {name: tuple(found) for name, found in replicas_of.items()})
        put(self, "ready_of", {name: tuple(found) for name, found in ready_of.items()})


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    """One consistent view.

    Made of `parts`, which are shared with other snapshots and never checked again, or of the content itself. Either
    way every reference resolves.

    Raises:
        InconsistentSnapshot: a name occurs twice or a reference does not resolve.
    """

    incarnation: str
    version: int
    artifacts: tuple[Artifact, ...] = ()
    revisions: tuple[Revision, ...] = ()
    aliases: tuple[Alias, ...] = ()
    replicas: tuple[Replica, ...] = ()
    """In the order of the parts, by name in each."""
    soft_age_s: float = SOFT_AGE_S
    hard_age_s: float = HARD_AGE_S
    publish_time_ms: int = 0
    """Unix time, for people; no decision uses it."""
    revocations: tuple[Revocation, ...] = ()
    digest: str = field(default="", compare=False)
    """Of the shards and the revocations, in hex; "" while it is not published."""
    tenants: tuple[Tenant, ...] = ()
    """In the order of the parts, by name in each."""
    parts: InitVar[tuple[Part, ...]] = ()
    revision_by_name: Mapping[str, Revision] = field(init=False, repr=False, compare=False)
    alias_by_name: Mapping[str, Alias] = field(init=False, repr=False, compare=False)
    artifact_by_name: Mapping[str, Artifact] = field(init=False, repr=False, compare=False)
    replicas_of: Mapping[str, tuple[Replica, ...]] = field(init=False, repr=False, compare=False)
    """Replicas in any state, by revision name."""
    ready_of: Mapping[str, tuple[Replica, ...]] = field(init=False, repr=False, compare=False)
    """Those that are READY, by revision name."""
    revocation_of: Mapping[str, Revocation] = field(init=False, repr=False, compare=False)
    sole_of: Mapping[str, Revision] = field(init=False, repr=False, compare=False)
    """By a name that clients may use, the revision that alone can be meant: not revoked, and behind an alias the one
    target, and served. So the usual request costs one look; other names take a closer one."""
    tenant_by_name: Mapping[str, Tenant] = field(init=False, repr=False, compare=False)
    tenant_by_key_digest: Mapping[bytes, tuple[Tenant, ApiKey]] = field(init=False, repr=False, compare=False)
    """Whose key it is; whether that is expired or revoked is for the reader to ask."""
    tenant_by_certificate: Mapping[str, Tenant] = field(init=False, repr=False, compare=False)
    """By a name in client certificates; one that two tenants claim is neither's."""

    def __post_init__(self, parts: tuple[Part, ...]) -> None:
        """Merge the parts' indexes and check what goes across parts."""
        put = object.__setattr__
        if parts:
            artifacts = {name: artifact for part in parts for name, artifact in part.artifact_by_name.items()}
            put(self, "artifacts", tuple(artifacts[name] for name in sorted(artifacts)))
            put(self, "revisions", tuple(chain.from_iterable(part.revisions for part in parts)))
            put(self, "aliases", tuple(chain.from_iterable(part.aliases for part in parts)))
            put(self, "replicas", tuple(chain.from_iterable(part.replicas for part in parts)))
            put(self, "tenants", tuple(chain.from_iterable(part.tenants for part in parts)))
        else:
            parts = (Part(self.artifacts, self.revisions, self.aliases, self.replicas, self.tenants),)
        put(self, "artifact_by_name", MappingProxyType(_merged_artifacts(parts)))
        put(self, "revision_by_name", _merged("revision", [part.revision_by_name for part in parts]))
        put(self, "alias_by_name", _merged("alias", [part.alias_by_name for part in parts]))
        if len(frozenset().union(*(part.replica_names for part in parts))) != len(self.replicas):
            raise InconsistentSnapshot("a replica occurs twice")
        put(self, "replicas_of", _grouped(self.revision_by_name, [part.replicas_of for part in parts]))
        put(self, "ready_of", _grouped(self.revision_by_name, [part.ready_of for part in parts]))
        put(self, "revocation_of", _index("revocation", self.revocations))
        found = join(part.directory for part in parts if part.tenants)
        if len(frozenset().union(*(part.directory.by_name for part in parts))) != len(self.tenants):
            raise InconsistentSnapshot("a tenant occurs twice")
        put(self, "tenant_by_name", found.by_name)
        put(self, "tenant_by_key_digest", found.by_digest)
        put(self, "tenant_by_certificate", found.by_certificate)
        self._check_references(parts)
        put(self, "sole_of", MappingProxyType(self._sole()))

    def _sole(self) -> dict[str, Revision]:
        found: dict[str, Revision] = {}
        for alias in self.aliases:
            only, short = alias.targets[0].revision, alias.name.removeprefix("aliases/")
            if len(alias.targets) == 1 and only not in self.revocation_of and self.ready_of.get(only):
                found[alias.name] = self.revision_by_name[only]
                if short not in self.alias_by_name:
                    found[short] = self.revision_by_name[only]
        return found | {name: r for name, r in self.revision_by_name.items() if name not in self.revocation_of}

    def _check_references(self, parts: tuple[Part, ...]) -> None:
        for revision in self.revisions:
            for name in revision.artifacts:
                if name not in self.artifact_by_name:
                    raise InconsistentSnapshot(f"{revision.name} needs {name}, which is not here")
        for alias in self.aliases:
            for target in chain(alias.targets, alias.last_good):
                if target.revision not in self.revision_by_name:
                    raise InconsistentSnapshot(f"{alias.name} names {target.revision}, which is not here")
        for part in parts:
            for name, replicas in part.replicas_of.items():
                if name not in self.revision_by_name:
                    raise InconsistentSnapshot(f"{replicas[0].name} serves {name}, which is not here")

    def is_revoked(self, name: str) -> bool:
        """Whether a revision, a replica or a tenant's key, by its name, must not be used."""
        return name in self.revocation_of

    def named_revisions(self) -> tuple[Revision, ...]:
        """Revisions that some alias names, each once, by name: those that ought to be served."""
        wanted = {t.revision for alias in self.aliases for t in alias.targets}
        return tuple(r for r in self.revisions if r.name in wanted)

    def last_good_revisions(self) -> frozenset[str]:
        """Revisions that aliases have left for others that do not all serve yet: their workers stay."""
        return frozenset(t.revision for alias in self.aliases for t in alias.last_good)


def compile_snapshot(
    *,
    incarnation: str,
    version: int,
    artifacts: Iterable[Artifact],
    revisions: Iterable[Revision],
    aliases: Iterable[Alias],
    replicas: Iterable[Replica],
    revocations: Iterable[Revocation] = (),
    tenants: Iterable[Tenant] = (),
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
        gone = [name for name in revision.artifacts if name not in kept_artifacts]
        if gone:
            problems.append(f"{revision.name} was left out: {', '.join(gone)} does not exist")
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
    kept_tenants = tuple(sorted(tenants, key=lambda t: t.name))
    for certificate, claimed in contested_certificates(kept_tenants).items():
        problems.append(f"the certificate name {certificate} is nobody's: {' and '.join(claimed)} claim it")
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
        revocations=tuple(sorted(revocations, key=lambda r: r.name)),
        tenants=kept_tenants,
    )
    return snapshot, tuple(problems)


class Versioned(Protocol):
    """A snapshot, or its root."""

    @property
    def incarnation(self) -> str:
        """Which store it is of."""

    @property
    def version(self) -> int:
        """Its version there."""


def check_successor(current: Versioned | None, new: Versioned) -> None:
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


def _merged(kind: str, indexes: Sequence[Mapping[str, M]]) -> Mapping[str, M]:
    found: dict[str, M] = {}
    for index in indexes:
        if not found.keys().isdisjoint(index):
            name = next(iter(found.keys() & index.keys()))
            raise InconsistentSnapshot(f"the {kind} {name} occurs twice")
        found.update(index)
    return MappingProxyType(found)


def _merged_artifacts(parts: tuple[Part, ...]) -> dict[str, Artifact]:
    """Models may share an artifact: then each part has it, and it must be the same one."""
    found: dict[str, Artifact] = {}
    for part in parts:
        for name, artifact in part.artifact_by_name.items():
            if found.setdefault(name, artifact) != artifact:
                raise InconsistentSnapshot(f"the artifact {name} occurs twice, and differs")
    return found


def _grouped(
    names: Iterable[str], indexes: Sequence[Mapping[str, tuple[Replica, ...]]]
) -> Mapping[str, tuple[Replica, ...]]:
    found: dict[str, list[tuple[Replica, ...]]] = {name: [] for name in names}
    for index in indexes:
        for name, replicas in index.items():
            found.setdefault(name, []).append(replicas)
    return MappingProxyType(
        {name: groups[0] if len(groups) == 1 else tuple(chain.from_iterable(groups)) for name, groups in found.items()}
    )
