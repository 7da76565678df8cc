"""A snapshot's root and shards to and from the bytes that the store keeps.

A shard's bytes are what its digest is of: encoding is deterministic, and whoever decodes compares the digest first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from headrace.adapters import route_codec, tenant_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import routing_pb2
from headrace.control.shards import Content, Root, Shard, ShardRef, cut, snapshot_digest
from headrace.control.snapshot import InconsistentSnapshot, Part, RoutingSnapshot


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One shard as it is stored."""

    ref: ShardRef
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot as it is stored."""

    root: Root
    shards: tuple[StoredShard, ...]
    """All of them, by name."""


class SnapshotEncoder:
    """Encodes one snapshot after another, and anew only the shards whose content differs."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Content, StoredShard]] = {}

    def encode(self, snapshot: RoutingSnapshot, counts: Mapping[str, int] | None = None) -> StoredSnapshot:
        """Encode; `counts`: see `shards.cut`."""
        encoded: dict[str, tuple[Content, StoredShard]] = {}
        for name, content in cut(snapshot, counts or {}).items():
            last = self._last.get(name)
            encoded[name] = last if last is not None and last[0] == content else (content, _stored(name, content))
        self._last = encoded
        shards = tuple(stored for _, stored in encoded.values())
        refs = tuple(stored.ref for stored in shards)
        root = Root(
            incarnation=snapshot.incarnation,
            version=snapshot.version,
            digest=snapshot_digest(refs, snapshot.revocations),
            soft_age_s=snapshot.soft_age_s,
            hard_age_s=snapshot.hard_age_s,
            publish_time_ms=snapshot.publish_time_ms,
            shards=refs,
            revocations=snapshot.revocations,
        )
        return StoredSnapshot(root, shards)


def encode_root(root: Root) -> bytes:
    """Bytes of the root key."""
    return root_to_proto(root).SerializeToString(deterministic=True)


def root_to_proto(root: Root) -> routing_pb2.RoutingRoot:
    """Encode a root."""
    return routing_pb2.RoutingRoot(
        incarnation=root.incarnation,
        version=root.version,
        digest=root.digest,
        publish_time=route_codec.timestamp(root.publish_time_ms),
        soft_age=route_codec.duration(root.soft_age_s),
        hard_age=route_codec.duration(root.hard_age_s),
        shards=[routing_pb2.ShardRef(name=ref.name, digest=ref.digest) for ref in root.shards],
        revocations=map(route_codec.revocation_to_proto, root.revocations),
    )


def parse_root(data: bytes) -> Root:
    """Decode the root key.

    Raises:
        BadRecord: it holds no RoutingRoot.
    """
    try:
        message = routing_pb2.RoutingRoot.FromString(data)
    except DecodeError:
        raise BadRecord("the root key does not hold a RoutingRoot") from None
    if not message.incarnation or not message.version:
        raise BadRecord("the root key holds no incarnation or no version")
    return Root(
        incarnation=message.incarnation,
        version=message.version,
        digest=message.digest,
        soft_age_s=message.soft_age.ToTimedelta().total_seconds(),
        hard_age_s=message.hard_age.ToTimedelta().total_seconds(),
        publish_time_ms=message.publish_time.ToMilliseconds(),
        shards=tuple(ShardRef(ref.name, ref.digest) for ref in message.shards),
        revocations=tuple(map(route_codec.revocation_from_proto, message.revocations)),
    )


def parse_shard(ref: ShardRef, data: bytes) -> Shard:
    """Decode and check a shard.

    Raises:
        BadRecord: it has another digest or name, or a record in it is not understood.
    """
    digest = hashlib.sha256(data).digest()
    if digest != ref.digest:
        raise BadRecord(f"the shard {ref.name} has digest {digest.hex()[:12]}, not {ref.digest.hex()[:12]}")
    try:
        message = routing_pb2.Shard.FromString(data)
    except DecodeError:
        raise BadRecord(f"the shard {ref.name} holds no Shard") from None
    if message.name != ref.name:
        raise BadRecord(f"the shard {ref.name} holds {message.name or 'no name'}")
    artifacts = tuple(map(route_codec.artifact_from_proto, message.artifacts))
    digests = {a.name: a.digest for a in artifacts}
    try:
        part = Part(
            artifacts,
            tuple(
                route_codec.revision_from_proto(
                    r, model=route_codec.model_of(r.name), artifact_digest=digests.get(r.artifact, "")
                )
                for r in message.revisions
            ),
            tuple(map(route_codec.alias_from_proto, message.aliases)),
            tuple(map(route_codec.replica_from_proto, message.replicas)),
            tuple(map(tenant_codec.tenant_from_proto, message.tenants)),
        )
    except InconsistentSnapshot as error:
        raise BadRecord(str(error)) from None
    return Shard(message.name, part)


def _stored(name: str, content: Content) -> StoredShard:
    message = routing_pb2.Shard(
        name=name,
        artifacts=map(route_codec.artifact_to_proto, content.artifacts),
        revisions=map(route_codec.revision_to_proto, content.revisions),
        aliases=map(route_codec.alias_to_proto, content.aliases),
        replicas=map(route_codec.replica_to_proto, content.replicas),
        tenants=map(tenant_codec.tenant_to_proto, content.tenants),
    )
    data = message.SerializeToString(deterministic=True)
    return StoredShard(ShardRef(name, hashlib.sha256(data).digest()), data)
