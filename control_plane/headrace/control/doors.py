"""Which replicas would refuse a request, as their Schedulers have told: so that nobody asks in vain.

A report says from which priority on a replica admits, how many more may come before its queue is full, and which
tenants have their share of it already. It comes at once when one of these changes, so it is a few milliseconds old, and
what this Router has sent meanwhile is counted against the room. A refusal that is known here costs the caller no way to
a Scheduler and back.

What is known is never trusted for long: a report older than `REPORT_AGE_MAX_S` refuses nobody, and CRITICAL always gets
its try. Two Routers may still send to the last place at once; the Scheduler decides, and one of them is refused there.

Sans-io; instants are monotonic seconds; O(1) a question. Only replicas that have little room are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.control.priority import Priority

REPORT_AGE_MAX_S = 2.5
"""An older report refuses nobody. Schedulers report each second, and whenever something changed."""
ROOM_KEPT = 8
"""A replica with more room than this, that refuses nobody, is not kept: its next report comes before it is full."""

Shares = frozenset[tuple[str, int]]
"""Tenants, each with a priority, that may not add to what waits."""


@dataclass(slots=True)
class Door:
    """What one replica has said, and what was sent there since."""

    admits_from: int
    room: int
    shares: Shares
    at: float
    sent: int = 0

    def refuses(self, priority: int, tenant: str, now: float) -> bool:
        """Whether it would refuse a tenant's request of that priority."""
        if priority >= Priority.CRITICAL or now - self.at > REPORT_AGE_MAX_S:
            return False
        if priority < self.admits_from or (tenant, priority) in self.shares:
            return True
        # Full, it says itself who may still come, in `admits_from`. This is for the moment until it does.
        return 0 < self.room <= self.sent

    def is_for_share(self, priority: int, tenant: str) -> bool:
        """Whether it is its tenant's share that a request is refused for."""
        return priority >= self.admits_from and (tenant, priority) in self.shares


class Doors:
    """Of one Router."""

    def __init__(self) -> None:
        self.by_replica: dict[str, Door] = {}
        """To be read only."""

    def __len__(self) -> int:
        return len(self.by_replica)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_replica)

    def __contains__(self, replica: object) -> bool:
        """Whether a replica has little room or refuses somebody."""
        return replica in self.by_replica

    def report(
        self, replica: str, *, admits_from: int, now: float, room: int | None = None, shares: Shares = frozenset()
    ) -> None:
        """A Scheduler tells whom a replica admits.

        Args:
            replica: its name.
            admits_from: lowest priority that it takes; up to SHEDDABLE: any.
            now: monotonic seconds.
            room: how many more may come before its queue is full; None: not told.
            shares: who may not add to what waits there.
        """
        if admits_from <= Priority.SHEDDABLE and not shares and (room is None or room > ROOM_KEPT):
            self.by_replica.pop(replica, None)
            return
        left = ROOM_KEPT + 1 if room is None else room
        self.by_replica[replica] = Door(min(admits_from, Priority.CRITICAL), left, shares, now)

    def forget(self, replica: str) -> None:
        """It is gone, or another one has come in its place."""
        self.by_replica.pop(replica, None)

    def sent(self, replica: str) -> None:
        """An attempt goes there, which no report knows yet."""
        door = self.by_replica.get(replica)
        if door is not None:
            door.sent += 1

    def ended(self, replica: str) -> None:
        """An attempt there is over, refused or not."""
        door = self.by_replica.get(replica)
        if door is not None and door.sent:
            door.sent -= 1

    def refuses(self, replica: str, priority: int, tenant: str, now: float) -> bool:
        """Whether a replica would refuse a tenant's request of that priority."""
        door = self.by_replica.get(replica)
        return door is not None and door.refuses(priority, tenant, now)

    def is_for_share(self, replica: str, priority: int, tenant: str) -> bool:
        """Whether it is its tenant's share that a request is refused for."""
        door = self.by_replica.get(replica)
        return door is not None and door.is_for_share(priority, tenant)
