"""How long one that comes now will wait: what stands before it, and what will come and go before it.

    higher priorities    all that waits, and comes at its present rate
    lower ones           the shares that they are owed while they wait
    its own tenant       what is due earlier
    each other tenant    what waits and what comes, at most what turns give it until this one's has come

    wait = the first moment at which the worker has done as much as goes before by then
         = sooner, where the share that its own priority is owed does its own priority's part in less time

Work is counted in slots times seconds; rates are of the last `MEMORY_S`. Sans-io; O(n log n) with n tenants.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

MEMORY_S = 10.0
"""In this time a rate has forgotten two thirds of what was."""
WAIT_MAX_S = 600.0
"""Farther nothing is foreseen."""
MARGIN = 0.25
"""Standard deviations that a wait is taken longer than its mean."""
TENANTS_MAX = 64
"""Tenants of one priority whose rates are known, those that came last."""


@dataclass(slots=True)
class Flow:
    """How much comes in a second, of late. Few that come are no flood: it takes `MEMORY_S` to believe in one."""

    amount: float = 0.0
    at: float = -math.inf

    def add(self, amount: float, now: float) -> None:
        """So much more came."""
        self.amount = self.rate(now) * MEMORY_S + amount
        self.at = now

    def rate(self, now: float) -> float:
        """For each second."""
        return self.amount * math.exp(-max(0.0, now - self.at) / MEMORY_S) / MEMORY_S if self.amount else 0.0


class Arrivals:
    """What comes to one priority of one queue, by tenant."""

    def __init__(self) -> None:
        self.work = Flow()
        self._tenants: OrderedDict[str, Flow] = OrderedDict()

    def add(self, tenant: str, work: float, now: float) -> None:
        """One comes."""
        self.work.add(work, now)
        self._tenants.setdefault(tenant, Flow()).add(work, now)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > TENANTS_MAX:
            self._tenants.popitem(last=False)

    def __iter__(self) -> Iterator[str]:
        """The tenants."""
        return iter(self._tenants)

    def rate(self, tenant: str, now: float) -> float:
        """Work a second that comes of a tenant."""
        flow = self._tenants.get(tenant)
        return 0.0 if flow is None else flow.rate(now)


@dataclass(frozen=True, slots=True)
class Rival:
    """Another tenant of the same priority."""

    work: float
    """What it has waiting."""
    rate: float
    """What comes in a second."""
    most: float
    """What turns give it before this one's turn has come."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What goes before one that comes now."""

    higher: float
    higher_rate: float
    own: float
    rivals: tuple[Rival, ...]
    lower_share: float
    """Of what the worker does, what is owed to lower priorities that wait."""
    paid_at: float
    """Work until what its own priority is owed has paid for what goes before it there, and for it; infinite: never."""

    def wait_s(self, speed: float, before: float = 0.0) -> float:
        """Until it is handed over, at most `WAIT_MAX_S`.

        Args:
            speed: work that the worker does in a second.
            before: work before everybody: what the engine has yet to begin with.
        """
        work = before + self.higher + self.own
        wait_s = self._until(work, self.higher_rate, speed * (1.0 - self.lower_share))
        wait_s = min(wait_s, (before + self.paid_at) / speed, WAIT_MAX_S)
        # Slots come free at random moments: of so many, as many more or fewer as is usual in so long a time.
        return min(wait_s + MARGIN * math.sqrt(wait_s / speed), WAIT_MAX_S)

    def _until(self, work: float, rate: float, speed: float) -> float:
        """When a worker of that speed has done the work, what comes of it, and what rivals get."""
        ends = []
        for rival in self.rivals:
            if rival.work >= rival.most or rival.rate <= 0:
                work += min(rival.work, rival.most)
                continue
            work += rival.work
            rate += rival.rate
            ends.append(((rival.most - rival.work) / rival.rate, rival))
        if work <= 0:
            return 0.0
        ends.sort(key=lambda end: end[0])
        for until, rival in ends:
            if rate < speed and work / (speed - rate) <= until:
                break
            work += rival.most - rival.work
            rate -= rival.rate
        return work / (speed - rate) if rate < speed else math.inf
