"""Whose turn it is: first between priorities, then between the tenants of one priority.

Between priorities the highest goes first, except that each lower one is owed its reserved share of all the tokens
that were handed out while it waited. Whoever is owed as much as its next request costs goes before everybody. So a
flood of urgent work slows the rest to its share and never to nothing; and an idle class saves up nothing.

Between tenants it is deficit round robin over tokens: each round gives a tenant its quantum, and it may spend what
it has saved up while it waits. Over any time in which two tenants both wait, what they got differs by no more than
a quantum and three requests, in proportion to their weights. A tenant whose next request does not fit may be passed;
what it may save up meanwhile has an end.

One that waits seldom is owed what the others got while it did not, at most one request: so it is served at once, and
not after a round of those who always wait.

Sans-io.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from headrace.control.priority import Priority

RESERVED: Mapping[Priority, float] = MappingProxyType(
    {Priority.CRITICAL: 0.0, Priority.STANDARD: 0.2, Priority.BATCH: 0.1, Priority.SHEDDABLE: 0.05}
)
"""Share of the tokens that each priority is owed while it waits; the rest goes to the highest."""
QUANTUM = 64
"""Tokens that a tenant of weight 1 gets in a round: less than most requests cost, so that a turn is one request and not
as many as somebody has there."""
AWAY_MAX = 256
"""Tenants that do not wait and of which is known what they missed."""
LOOK_MAX = 64
"""Requests of one tenant that are looked at for one that fits..."""
LOOKS_MAX = 512
"""...and of all together; of each tenant one at least."""


class Entry(Protocol):
    """One that waits."""

    @property
    def cost(self) -> int:
        """Tokens that it is charged with, 1 or more."""

    @property
    def order(self) -> tuple[float, int]:
        """Its place among those of its tenant: the instant by which it should be served, then its number."""


E = TypeVar("E", bound=Entry)


class PriorityShares:
    """What each priority is owed."""

    def __init__(self, reserved: Mapping[Priority, float] = RESERVED) -> None:
        assert sum(reserved.values()) <= 1
        self._reserved = reserved
        self._owed: dict[Priority, float] = {}

    def choose(self, costs: Mapping[Priority, int]) -> Priority:
        """Which of those that wait is next; `costs` are those of their next requests."""
        ranked = sorted(costs, reverse=True)
        for priority in ranked:
            if self._owed.get(priority, 0.0) >= costs[priority]:
                return priority
        return ranked[0]

    def charge(self, priority: Priority, cost: int, waiting: Iterable[Priority]) -> None:
        """One of `priority` was handed over; `waiting` are those of which some waited, it included."""
        for one in waiting:
            self._owed[one] = self._owed.get(one, 0.0) + self._reserved.get(one, 0.0) * cost
        self._owed[priority] = max(0.0, self._owed.get(priority, 0.0) - cost)

    def owed(self, priority: Priority) -> float:
        """Tokens that it may get before those of higher priority."""
        return self._owed.get(priority, 0.0)

    def forget(self, priority: Priority) -> None:
        """Nobody of it waits any more."""
        self._owed.pop(priority, None)


@dataclass(slots=True)
class _Tenant(Generic[E]):
    weight: float
    entries: list[E] = field(default_factory=list)
    deficit: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice(Generic[E]):
    """Who is next, and what has to be given to whom for it."""

    tenant: str
    entry: E
    rounds: int
    """Whole rounds until its tenant can pay for it."""


class TenantRing(Generic[E]):
    """Deficit round robin between tenants; the earliest deadline within one."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._tenants: OrderedDict[str, _Tenant[E]] = OrderedDict()
        """In the order of the round; the first one has had its quantum of it."""
        self._weights = 0.0
        self._given = 0.0
        """Tokens that those who waited got for each unit of weight, mean, since the beginning."""
        self._away: OrderedDict[str, float] = OrderedDict()
        """What that was when a tenant ceased to wait, less what it had left; the one that is away for longest first."""

    def __len__(self) -> int:
        return len(self._tenants)

    def put(self, tenant: str, entry: E, weight: float = 1.0) -> None:
        """One more waits."""
        kept = self._tenants.get(tenant)
        if kept is None:
            kept = self._tenants[tenant] = _Tenant(weight, deficit=self._credit(tenant, entry, weight))
            self._weights += weight
        self._weights += weight - kept.weight
        kept.weight = weight
        insort(kept.entries, entry, key=_order)

    def remove(self, tenant: str, entry: E) -> None:
        """It does not wait any more, and nobody is charged for it."""
        kept = self._tenants[tenant]
        del kept.entries[bisect_left(kept.entries, entry.order, key=_order)]
        if not kept.entries:
            self._leave(tenant)

    def has(self, tenant: str) -> bool:
        """Whether one of it waits."""
        return tenant in self._tenants

    def count(self, tenant: str) -> int:
        """How many of it wait."""
        kept = self._tenants.get(tenant)
        return 0 if kept is None else len(kept.entries)

    def ahead(self, tenant: str, entry_order: tuple[float, int]) -> float:
        """Share of a tenant's own entries that come before that place, 0 to 1."""
        kept = self._tenants.get(tenant)
        return 0.0 if kept is None else bisect_left(kept.entries, entry_order, key=_order) / len(kept.entries)

    def need(self, tenant: str, entry: E, weight: float) -> float:
        """Tokens that turns give for each unit of weight before it is this one's turn, if it came now."""
        kept = self._tenants.get(tenant)
        if kept is None:
            return max(0.0, entry.cost - self._missed(tenant, weight)) / weight
        before = sum(one.cost for one in kept.entries[: bisect_left(kept.entries, entry.order, key=_order)])
        return max(0.0, before + entry.cost - kept.deficit) / weight

    def most(self, tenant: str, need: float, cost: float) -> float:
        """Tokens that a tenant may get while turns give `need` for each unit of weight.

        One that does not wait may come meanwhile with requests of `cost`, where `passes` says so.
        """
        kept = self._tenants.get(tenant)
        if kept is None:
            return need + min(self._missed(tenant, 1.0), cost)
        spent = need * kept.weight + kept.deficit
        return spent if spent >= kept.entries[0].cost else 0.0

    def passes(self, need: float) -> bool:
        """Whether somebody who comes later may go before one that needs so much."""
        return need > self._quantum

    def choose(self, fits: Callable[[E], bool]) -> Choice[E] | None:
        """Who is next of those that fit; changes nothing."""
        best: Choice[E] | None = None
        looks = LOOKS_MAX
        for place, (name, tenant) in enumerate(self._tenants.items()):
            places = range(min(len(tenant.entries), LOOK_MAX, max(1, looks)))
            found = next((n for n in places if fits(tenant.entries[n])), None)
            looks -= len(places) if found is None else found + 1
            if found is None:
                continue
            entry = tenant.entries[found]
            rounds = math.ceil(max(0.0, entry.cost - tenant.deficit) / (self._quantum * tenant.weight))
            if place:
                rounds = max(0, rounds - 1)  # its quantum of this round is still to come
            if best is None or rounds < best.rounds:
                best = Choice(name, entry, rounds)
                if not rounds:
                    break
        return best

    def take(self, choice: Choice[E]) -> None:
        """Hand over what was chosen: everybody gets what the rounds until then give."""
        is_passed, given = True, 0.0
        for place, (name, tenant) in enumerate(self._tenants.items()):
            if not is_passed and not choice.rounds:
                break  # those behind it are not visited
            visits = choice.rounds + (place > 0 and is_passed)
            if name == choice.tenant:
                is_passed = False
            step = self._quantum * tenant.weight
            need = choice.entry.cost if name == choice.tenant else tenant.entries[0].cost
            tenant.deficit = min(tenant.deficit + visits * step, need + step)
            given += visits * step
        self._given += given / self._weights
        while next(iter(self._tenants)) != choice.tenant:
            self._tenants.move_to_end(next(iter(self._tenants)))
        chosen = self._tenants[choice.tenant]
        chosen.deficit = max(0.0, chosen.deficit - choice.entry.cost)
        self.remove(choice.tenant, choice.entry)

    def _credit(self, tenant: str, entry: E, weight: float) -> float:
        """What one that begins to wait may spend at once: what it missed while it was away, at most one request.

        Without that, whoever waits all the time comes before everybody who seldom does, again and again.
        """
        missed = self._missed(tenant, weight)
        self._away.pop(tenant, None)
        return min(missed, entry.cost)

    def _missed(self, tenant: str, weight: float) -> float:
        """What others of that weight got since it ceased to wait; infinite where that is not known."""
        away_at = self._away.get(tenant)
        return math.inf if away_at is None else max(0.0, self._given - away_at) * weight

    def _leave(self, tenant: str) -> None:
        was_first = next(iter(self._tenants)) == tenant
        left = self._tenants.pop(tenant)
        self._weights = self._weights - left.weight if self._tenants else 0.0
        self._away[tenant] = self._given - left.deficit / left.weight
        if len(self._away) > AWAY_MAX:
            self._away.popitem(last=False)
        if was_first and self._tenants:
            first = next(iter(self._tenants.values()))
            first.deficit += self._quantum * first.weight


def _order(entry: Entry) -> tuple[float, int]:
    return entry.order
