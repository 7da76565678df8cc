"""Routing snapshots of the RegistryService: the published one, those that are kept, and the way back to one."""

from __future__ import annotations

from typing import Any

from headrace.adapters import route_codec, shard_codec, tenant_codec
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.registry import history
from headrace.registry.audit import Change
from headrace.registry.catalogue import revision_key
from headrace.registry.records import TRIES, Records, busy, not_found


class SnapshotCalls(Records):
    """The methods that are about snapshots."""

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> pb.GetSnapshotResponse:  # noqa: N802
        """Return the published snapshot, or an earlier one that is kept, without its replicas."""
        snapshot = await history.read_snapshot(self._store, request.version)
        message = route_codec.snapshot_to_proto(snapshot)
        tenants = sorted(snapshot.tenants, key=lambda t: t.name)
        message.tenants.extend(tenant_codec.tenant_to_proto(t, with_digests=False) for t in tenants)
        return pb.GetSnapshotResponse(snapshot=message)

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Any) -> pb.ListSnapshotsResponse:  # noqa: N802
        """List the roots, the newest first."""
        roots = await history.list_roots(self._store)
        return pb.ListSnapshotsResponse(roots=map(shard_codec.root_to_proto, roots))

    async def RollBack(self, request: pb.RollBackRequest, context: Any) -> pb.RollBackResponse:  # noqa: N802
        """Set all aliases to what they were, in one transaction with its audit record."""
        for _ in range(TRIES):
            plan = await history.plan_roll_back(self._store, request.version, now_ms=self._now_ms())
            if not plan.changed:
                return pb.RollBackResponse()
            before, after = (
                pb.ListAliasesResponse(aliases=map(route_codec.alias_to_proto, aliases))
                for aliases in (plan.before, plan.after)
            )
            change = Change("RollBack", f"snapshots/{request.version}", before, after)
            if (await self._commit(context, change, plan.compares, plan.puts, plan.deletes)).succeeded:
                return pb.RollBackResponse(changed=plan.changed)
            for target in (target for alias in plan.after for target in alias.targets):
                if await self._store.get(revision_key(target.revision)) is None:
                    raise not_found(target.revision, "version")
        raise busy(f"snapshots/{request.version}")
