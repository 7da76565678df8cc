"""The Registry as a process: what it is made of, and the order in which it starts and stops."""

from __future__ import annotations

import asyncio

from headrace.adapters import shard_codec
from headrace.adapters.etcd import EtcdStore
from headrace.api.registry.v1 import registry_service_pb2
from headrace.control.errors import Failure
from headrace.registry.metrics import RegistryMetrics
from headrace.registry.publisher import Publisher
from headrace.registry.service import RegistryService
from headrace.registry.settings import RegistrySettings
from headrace.rpc.server import Server
from headrace.runtime.membership import Membership
from headrace.runtime.service_report import ServiceReport
from headrace.runtime.settings import SettingsError
from headrace.runtime.snapshot_follower import SnapshotFollower
from headrace.runtime.tasks import cancel_and_wait
from headrace.runtime.telemetry import get_logger, serve_metrics

SETTLE_S = 10.0
"""How long a start waits for the first published snapshot before it serves without one, seconds."""


async def run(settings: RegistrySettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; then refuse, finish what runs, resign, withdraw, and revoke the lease last.

    Raises:
        SettingsError: etcd cannot be reached, or an address cannot be bound.
    """
    store = await EtcdStore.connect(settings, "registry")
    try:
        membership = Membership(store, settings.lease_ttl_s)
        try:
            async with membership:
                await _serve(settings, stop, store, membership)
        except Failure as failure:
            raise SettingsError(f"registry setting 'etcd': {failure.message}") from None
    finally:
        await store.aclose()


async def _serve(settings: RegistrySettings, stop: asyncio.Event, store: EtcdStore, membership: Membership) -> None:
    metrics = RegistryMetrics()
    publisher = Publisher(
        store,
        membership,
        name=settings.name,
        soft_age_s=settings.snapshot_soft_age_s,
        hard_age_s=settings.snapshot_hard_age_s,
    )
    metrics.follow(publisher, membership)
    metrics_endpoint = serve_metrics(metrics.registry, settings.metrics_listen)
    server = Server(settings.listen, observe=metrics.observe_call)
    server.add(registry_service_pb2.DESCRIPTOR.services_by_name["RegistryService"], RegistryService(store))
    await server.start()
    endpoint = settings.advertise or server.endpoint
    # Its own reader: what it publishes is checked as every Router checks it.
    follower = SnapshotFollower(store, shard_codec)
    report = ServiceReport(
        membership,
        follower,
        name=f"registries/{settings.name}",
        endpoint=endpoint,
        metrics_endpoint=metrics_endpoint,
    )
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part.run()) for part in (publisher, follower, report)]
        try:
            await _settle(publisher, stop)
            await server.set_serving(True)
            get_logger().info("registry_serves", endpoint=endpoint, metrics=metrics_endpoint, store=store.endpoint)
            await stop.wait()
        finally:
            get_logger().info("registry_stops")
            await server.set_serving(False)
            await server.stop(settings.drain_grace_s)
            await cancel_and_wait(*running)
            await _resign(publisher)
            await report.withdraw()


async def _settle(publisher: Publisher, stop: asyncio.Event) -> None:
    """Wait for the first snapshot, or for the end, or for SETTLE_S."""
    waits = [asyncio.ensure_future(event.wait()) for event in (publisher.settled, stop)]
    try:
        await asyncio.wait(waits, timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(*waits)


async def _resign(publisher: Publisher) -> None:
    try:
        await publisher.resign()
    except Failure as failure:
        get_logger().info("leader_not_resigned", why=failure.message)
