"""Run a Scheduler: everything is made here, and ends here in the order that loses nothing.

stop -> health NOT_SERVING -> replicas DRAINING in etcd, new attempts refused -> running ones finish, within the
grace -> the rest ends DRAINED -> Tritons stop -> records withdrawn -> streams end -> lease revoked
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from headrace.adapters import shard_codec
from headrace.adapters.etcd import EtcdStore
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempts import AttemptLedger
from headrace.control.resources import FailureDomain
from headrace.rpc.server import Server
from headrace.runtime.membership import Membership
from headrace.runtime.service_report import ServiceReport
from headrace.runtime.snapshot_follower import SnapshotFollower
from headrace.runtime.tasks import cancel_and_wait
from headrace.runtime.telemetry import get_logger, serve_metrics
from headrace.scheduler.artifacts import ArtifactVerifier
from headrace.scheduler.engine_run import Machine
from headrace.scheduler.fleet import Fleet
from headrace.scheduler.metrics import make_registry
from headrace.scheduler.relay import Relay
from headrace.scheduler.service import SchedulerService
from headrace.scheduler.settings import SchedulerSettings
from headrace.scheduler.signatures import required_signatures
from headrace.scheduler.vitals import Vitals
from headrace.scheduler.worker import Identity
from headrace.triton import shared_memory

TICK_S = 1.0
CLOSE_S = 2.0
FRAME_BYTES_MAX = 16 * 1024 * 1024


async def run(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then drain and end.

    Raises:
        SettingsError: a setting is wrong, or what it names cannot be reached.
    """
    swept = shared_memory.sweep_leaked()
    if swept:
        get_logger().info("shared_memory_swept", regions=swept)
    store = await EtcdStore.connect(settings, "scheduler")
    try:
        await _Scheduler(settings, store).run(stop)
    finally:
        await store.aclose()


class _Scheduler:
    """The parts of one running Scheduler."""

    def __init__(self, settings: SchedulerSettings, store: EtcdStore) -> None:
        self._settings = settings
        self._name = f"schedulers/{settings.name}"
        self._relay = Relay(AttemptLedger(settings.queue_settings()), settings.overload_settings())
        self._membership = Membership(store, on_epoch=self._on_epoch)
        self._follower = SnapshotFollower(store, shard_codec)
        self._identity = Identity(
            scheduler=self._name,
            failure_domain=FailureDomain(settings.host, settings.rack, settings.zone),
        )
        self._fleet = self._make_fleet()
        self._vitals = Vitals(self._fleet, self._membership)
        self._service = SchedulerService(self._name, secrets.token_hex(8), self._relay, self._fleet, self._vitals)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set or a task of ours ends by a bug."""
        server = Server(self._settings.listen)
        server.add(pb.DESCRIPTOR.services_by_name["SchedulerService"], self._service, request_bytes_max=FRAME_BYTES_MAX)
        async with self._membership:
            await server.start()
            try:
                self._identity.endpoint = self._settings.advertise or server.endpoint
                metrics = serve_metrics(
                    make_registry(self._relay, self._fleet, self._vitals), self._settings.metrics_listen
                )
                report = ServiceReport(
                    self._membership,
                    self._follower,
                    name=self._name,
                    endpoint=self._identity.endpoint,
                    metrics_endpoint=metrics,
                )
                get_logger().info("listening", endpoint=self._identity.endpoint, metrics=metrics, scheduler=self._name)
                ticking = asyncio.create_task(self._tick(server), name="tick")
                try:
                    async with self._fleet:
                        problem = await self._serve(server, report, stop, ticking)
                finally:
                    await cancel_and_wait(ticking)
                await report.withdraw()
                self._service.close()
            finally:
                await server.stop(CLOSE_S)
        if problem is not None:
            raise problem

    async def _serve(
        self, server: Server, report: ServiceReport, stop: asyncio.Event, ticking: asyncio.Task[None]
    ) -> Exception | None:
        """Serve until `stop`, or until a task of ours ends, and begin to drain; returns why, if it was not `stop`."""
        self._follower.subscribe(self._fleet.apply)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(report.run(), name="service-report"),
            asyncio.create_task(self._follower.run(), name="snapshot"),
            asyncio.create_task(stop.wait(), name="stop"),
        ]
        await server.set_serving(True)
        try:
            done, _ = await asyncio.wait([*tasks, ticking], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except Exception as error:
            return error
        finally:
            ledger = self._relay.ledger
            ledger.draining = True
            self._fleet.drain(self._settings.drain_grace_s)
            await self._vitals.tell(server)
            await server.set_serving(False)
            get_logger().info("draining", grace_s=self._settings.drain_grace_s, attempts=len(ledger.attempts))
            await cancel_and_wait(*tasks)
        return None

    def _on_epoch(self, key: str, epoch: int) -> None:
        self._fleet.on_epoch(key, epoch)

    def _make_fleet(self) -> Fleet:
        settings = self._settings
        state_dir = settings.state_dir.expanduser() / self._name
        machine = Machine(
            scheduler=self._name,
            cache_dir=settings.cache_dir.expanduser(),
            state_dir=state_dir,
            model_repository=settings.model_repository,
            threads=settings.threads,
            verifier=ArtifactVerifier(state_dir, required_signatures(settings)),
            kv_over_commit=settings.kv_over_commit,
        )
        return Fleet(settings, identity=self._identity, machine=machine, relay=self._relay, records=self._membership)

    async def _tick(self, server: Server) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._relay.tick(time.monotonic())
            await self._vitals.tell(server)
