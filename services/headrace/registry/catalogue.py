"""All that the installation has stored, as one view in memory, and the snapshot that follows from it.

    artifacts/{d12}  revisions/{model}/{d12}  aliases/{a}  tenants/{t}  replicas/{id}  revocations/{name}
    services/{kind}/{id}
    snapshot/root    snapshot/shards/{d32}    history/{version}           registry/leader     incarnation

No I/O: listings and changes of the watch come in, compiled snapshots go out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from headrace.adapters import route_codec, shard_codec, tenant_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import resources_pb2
from headrace.control import names
from headrace.control.errors import Failure
from headrace.control.resources import Alias, Artifact, Replica, Revision
from headrace.control.revocation import Revocation
from headrace.control.shards import Root, Shard, assemble
from headrace.control.snapshot import RoutingSnapshot, compile_snapshot
from headrace.control.tenants import Tenant
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import Listing
from headrace.runtime.snapshot_follower import ROOT_KEY, shard_key

T = TypeVar("T")

LEADER_KEY = "registry/leader"
HISTORY_PREFIX = "history/"
REVOCATION_PREFIX = "revocations/"
TENANT_PREFIX = "tenants/"
AUDIT_PREFIX = "audit/"

_MATTERS = frozenset({"artifacts", "revisions", "aliases", "replicas", "revocations", "tenants", "registry"})
"""First parts of keys that may alter what is published or who leads; beside them the root."""

_NOT_UNDERSTOOD = (BadRecord, DecodeError, Failure)


def artifact_key(name: str) -> str:
    """Key of "artifacts/{d12}": the name itself."""
    return name


def revision_key(name: str) -> str:
    """Key of "models/{m}/revisions/{d12}"."""
    model, digest12 = names.parse_revision(name)
    return f"revisions/{model}/{digest12}"


def revocation_key(name: str) -> str:
    """Key of the revocation of what has this name."""
    return REVOCATION_PREFIX + name


def history_key(version: int) -> str:
    """Key of the root of an earlier snapshot; keys sort as versions do."""
    return f"{HISTORY_PREFIX}{version:020d}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored value with the revisions that matter."""

    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A snapshot that could be published, and what was left out of it."""

    snapshot: RoutingSnapshot
    problems: tuple[str, ...]


class Catalogue:
    """The view. `reset` and `apply` come from one watch of everything."""

    def __init__(self) -> None:
        self.incarnation = ""
        self._folders: dict[str, dict[str, Entry]] = {}
        """Entries by key, by the key's first part."""
        self._decoded: dict[str, tuple[int, Any]] = {}
        """What was decoded, by key, with the mod revision that it was decoded from: there may be many."""

    def reset(self, listing: Listing) -> None:
        """Replace everything."""
        self.incarnation = listing.incarnation
        self._folders, self._decoded = {}, {}
        for kv in listing.items:
            if not kv.key.startswith(AUDIT_PREFIX):
                self._folder(kv.key)[kv.key] = Entry(kv.value, kv.create_revision, kv.mod_revision)

    def apply(self, changes: tuple[Change, ...]) -> bool:
        """Apply changes. Returns whether one may alter what is published or who leads."""
        matters = False
        for change in changes:
            if change.key.startswith(AUDIT_PREFIX):
                continue  # thousands, and nothing follows from them
            matters = matters or change.key == ROOT_KEY or change.key.partition("/")[0] in _MATTERS
            folder = self._folder(change.key)
            if change.value is None:
                folder.pop(change.key, None)
                self._decoded.pop(change.key, None)
            elif change.key not in folder or change.mod_revision > folder[change.key].mod_revision:
                folder[change.key] = Entry(change.value, change.create_revision, change.mod_revision)
        return matters

    def entry(self, key: str) -> Entry | None:
        """One stored value."""
        return self._folder(key).get(key)

    def below(self, prefix: str) -> Mapping[str, Entry]:
        """All that is stored below a first part of keys, such as "history/"."""
        return self._folders.get(prefix.rstrip("/"), {})

    @property
    def is_empty(self) -> bool:
        """Whether nothing is registered that a client could name."""
        return not self.below("revisions/") and not self.below("aliases/")

    def root(self) -> Root | None:
        """The published root, if it can be understood."""
        return self._root_at(ROOT_KEY)

    def kept_roots(self) -> dict[str, Root]:
        """Earlier roots that are kept, by key, the oldest first."""
        found = {key: self._root_at(key) for key in sorted(self.below(HISTORY_PREFIX))}
        return {key: root for key, root in found.items() if root is not None}

    def _root_at(self, key: str) -> Root | None:
        entry = self.entry(key)
        if entry is None:
            return None
        known = self._decoded.get(key)
        if known is None or known[0] != entry.mod_revision:
            try:
                known = (entry.mod_revision, shard_codec.parse_root(entry.value))
            except BadRecord:
                known = (entry.mod_revision, None)
            self._decoded[key] = known
        root: Root | None = known[1]
        return root

    def published(self) -> RoutingSnapshot | None:
        """The published snapshot, if it can be put together."""
        root = self.root()
        if root is None:
            return None
        shards: dict[bytes, Shard] = {}
        try:
            for ref in root.shards:
                entry = self.entry(shard_key(ref.digest))
                if entry is None:
                    return None
                shards[ref.digest] = shard_codec.parse_shard(ref, entry.value)
            return assemble(root, shards)
        except ValueError:
            return None

    def next_version(self) -> int:
        """A version above the published one, and above all that a service reports.

        A store restored from a backup holds an old root, while services have run newer ones in the same incarnation.
        """
        versions = [0]
        root = self.root()
        if root is not None:
            versions.append(root.version)
        versions += [root.version for root in self.kept_roots().values()]
        for entry in self.below("services/").values():
            versions += [m.snapshot_version for m in _parsed(resources_pb2.ServiceRecord, entry.value)]
        return max(versions) + 1

    def replicas(self) -> tuple[tuple[Replica, ...], tuple[str, ...]]:
        """The stored replicas, each with its record's create revision as epoch; and what was not understood."""

        def decode(key: str, entry: Entry) -> Replica:
            message = resources_pb2.Replica.FromString(entry.value)
            replica = route_codec.replica_from_proto(message, epoch=entry.create_revision)
            _check_name(key, replica.name)
            return replica

        problems: list[str] = []
        return tuple(self._understood("replicas/", decode, problems)), tuple(problems)

    def compile(
        self, replicas: tuple[Replica, ...], *, version: int, soft_age_s: float, hard_age_s: float, publish_time_ms: int
    ) -> Compiled:
        """Compile the snapshot of what is stored, with these replicas."""
        problems: list[str] = []
        artifacts = {a.name: a for a in self._understood("artifacts/", _decode_artifact, problems)}
        snapshot, left_out = compile_snapshot(
            incarnation=self.incarnation,
            version=version,
            artifacts=artifacts.values(),
            revisions=self._revisions(artifacts, problems),
            aliases=self._understood(
                "aliases/", lambda key, entry: decode_alias(key, entry.value, entry.mod_revision), problems
            ),
            replicas=replicas,
            revocations=self._understood(REVOCATION_PREFIX, _decode_revocation, problems),
            tenants=self._understood(
                TENANT_PREFIX, lambda key, entry: decode_tenant(key, entry.value, entry.mod_revision), problems
            ),
            soft_age_s=soft_age_s,
            hard_age_s=hard_age_s,
            publish_time_ms=publish_time_ms,
        )
        return Compiled(snapshot, (*problems, *left_out))

    def _revisions(self, artifacts: Mapping[str, Artifact], problems: list[str]) -> list[Revision]:
        """A revision's identity has the artifact's digest in it, so it cannot be decoded without."""

        def decode(key: str, entry: Entry) -> Revision:
            message = resources_pb2.Revision.FromString(entry.value)
            artifact = artifacts.get(message.artifact)
            if message.artifact and artifact is None:
                raise BadRecord(f"{message.artifact} does not exist")
            revision = route_codec.revision_from_proto(
                message,
                model=route_codec.model_of(message.name),
                artifact_digest=artifact.digest if artifact else "",
            )
            _check_name(key, revision_key(revision.name))
            return revision

        kept = []
        for revision in self._understood("revisions/", decode, problems):
            gone = [name for name in revision.artifacts if name not in artifacts]
            if gone:  # its own was there when this was decoded
                problems.append(f"{revision_key(revision.name)} was left out: {', '.join(gone)} does not exist")
            else:
                kept.append(revision)
        return kept

    def _understood(self, prefix: str, decode: Callable[[str, Entry], T], problems: list[str]) -> list[T]:
        found = []
        for key, entry in self.below(prefix).items():
            known = self._decoded.get(key)
            if known is not None and known[0] == entry.mod_revision:
                found.append(known[1])
                continue
            try:
                value = decode(key, entry)
            except _NOT_UNDERSTOOD as error:
                problems.append(f"{key} was left out: {error}")
                continue
            self._decoded[key] = (entry.mod_revision, value)
            found.append(value)
        return found

    def _folder(self, key: str) -> dict[str, Entry]:
        return self._folders.setdefault(key.partition("/")[0], {})


