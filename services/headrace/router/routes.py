"""The Router's view of where requests can go: the snapshot in use and a link to each Scheduler in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from headrace.control.resources import Replica
from headrace.control.snapshot import RoutingSnapshot
from headrace.router.links import SchedulerLink
from headrace.runtime.telemetry import get_logger


class Routes:
    """Swaps snapshots whole and keeps the links that they need.

    A link whose Scheduler left the snapshot is closed once its last attempt has ended: leaving the plan is no reason
    to cut what runs.
    """

    def __init__(self, *, router: str, incarnation: str) -> None:
        self.snapshot: RoutingSnapshot | None = None
        self.is_too_old: Callable[[], bool] = lambda: False
        """Whether the snapshot is past its hard age now; set by who follows it."""
        self._router = router
        self._incarnation = incarnation
        self._links: dict[str, SchedulerLink] = {}
        self._retired: list[SchedulerLink] = []
        self._log = get_logger()

    def apply(self, snapshot: RoutingSnapshot) -> None:
        """Use `snapshot` from now on."""
        self.snapshot = snapshot
        wanted = {replica.endpoint for replica in snapshot.replicas}
        for endpoint in wanted - self._links.keys():
            link = SchedulerLink(endpoint, router=self._router, incarnation=self._incarnation)
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

    def link(self, endpoint: str) -> SchedulerLink:
        """The link to a Scheduler that `is_reachable`."""
        return self._links[endpoint]

    def is_reachable(self, endpoint: str) -> bool:
        """Whether the Scheduler at `endpoint` has a link that is up."""
        link = self._links.get(endpoint)
        return link is not None and link.is_up

    def load(self, replica: Replica) -> int:
        """Attempts that run on a replica."""
        link = self._links.get(replica.endpoint)
        return link.in_flight[replica.name] if link is not None else 0

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Attempts that run, by replica."""
        links = list(self._links.values())
        if len(links) == 1:
            return links[0].in_flight
        merged: dict[str, int] = {}
        for link in links:
            merged.update(link.in_flight)
        return merged

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
