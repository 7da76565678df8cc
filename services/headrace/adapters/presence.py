"""What a running service says of itself: a ServiceRecord under its own lease, kept up to date.

The record holds the snapshot that the service runs and, if it refused a newer one, why: the acknowledgement that
operators and controllers look at. It is written behind the service's back; nothing waits for the store.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version

from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Failure
from headrace.runtime.membership import Membership
from headrace.runtime.snapshot_follower import SnapshotFollower
from headrace.runtime.telemetry import get_logger

MOVES_PER_S_MAX = 10.0


def service_key(name: str) -> str:
    """Key of the record of "routers/{r}", "schedulers/{s}" or "registries/{g}"."""
    return f"services/{name}"


def software_version() -> str:
    """Version of the installed package; "0+unknown" from a bare source tree."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "0+unknown"


class Presence:
    """Keeps one ServiceRecord. Run `run` in a task of its own; it registers, then follows the snapshot.

    Args:
        membership: whose lease the record lives under.
        name: "routers/{r}", "schedulers/{s}" or "registries/{g}".
        endpoint: host:port of the gRPC server.
        metrics_endpoint: host:port of the metrics.
        follower: the snapshot that the service runs.
    """

    def __init__(
        self,
        membership: Membership,
        name: str,
        *,
        endpoint: str,
        metrics_endpoint: str,
        follower: SnapshotFollower,
    ) -> None:
        self._membership = membership
        self._key = service_key(name)
        self._follower = follower
        self._changed = asyncio.Event()
        self._record = resources_pb2.ServiceRecord(
            name=name, endpoint=endpoint, metrics_endpoint=metrics_endpoint, version=software_version()
        )
        self._record.start_time.GetCurrentTime()
        follower.observe(self._changed.set)

    async def run(self) -> None:
        """Keep the record until cancelled.

        Raises:
            Failure: STALE_EPOCH, when another process of the same name has taken the record over.
        """
        registered = False
        while True:
            self._changed.clear()
            value = self._value()
            try:
                if registered:
                    await self._membership.update(self._key, value)
                else:
                    await self._membership.register(self._key, value)
                    registered = True
            except Failure as failure:
                if registered:
                    raise
                get_logger().warning("presence_not_registered", why=failure.message)
                self._changed.set()
            await asyncio.sleep(1.0 / MOVES_PER_S_MAX)
            await self._changed.wait()

    async def withdraw(self) -> None:
        """Take the record away; without the store it goes with the lease."""
        try:
            await self._membership.withdraw(self._key)
        except Failure as failure:
            get_logger().info("presence_not_withdrawn", why=failure.message)

    def _value(self) -> bytes:
        snapshot = self._follower.current
        self._record.snapshot_version = snapshot.version if snapshot else 0
        self._record.snapshot_digest = snapshot.digest if snapshot else ""
        self._record.snapshot_refusal = self._follower.refusal
        return self._record.SerializeToString()