def _decode_artifact(key: str, entry: Entry) -> Artifact:
    artifact = route_codec.artifact_from_proto(resources_pb2.Artifact.FromString(entry.value))
    _check_name(key, artifact_key(artifact.name))
    return artifact


def _decode_revocation(key: str, entry: Entry) -> Revocation:
    revocation = route_codec.revocation_from_proto(resources_pb2.Revocation.FromString(entry.value))
    _check_name(key, revocation_key(revocation.name))
    return revocation


def decode_alias(key: str, value: bytes, mod_revision: int) -> Alias:
    """Decode a stored alias; its etag is the revision of its last write.

    Raises:
        BadRecord: it is under another's key.
        DecodeError: it is no Alias.
    """
    message = resources_pb2.Alias.FromString(value)
    message.etag = str(mod_revision)
    alias = route_codec.alias_from_proto(message)
    _check_name(key, alias.name)
    if any(target.weight < 1 for target in alias.targets):
        raise BadRecord("a target has no weight")
    return alias


def decode_tenant(key: str, value: bytes, mod_revision: int) -> Tenant:
    """Decode a stored tenant; its etag is the revision of its last write.

    Raises:
        BadRecord: it is under another's key, or does not hold together.
        DecodeError: it is no Tenant.
    """
    message = resources_pb2.Tenant.FromString(value)
    message.etag = str(mod_revision)
    tenant = tenant_codec.tenant_from_proto(message)
    _check_name(key, tenant.name)
    return tenant


def _check_name(key: str, expected: str) -> None:
    if key != expected:
        raise BadRecord(f"it describes {expected or 'nothing'}")


def _parsed(message_class: Any, data: bytes) -> list[Any]:
    try:
        return [message_class.FromString(data)]
    except DecodeError:
        return []
