"""Snapshots as the store has them, written by tests."""

from __future__ import annotations

from headrace.adapters.etcd import EtcdStore
from headrace.adapters.shard_codec import SnapshotEncoder, encode_root
from headrace.control.snapshot import RoutingSnapshot
from headrace.runtime.snapshot_follower import ROOT_KEY, shard_key


def stored_keys(snapshot: RoutingSnapshot) -> dict[str, bytes]:
    """All keys of a snapshot with their values, the root last."""
    stored = SnapshotEncoder().encode(snapshot)
    shards = {shard_key(shard.ref.digest): shard.data for shard in stored.shards}
    return {**shards, ROOT_KEY: encode_root(stored.root)}


async def store_snapshot(store: EtcdStore, snapshot: RoutingSnapshot) -> None:
    """Write a snapshot as a Registry does, without its conditions."""
    for key, value in stored_keys(snapshot).items():
        await store.put(key, value)
