"""What a running service says of itself in the store: where it is, and which snapshot it runs or has refused.

async with Membership(store) as membership, asyncio.TaskGroup() as tasks:
report = ServiceReport(membership, follower, name="routers/r1", endpoint=server.endpoint)
tasks.create_task(report.run())
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time

from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Failure
from headrace.runtime.membership import Membership
from headrace.runtime.settings import SettingsError
from headrace.runtime.snapshot_follower import SnapshotFollower
from headrace.runtime.telemetry import get_logger

SETTLE_S = 0.2
"""Changes closer together than this are written as one, seconds: a fleet's reports load the store least."""

RETRY_S = 1.0


class ServiceReport:
    """Keeps one ServiceRecord up to date under the process's lease.

    Args:
        membership: the process's leased records.
        follower: whose snapshot is reported.
        name: "routers/{r}", "schedulers/{s}" or "registries/{g}"; the key is "services/" and this.
        endpoint: host:port of its gRPC server.
        metrics_endpoint: host:port of its metrics, or "".
        admin_endpoint: host:port of its RouterService, or "".
        incarnation: differs for each run of its process, or "".
    """

    def __init__(
        self,
        membership: Membership,
        follower: SnapshotFollower,
        *,
        name: str,
        endpoint: str,
        metrics_endpoint: str = "",
        admin_endpoint: str = "",
        incarnation: str = "",
    ) -> None:
        self._membership = membership
        self._follower = follower
        self._key = f"services/{name}"
        self._changed = asyncio.Event()
        self._record = resources_pb2.ServiceRecord(
            name=name,
            endpoint=endpoint,
            metrics_endpoint=metrics_endpoint,
            admin_endpoint=admin_endpoint,
            incarnation=incarnation,
            version=software_version(),
        )
        self._record.start_time.FromMilliseconds(int(time.time() * 1000))
        follower.observe(self._changed.set)

    async def run(self) -> None:
        """Register, then report each change, until cancelled. Without a store it waits for one.

        Raises:
            SettingsError: another process has taken the name over; two of one name cannot both serve.
        """
        while True:
            try:
                await self._membership.register(self._key, self._value())
                break
            except Failure as failure:
                get_logger().info("service_record_delayed", why=failure.message)
                await asyncio.sleep(RETRY_S)
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            try:
                await self._membership.update(self._key, self._value())
            except Failure as failure:
                name = self._record.name
                raise SettingsError(f"setting 'name': another process took over {name} ({failure.message})") from None

    async def withdraw(self) -> None:
        """Delete the record; without a store it goes with the lease."""
        try:
            await self._membership.withdraw(self._key)
        except Failure as failure:
            get_logger().info("service_record_not_withdrawn", why=failure.message)

    def _value(self) -> bytes:
        current = self._follower.current
        self._record.snapshot_version = current.version if current else 0
        self._record.snapshot_digest = current.digest if current else ""
        self._record.snapshot_refusal = self._follower.refusal
        return self._record.SerializeToString(deterministic=True)


def software_version() -> str:
    """Version of the installed software; "0" in a checkout that was never installed."""
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "0"
