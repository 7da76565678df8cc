"""Published snapshots as the store has them: the one in use and those kept for a rollback.

    snapshot/root         the published one, whole
    history/{version}     earlier ones, as far as they last: models, aliases, revocations; not their replicas

A version is kept when models or aliases changed with it; the newest SNAPSHOTS_KEPT of those are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from headrace.adapters import route_codec, shard_codec
from headrace.adapters.route_codec import BadRecord
from headrace.control.errors import Failure, Reason
from headrace.control.resources import Alias
from headrace.control.shards import ALIASES, Root, ShardRef, assemble, snapshot_digest
from headrace.control.snapshot import RoutingSnapshot
from headrace.registry.catalogue import HISTORY_PREFIX, decode_alias, history_key, revision_key
from headrace.registry.shard_keeping import lasting
from headrace.runtime.ports import Compare, KeyValue, Put, Store
from headrace.runtime.snapshot_follower import ROOT_KEY, shard_key

ALIASES_MAX = 40
"""Aliases that one rollback can change: each takes up to three operations of a transaction's 128."""

_TRIES = 5
_READS = 16
"""Shards read at a time."""


async def list_roots(store: Store) -> list[Root]:
    """The published root and those that are kept, the newest first.

    Raises:
        Failure: the store does not answer.
    """
    roots = {}
    for kv in (await store.range(HISTORY_PREFIX)).items:
        root = _parsed(kv)
        if root is not None:
            roots[root.version] = root
    published = await store.get(ROOT_KEY)
    root = _parsed(published) if published is not None else None
    if root is not None:
        roots[root.version] = root
    return [roots[version] for version in sorted(roots, reverse=True)]


async def read_snapshot(store: Store, version: int = 0) -> RoutingSnapshot:
    """The published snapshot, or with `version` that one, without its replicas if it is an earlier one.

    Raises:
        Failure: NO_SNAPSHOT, NOT_FOUND, or the store does not answer.
    """
    for _ in range(_TRIES):
        root, is_published = await _root(store, version)
        try:
            found = await _assembled(store, root, root.shards if is_published else lasting(root))
        except ValueError:
            break
        if found is not None:
            return found
    raise Failure(Reason.NO_SNAPSHOT, "The stored routing snapshot is damaged; it will be replaced.")


async def kept_revisions(store: Store) -> dict[str, int]:
    """Revisions that aliases of kept snapshots name, with the newest such version: a rollback needs them.

    Raises:
        Failure: the store does not answer.
    """
    found: dict[str, int] = {}
    seen: set[bytes] = set()
    for root in await list_roots(store):
        for ref in root.shards:
            if ref.name != ALIASES or ref.digest in seen:
                continue
            seen.add(ref.digest)
            kv = await store.get(shard_key(ref.digest))
            if kv is None:
                continue
            try:
                aliases = shard_codec.parse_shard(ref, kv.value).part.aliases
            except BadRecord:
                continue
            for alias in aliases:
                for target in alias.targets:
                    found.setdefault(target.revision, root.version)
    return found


@dataclass(frozen=True, slots=True)
class RollBack:
    """One transaction that makes the aliases what they were."""

    compares: tuple[Compare, ...]
    """Nothing has changed since it was planned, and the revisions exist."""
    puts: tuple[Put, ...]
    deletes: tuple[str, ...]
    changed: tuple[str, ...]
    """Aliases that are set or deleted, by name."""
    before: tuple[Alias, ...]
    after: tuple[Alias, ...]


async def plan_roll_back(store: Store, version: int, *, now_ms: int) -> RollBack:
    """Plan to set all aliases to what they were in a snapshot that is kept; for the caller to commit.

    Raises:
        Failure: NOT_FOUND: it is not kept; INVALID_REQUEST: too many aliases differ; or the store does not answer.
    """
    wanted = (await read_snapshot(store, version)).alias_by_name
    stored = {kv.key: kv for kv in (await store.range("aliases/")).items}
    current = {key: _alias(kv) for key, kv in stored.items()}
    changed = sorted(
        name
        for name in wanted.keys() | current.keys()
        if name not in wanted or name not in current or wanted[name].targets != current[name].targets
    )
    if len(changed) > ALIASES_MAX:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"{len(changed)} aliases differ from snapshot {version}; one rollback changes at most {ALIASES_MAX}.",
            field="version",
        )
    set_again = [wanted[name] for name in changed if name in wanted]
    revisions = sorted({target.revision for alias in set_again for target in alias.targets})
    same = [Compare(name, mod_revision=stored[name].mod_revision if name in stored else 0) for name in changed]
    return RollBack(
        compares=(*same, *(Compare(revision_key(revision), exists=True) for revision in revisions)),
        puts=tuple(_put(alias, now_ms) for alias in set_again),
        deletes=tuple(name for name in changed if name not in wanted),
        changed=tuple(changed),
        before=tuple(current[name] for name in changed if name in current),
        after=tuple(set_again),
    )


async def _root(store: Store, version: int) -> tuple[Root, bool]:
    """A root, and whether it is the published one."""
    published = await store.get(ROOT_KEY)
    root = _parsed(published) if published is not None else None
    if root is not None and version in (0, root.version):
        return root, True
    if not version:
        why = "was published yet; the Registry may have just started" if published is None else "can be read"
        raise Failure(Reason.NO_SNAPSHOT, f"No routing snapshot {why}.")
    kept = await store.get(history_key(version))
    earlier = _parsed(kept) if kept is not None else None
    if earlier is None:
        raise Failure(
            Reason.NOT_FOUND,
            f"Snapshot {version} is not kept; `headrace snapshot history` lists those that are.",
            field="version",
        )
    return earlier, False


async def _assembled(store: Store, root: Root, refs: tuple[ShardRef, ...]) -> RoutingSnapshot | None:
    """None: a shard is not there, as happens when a newer root was published meanwhile."""
    shards = {}
    for start in range(0, len(refs), _READS):
        some = refs[start : start + _READS]
        for ref, kv in zip(some, await asyncio.gather(*(store.get(shard_key(r.digest)) for r in some)), strict=True):
            if kv is None:
                return None
            shards[ref.digest] = shard_codec.parse_shard(ref, kv.value)
    part = replace(root, shards=refs, digest=snapshot_digest(refs, root.revocations))
    return replace(assemble(part, shards), digest=root.digest)


def _parsed(kv: KeyValue) -> Root | None:
    try:
        return shard_codec.parse_root(kv.value)
    except BadRecord:
        return None


def _alias(kv: KeyValue) -> Alias:
    """The stored alias; a damaged one is as good as empty, and will be overwritten."""
    try:
        return decode_alias(kv.key, kv.value, kv.mod_revision)
    except (BadRecord, DecodeError):
        return Alias(kv.key, ())


def _put(alias: Alias, now_ms: int) -> Put:
    message = route_codec.alias_to_proto(replace(alias, etag="", update_time_ms=now_ms))
    return Put(alias.name, message.SerializeToString(deterministic=True))
