"""The Router as a process: what it is made of, in what order it starts, and in what order it stops."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time

from headrace.adapters import shard_codec
from headrace.adapters.etcd import EtcdStore
from headrace.api.inference.v1 import inference_service_pb2
from headrace.api.router.v1 import router_service_pb2
from headrace.control import names
from headrace.control.idempotency import Origin
from headrace.control.routing import Routing
from headrace.router.admin import SERIALIZERS as ADMIN_SERIALIZERS
from headrace.router.admin import RouterService
from headrace.router.demands import rules_of
from headrace.router.explaining import Explainer
from headrace.router.fleet_metrics import FleetMetrics
from headrace.router.metrics import RouterMetrics
from headrace.router.routes import Routes
from headrace.router.routing_metrics import RoutingMetrics
from headrace.router.service import SERIALIZERS, InferenceService
from headrace.router.settings import RouterSettings, is_loopback
from headrace.rpc.guard import Guard, health_and_reflection
from headrace.rpc.server import Server
from headrace.rpc.tls import TlsFiles, server_credentials
from headrace.runtime.garbage import LongLived
from headrace.runtime.membership import Membership
from headrace.runtime.service_report import ServiceReport
from headrace.runtime.snapshot_follower import Freshness, SnapshotFollower
from headrace.runtime.tasks import cancel_and_wait
from headrace.runtime.telemetry import get_logger, serve_metrics

TEND_S = 0.25
STOP_GRACE_S = 1.0


async def run(settings: RouterSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`, then drain.

    Raises:
        SettingsError: something it needs cannot be had; names the setting.
    """
    name = f"routers/{names.id_from_text(settings.name)}"
    metrics = RouterMetrics()
    metrics_endpoint = serve_metrics(metrics.registry, settings.metrics_listen)
    here = Origin(name, secrets.token_hex(8))
    routes = Routes(router=name, incarnation=here.incarnation, routing=Routing(rules_of(settings)))
    RoutingMetrics(metrics.registry, routes.routing)
    FleetMetrics(metrics.registry, routes)
    service = InferenceService(settings, routes, metrics, here)
    server = client_server(settings, service, metrics)
    admin = admin_server(settings, service, routes, metrics)
    async with contextlib.AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        await admin.start()
        stack.push_async_callback(admin.stop, STOP_GRACE_S)
        store = await EtcdStore.connect(settings, "router")
        stack.push_async_callback(store.aclose)
        admin_endpoint = settings.admin_advertise or admin.endpoint
        service.sharing.keys.use(store, admin_endpoint)
        await admin.set_serving(True)
        stack.push_async_callback(service.sharing.close)
        follower = SnapshotFollower(store, shard_codec)
        routes.is_too_old = lambda: follower.freshness(time.monotonic()) is Freshness.HARD
        follower.subscribe(routes.apply)
        follower.subscribe(service.sessions.end_revoked)
        follower.subscribe(LongLived().take)
        stack.push_async_callback(routes.close)
        membership = await stack.enter_async_context(Membership(store))
        report = ServiceReport(
            membership, follower, name=name, endpoint=settings.advertise or server.endpoint,
            metrics_endpoint=metrics_endpoint, admin_endpoint=admin_endpoint, incarnation=here.incarnation,
        )  # fmt: skip
        get_logger().info("listening", endpoint=server.endpoint, metrics=metrics_endpoint, router=name)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(follower.run(), name="snapshot-follower"),
                group.create_task(report.run(), name="service-report"),
                group.create_task(service.elsewhere.fleet.run(store), name="fleet"),
                group.create_task(_tend(server, service, routes, follower, metrics), name="tend"),
            ]
            await stop.wait()
            get_logger().info("draining", requests=len(service.sessions), grace_s=settings.drain_grace_s)
            await cancel_and_wait(tasks[-1])
            await server.set_serving(False)
            await admin.set_serving(False)
            await service.drain(settings.drain_grace_s)
            await cancel_and_wait(*tasks)
            await report.withdraw()
    get_logger().info("stopped")


def client_server(settings: RouterSettings, service: InferenceService, metrics: RouterMetrics) -> Server:
    """The server for clients, not started: with TLS and closed health where the settings say so.

    Raises:
        SettingsError: a file of TLS cannot be used; names the setting.
    """
    credentials = server_credentials(
        TlsFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_ca), "router"
    )
    server = Server(
        settings.listen,
        observe=metrics.observe,
        credentials=credentials,
        guard=None if settings.public_health else Guard(health_and_reflection(service.identities.check_known)),
    )
    if settings.authentication == "required" and credentials is None and not settings.tenant_metadata:
        get_logger().warning(
            "keys_in_clear", advice="set tls_certificate and tls_key, or put a proxy with TLS in front"
        )
    server.add(
        inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"],
        service,
        request_bytes_max=settings.request_bytes_max,
        serializers=SERIALIZERS,
    )
    return server


def admin_server(settings: RouterSettings, service: InferenceService, routes: Routes, metrics: RouterMetrics) -> Server:
    """The server for operators and other Routers, not started; with a secret it lets in only those who have it.

    Raises:
        SettingsError: the secret's file cannot be used; names the setting.
    """
    secret = service.sharing.peers.secret
    is_open = secret is None or settings.admin_insecure
    if is_open and not is_loopback(settings.admin_listen):
        get_logger().warning("admin_port_open", admin_listen=settings.admin_listen, advice="set admin_secret_file")
    server = Server(
        settings.admin_listen,
        setting="admin_listen",
        observe=metrics.observe,
        guard=None if secret is None or is_open else Guard(secret.checks(metrics.observe)),
    )
    server.add(
        router_service_pb2.DESCRIPTOR.services_by_name["RouterService"],
        RouterService(service.elsewhere.fleet.here, service.sharing, service.lookups, Explainer(settings, routes)),
        serializers=ADMIN_SERIALIZERS,
    )
    return server


async def _tend(
    server: Server, service: InferenceService, routes: Routes, follower: SnapshotFollower, metrics: RouterMetrics
) -> None:
    """Keep requests' limits, health, gauges and links in line with the time: serving means having a snapshot."""
    serving = False
    while True:
        has_snapshot = follower.current is not None
        if has_snapshot != serving:
            serving = has_snapshot
            await server.set_serving(serving)
        metrics.snapshot_version.set(follower.current.version if follower.current else 0)
        metrics.snapshot_age.set(follower.age_s(time.monotonic()) or 0.0)
        metrics.take_links(routes.links)
        service.tend()
        await routes.sweep()
        await asyncio.sleep(TEND_S)
