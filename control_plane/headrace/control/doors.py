"""Which replicas would refuse a request, as their Schedulers have told: so that hardly anybody asks in vain.

A report says from which priority on a replica admits, how many more may come before its queue is full, and to which
tenants, of those that have asked of late, it is closed: they have their share of what waits, or would wait too long. It
comes at once when one of these changes, so it is a few milliseconds old, and what this Router has sent meanwhile is
counted against the room. A refusal that is known here costs the caller no way to a Scheduler and back.

What is known is never trusted for long: a report older than `REPORT_AGE_MAX_S` refuses nobody, and one older than
`CRITICAL_AGE_MAX_S` nobody who is CRITICAL. Two Routers may still send to the last place at once; the Scheduler
decides, and one of them is refused there.

Sans-io; instants are monotonic seconds; O(1) a question. Only replicas that have little room are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from headrace.control.deadlines import HOP_MARGIN_S
from headrace.control.priority import Priority

REPORT_AGE_MAX_S = 2.5
"""An older report refuses nobody. Schedulers report each second, and whenever something changed."""
CRITICAL_AGE_MAX_S = 0.5
"""The same for CRITICAL requests: they get their try where it is not quite sure that they would be refused."""
ROOM_KEPT = 8
"""A replica with more room than this, that refuses nobody, is not kept: its next report comes before it is full."""
WAY_S = 0.005
"""What the way to a Scheduler takes of the time that a request may wait, and rounding."""
LIKE = 1.25, 16
"""A request is no smaller than another one if so many times its tokens, and so many more, are as many: Router and
Scheduler estimate them each for itself."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What matters of a request."""

    priority: int
    tenant: str
    tokens: int = 0
    """Prompt and output limit, estimated."""
    queue_s: float = math.inf
    """How long it may wait for a slot."""
    deadline_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Closed:
    """A replica is closed to a tenant's requests of a priority that are no smaller than the latest one was."""

    tenant: str
    priority: int
    tokens: int = 0
    wait_s: float = math.inf
    """Such a one would wait so long for its slot; infinite: it is its tenant's share that it is refused for."""
    done_s: float = 0.0
    """Such a one would take so long to what its deadline is for; 0: that is not foreseen."""

    @property
    def is_for_share(self) -> bool:
        """Whether it is closed for what else the tenant has waiting, however long it would wait."""
        return self.wait_s == math.inf

    def refuses(self, asking: Asking, now: float) -> bool:
        """Whether it would refuse this one."""
        if asking.tokens * LIKE[0] + LIKE[1] < self.tokens:
            return False
        if self.is_for_share:
            return True
        return asking.queue_s - WAY_S < self.wait_s or asking.deadline_at - HOP_MARGIN_S < now + self.done_s


@dataclass(slots=True)
class Door:
    """What one replica has said, and what was sent there since."""

    admits_from: int
    room: int
    closed: Mapping[tuple[str, int], Closed]
    at: float
    sent: int = 0

    def refuses(self, asking: Asking, now: float) -> str:
        """Why it would refuse a request: "replicas", "share" or "wait"; "" if it would not."""
        is_critical = asking.priority >= Priority.CRITICAL
        if now - self.at > (CRITICAL_AGE_MAX_S if is_critical else REPORT_AGE_MAX_S):
            return ""
        if asking.priority < self.admits_from:
            return "replicas"
        closed = self.closed.get((asking.tenant, asking.priority)) if self.closed else None
        if closed is not None and closed.refuses(asking, now):
            return "share" if closed.is_for_share else "wait"
        # Full, it says itself who may still come, in `admits_from`. This is for the moment until it does; who is
        # CRITICAL takes the place of another one.
        return "replicas" if 0 < self.room <= self.sent and not is_critical else ""


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
        self, replica: str, *, admits_from: int, now: float, room: int | None = None, closed: Iterable[Closed] = ()
    ) -> None:
        """A Scheduler tells whom a replica admits.

        Args:
            replica: its name.
            admits_from: lowest priority that it takes; up to SHEDDABLE: any.
            now: monotonic seconds.
            room: how many more may come before its queue is full; None: not told.
            closed: to whom it is closed.
        """
        found = {(one.tenant, one.priority): one for one in closed}
        if admits_from <= Priority.SHEDDABLE and not found and (room is None or room > ROOM_KEPT):
            self.by_replica.pop(replica, None)
            return
        left = ROOM_KEPT + 1 if room is None else room
        self.by_replica[replica] = Door(min(admits_from, Priority.CRITICAL), left, found, now)

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

    def refuses(self, replica: str, asking: Asking, now: float) -> str:
        """Why a replica would refuse a request; "" if it would not."""
        door = self.by_replica.get(replica)
        return "" if door is None else door.refuses(asking, now)
