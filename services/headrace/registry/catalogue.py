"""All that the installation has stored, as one view in memory, and the snapshot that follows from it.

    artifacts/{d12}  revisions/{model}/{d12}  aliases/{a}  replicas/{id}  services/{kind}/{id}
    snapshot/root    registry/leader          incarnation

No I/O: listings and changes of the watch come in, compiled snapshots go out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from headrace.adapters import route_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import resources_pb2, routing_pb2
from headrace.control import names
from headrace.control.errors import Failure
from headrace.control.resources import Alias, Artifact, Replica, Revision
from headrace.control.snapshot import RoutingSnapshot, compile_snapshot
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import Listing
from headrace.runtime.snapshot_follower import ROOT_KEY

LEADER_KEY = "registry/leader"

_NOT_UNDERSTOOD = (BadRecord, DecodeError, Failure)


def artifact_key(name: str) -> str:
    """Key of "artifacts/{d12}": the name itself."""
    return name


def revision_key(name: str) -> str:
    """Key of "models/{m}/revisions/{d12}"."""
    model, digest12 = names.parse_revision(name)
    return f"revisions/{model}/{digest12}"


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
        self._entries: dict[str, Entry] = {}
        self._replicas: dict[str, tuple[int, Replica]] = {}
        """Decoded replicas by key, with the mod revision they were decoded at: there may be many."""
        self._root: tuple[int, RoutingSnapshot | None] = (0, None)

    def reset(self, listing: Listing) -> None:
        """Replace everything."""
        self.incarnation = listing.incarnation
        self._entries = {kv.key: Entry(kv.value, kv.create_revision, kv.mod_revision) for kv in listing.items}
        self._replicas = {}
        self._root = (0, None)

    def apply(self, changes: tuple[Change, ...]) -> bool:
        """Apply changes. Returns whether one may alter what is published or who leads."""
        matters = False
        for change in changes:
            matters = matters or not change.key.startswith("services/")
            if change.value is None:
                self._entries.pop(change.key, None)
                self._replicas.pop(change.key, None)
            elif change.mod_revision > self._mod_revision(change.key):
                self._entries[change.key] = Entry(change.value, change.create_revision, change.mod_revision)
        return matters

    def entry(self, key: str) -> Entry | None:
        """One stored value."""
        return self._entries.get(key)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is registered that a client could name."""
        return not any(key.startswith(("revisions/", "aliases/")) for key in self._entries)

    def root(self) -> RoutingSnapshot | None:
        """The published snapshot, if it can be understood."""
        entry = self._entries.get(ROOT_KEY)
        if entry is None:
            return None
        if self._root[0] != entry.mod_revision:
            try:
                self._root = (entry.mod_revision, route_codec.parse_snapshot(entry.value))
            except BadRecord:
                self._root = (entry.mod_revision, None)
        return self._root[1]

    def next_version(self) -> int:
        """A version above the published one, and above all that a service reports.

        A store restored from a backup holds an old root, while services have run newer ones in the same incarnation.
        """
        versions = [0]
        root = self._entries.get(ROOT_KEY)
        if root is not None:
            versions += [m.version for m in _parsed(routing_pb2.RoutingSnapshot, root.value)]
        for _, entry in self._below("services/"):
            versions += [m.snapshot_version for m in _parsed(resources_pb2.ServiceRecord, entry.value)]
        return max(versions) + 1

    def replicas(self) -> tuple[tuple[Replica, ...], tuple[str, ...]]:
        """The stored replicas, each with its record's create revision as epoch; and what was not understood."""
        found, problems = [], []
        for key, entry in self._below("replicas/"):
            known = self._replicas.get(key)
            if known is None or known[0] != entry.mod_revision:
                try:
                    message = resources_pb2.Replica.FromString(entry.value)
                    replica = route_codec.replica_from_proto(message, epoch=entry.create_revision)
                    _check_name(key, replica.name)
                except _NOT_UNDERSTOOD as error:
                    problems.append(f"{key} was left out: {error}")
                    continue
                known = self._replicas[key] = (entry.mod_revision, replica)
            found.append(known[1])
        return tuple(found), tuple(problems)

    def compile(
        self, replicas: tuple[Replica, ...], *, version: int, soft_age_s: float, hard_age_s: float, publish_time_ms: int
    ) -> Compiled:
        """Compile the snapshot of what is stored, with these replicas."""
        problems: list[str] = []
        artifacts: dict[str, Artifact] = {}
        for key, entry in self._below("artifacts/"):
            try:
                artifact = route_codec.artifact_from_proto(resources_pb2.Artifact.FromString(entry.value))
                _check_name(key, artifact_key(artifact.name))
                artifacts[artifact.name] = artifact
            except _NOT_UNDERSTOOD as error:
                problems.append(f"{key} was left out: {error}")
        revisions: list[Revision] = []
        for key, entry in self._below("revisions/"):
            try:
                message = resources_pb2.Revision.FromString(entry.value)
                artifact_of = artifacts.get(message.artifact)
                if message.artifact and artifact_of is None:
                    problems.append(f"{key} was left out: {message.artifact} does not exist")
                    continue
                revision = route_codec.revision_from_proto(
                    message,
                    model=route_codec.model_of(message.name),
                    artifact_digest=artifact_of.digest if artifact_of else "",
                )
                _check_name(key, revision_key(revision.name))
                revisions.append(revision)
            except _NOT_UNDERSTOOD as error:
                problems.append(f"{key} was left out: {error}")
        aliases: list[Alias] = []
        for key, entry in self._below("aliases/"):
            try:
                aliases.append(decode_alias(key, entry.value, entry.mod_revision))
            except _NOT_UNDERSTOOD as error:
                problems.append(f"{key} was left out: {error}")
        snapshot, left_out = compile_snapshot(
            incarnation=self.incarnation,
            version=version,
            artifacts=artifacts.values(),
            revisions=revisions,
            aliases=aliases,
            replicas=replicas,
            soft_age_s=soft_age_s,
            hard_age_s=hard_age_s,
            publish_time_ms=publish_time_ms,
        )
        return Compiled(snapshot, (*problems, *left_out))

    def _below(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        return ((key, entry) for key, entry in self._entries.items() if key.startswith(prefix))

    def _mod_revision(self, key: str) -> int:
        entry = self._entries.get(key)
        return entry.mod_revision if entry else 0


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


def _check_name(key: str, expected: str) -> None:
    if key != expected:
        raise BadRecord(f"it describes {expected or 'nothing'}")


def _parsed(message_class: Any, data: bytes) -> list[Any]:
    try:
        return [message_class.FromString(data)]
    except DecodeError:
        return []
