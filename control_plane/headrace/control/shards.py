"""How a routing snapshot is cut into shards, and put together again.

    root: version, revocations, and for each shard its name and the digest of its stored bytes
      aliases                 all aliases
      models/{m}              the revisions of a model, with their artifacts
      replicas/{m}/{i}-of-{n} a share of a model's replicas, by a hash of their names
      tenants/{i}-of-{n}      a share of the tenants with their keys, likewise

A shard is stored under its digest and never changes. So one replica's change writes one small shard and a root, and
whoever has the other shards reads only these. A shard's content is a `Part`: indexed and checked when it is decoded,
and shared by all snapshots that have it.

Sans-io: bytes and their digests are the codec's (`headrace.adapters.shard_codec`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from headrace.control.resources import Alias, Artifact, Replica, Revision
from headrace.control.revocation import Revocation
from headrace.control.snapshot import InconsistentSnapshot, Part, RoutingSnapshot
from headrace.control.tenants import Tenant

N = TypeVar("N", Replica, Tenant)

ALIASES = "aliases"
MODELS = "models/"
REPLICAS = "replicas/"
TENANTS = "tenants/"

BUCKET_REPLICAS = 128
"""Replicas, or tenants, in one bucket, on average, at most: some 25 KiB, written and decoded anew when one changes."""

SHRINK = 8
"""Buckets become fewer only when they hold this many times less: a count at a threshold does not go to and fro."""


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One shard of a snapshot: its name, and the SHA-256 of its stored bytes."""

    name: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Root:
    """What the root key holds; a snapshot is this and the shards that it names."""

    incarnation: str
    version: int
    digest: str
    soft_age_s: float
    hard_age_s: float
    publish_time_ms: int = 0
    shards: tuple[ShardRef, ...] = ()
    """By name."""
    revocations: tuple[Revocation, ...] = ()
    """By name."""


class Content(NamedTuple):
    """What a shard holds; the arguments of its `Part`."""

    artifacts: tuple[Artifact, ...] = ()
    revisions: tuple[Revision, ...] = ()
    aliases: tuple[Alias, ...] = ()
    replicas: tuple[Replica, ...] = ()
    tenants: tuple[Tenant, ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """One decoded shard."""

    name: str
    part: Part


def snapshot_digest(shards: Iterable[ShardRef], revocations: Iterable[Revocation]) -> str:
    """SHA-256 in hex over the shards' names and digests, in order, and the revocations."""
    digest = hashlib.sha256(b"headrace.snapshot.v2\0")
    for shard in shards:
        digest.update(f"shard\0{shard.name}\0".encode() + shard.digest)
    for revoked in revocations:
        fields = (revoked.name, revoked.reason, str(revoked.end_running), str(revoked.create_time_ms))
        digest.update(b"revocation\0" + b"".join(f"{len(f.encode())}:{f}".encode() for f in fields))
    return digest.hexdigest()


def bucket_counts(shard_names: Iterable[str]) -> dict[str, int]:
    """Into how many buckets the replicas of each model are cut, by the names of a root's shards; tenants: TENANTS."""
    counts = {}
    for name in shard_names:
        if name.startswith(REPLICAS):
            model, _, bucket = name.removeprefix(REPLICAS).rpartition("/")
            count = bucket.rpartition("-of-")[2]
            counts[model] = int(count) if count.isdecimal() else 1
        elif name.startswith(TENANTS):
            count = name.rpartition("-of-")[2]
            counts[TENANTS] = int(count) if count.isdecimal() else 1
    return counts


def bucket_count(replicas: int, before: int = 1) -> int:
    """A power of two; `before` stays as long as it is not too wrong."""
    count = max(before, 1)
    while replicas > BUCKET_REPLICAS * count:
        count *= 2
    while count > 1 and replicas * SHRINK < BUCKET_REPLICAS * count:
        count //= 2
    return count


def cut(snapshot: RoutingSnapshot, counts: Mapping[str, int]) -> dict[str, Content]:
    """The contents of a snapshot's shards, by shard name in order.

    Args:
        snapshot: what to cut.
        counts: the buckets that each model, and TENANTS, has in the published snapshot.
    """
    by_model: dict[str, list[Revision]] = {}
    for revision in snapshot.revisions:
        by_model.setdefault(revision.model, []).append(revision)
    replicas: dict[str, list[Replica]] = {}
    for name, found in snapshot.replicas_of.items():
        if found:
            replicas.setdefault(snapshot.revision_by_name[name].model, []).extend(found)
    shards: dict[str, Content] = {}
    if snapshot.aliases:
        shards[ALIASES] = Content(aliases=snapshot.aliases)
    for model, revisions in by_model.items():
        shards[MODELS + model] = Content(_artifacts_of(snapshot, revisions), tuple(revisions))
    for model, members in replicas.items():
        for bucket, some in _buckets(members, counts.get(model, 1)).items():
            shards[f"{REPLICAS}{model}/{bucket}"] = Content(replicas=some)
    for bucket, tenants in _buckets(snapshot.tenants, counts.get(TENANTS, 1)).items():
        shards[f"{TENANTS}{bucket}"] = Content(tenants=tenants)
    return dict(sorted(shards.items()))


def assemble(root: Root, shards: Mapping[bytes, Shard]) -> RoutingSnapshot:
    """Put a snapshot together out of decoded shards, which it shares.

    Args:
        root: what it is made of.
        shards: at least those that it names, by digest.

    Raises:
        InconsistentSnapshot: the digest does not match, or references do not resolve.
    """
    digest = snapshot_digest(root.shards, root.revocations)
    if digest != root.digest:
        raise InconsistentSnapshot(f"snapshot {root.version} has digest {digest[:12]}, not {root.digest[:12]}")
    parts = []
    for ref in root.shards:
        shard = shards[ref.digest]
        if shard.name != ref.name:
            raise InconsistentSnapshot(f"the shard {ref.name} holds {shard.name}")
        parts.append(shard.part)
    return RoutingSnapshot(
        incarnation=root.incarnation,
        version=root.version,
        soft_age_s=root.soft_age_s,
        hard_age_s=root.hard_age_s,
        publish_time_ms=root.publish_time_ms,
        revocations=root.revocations,
        digest=root.digest,
        parts=tuple(parts),
    )


def _buckets(members: Sequence[N], before: int) -> dict[str, tuple[N, ...]]:
    """Members by bucket, "{i}-of-{n}", each by name."""
    count = bucket_count(len(members), before)
    buckets: dict[int, list[N]] = {}
    for member in members:
        buckets.setdefault(zlib.crc32(member.name.encode()) % count, []).append(member)
    return {f"{index}-of-{count}": tuple(sorted(some, key=lambda m: m.name)) for index, some in buckets.items()}


def _artifacts_of(snapshot: RoutingSnapshot, revisions: Iterable[Revision]) -> tuple[Artifact, ...]:
    wanted = sorted({name for r in revisions for name in r.artifacts})
    return tuple(snapshot.artifact_by_name[name] for name in wanted)
