"""The Router's view of where requests can go: the snapshot in use and a link to each Scheduler in it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping

from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.control.routing import Routing
from headrace.control.snapshot import RoutingSnapshot
from headrace.router.demands import report_of
from headrace.router.links import SchedulerLink
from headrace.runtime.telemetry import get_logger


class Routes:
    """Swaps snapshots whole and keeps the links that they need.

    A link whose Scheduler left the snapshot is closed once its last attempt has ended: leaving the plan is no reason
    to cut what runs.
    """

    def __init__(self, *, router: str, incarnation: str, routing: Routing | None = None) -> None:
        self.routing = routing or Routing()
        """Chooses replicas; knows what is in flight."""
        self.snapshot: RoutingSnapshot | None = None
        self.is_too_old: Callable[[], bool] = lambda: False
        """Whether the snapshot is past its hard age now; set by who follows it."""
        self.load_listeners: list[Callable[[scheduler_pb2.LoadReport], None]] = []
        """Told of each report of load that any Scheduler sends."""
        self.fleet_listeners: list[Callable[[str, scheduler_pb2.LoadReport], None]] = []
        """The same, with the endpoint of the Scheduler: for what is counted over all of them."""
        self._router = router
        self._incarnation = incarnation
        self._links: dict[str, SchedulerLink] = {}
        self._retired: list[SchedulerLink] = []
        self._log = get_logger()

    def apply(self, snapshot: RoutingSnapshot) -> None:
        """Use `snapshot` from now on."""
        self.snapshot = snapshot
        self.routing.apply(snapshot, time.monotonic())
        wanted = {replica.endpoint for replica in snapshot.replicas}
        for endpoint in wanted - self._links.keys():
            on_load = functools.partial(self._take_load, endpoint)
            link = SchedulerLink(
                endpoint,
                router=self._router,
                incarnation=self._incarnation,
                on_load=on_load,
                routing=self.routing,
            )
            self._links[endpoint] = link
            link.open()
        for endpoint in self._links.keys() - wanted:
            self._retired.append(self._links.pop(endpoint))
        self._log.info(
            "snapshot_applied",
            version=snapshot.version,
            digest=snapshot.digest[:12],
            replicas=len(snapshot.replicas),
            aliases=len(snapshot.aliases),
        )

    def _take_load(self, endpoint: str, report: scheduler_pb2.LoadReport) -> None:
        now = time.monotonic()
        for load in report.replicas:
            self.routing.report(load.replica, report_of(load), now)
        for listener in self.load_listeners:
            listener(report)
        for told in self.fleet_listeners:
            told(endpoint, report)

    def link(self, endpoint: str) -> SchedulerLink:
        """The link to a Scheduler that `is_reachable`."""
        return self._links[endpoint]

    def is_reachable(self, endpoint: str) -> bool:
        """Whether the Scheduler at `endpoint` has a link that is up."""
        link = self._links.get(endpoint)
        return link is not None and link.is_up

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Attempts that run, by replica."""
        return self.routing.loads.in_flight

    @property
    def links(self) -> list[SchedulerLink]:
        """All links, those that are being given up included."""
        return [*self._links.values(), *self._retired]

    async def sweep(self) -> None:
        """Close links that are no longer wanted and have no attempts."""
        idle = [link for link in self._retired if not link.attempts]
        self._retired = [link for link in self._retired if link.attempts]
        for link in idle:
            await link.close()

    async def close(self) -> None:
        """Close all links."""
        await asyncio.gather(*(link.close() for link in self.links))
        self._links.clear()
        self._retired.clear()
