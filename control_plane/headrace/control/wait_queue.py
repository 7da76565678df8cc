"""Who waits for one worker, in whose turn, and who has to go when it is full.

    priority    the highest, and each lower one its reserved share    headrace.control.fair_shares
    tenant      deficit round robin over estimated tokens             headrace.control.fair_shares
    deadline    the earliest, and none later than a patience after its arrival, so that it comes up in the end

One whose turn it is and that does not fit, since it needs more KV than is free, may be passed by others that do: so
many times, and for so long. Then it is reserved for, and nobody passes it any more. So a huge request does not block
short ones, and short ones do not starve a huge one.

When it is full, whoever ranks higher takes the place of the youngest of the lowest priority. One that was handed over
is not here any more and is never shed.

Sans-io. A decision costs O(log n) for its place and one look at each tenant that waits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from headrace.control.fair_shares import RESERVED, Choice, PriorityShares, TenantRing
from headrace.control.priority import Priority
from headrace.control.wait_forecast import Ahead, Arrivals, Rival

PATIENCE_S = 60.0
"""Without a deadline, or with a far one, it counts as due so long after its arrival."""
PASSES_MAX = 16
PASS_S = 1.0
"""How often, and for how long, one that does not fit is passed."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One attempt that waits."""

    token: int
    tenant: str
    priority: Priority
    cost: int
    """Tokens that its tenant is charged with, as estimated."""
    cells: int
    """KV cells that it will reserve, as estimated; what bounds the queue."""
    arrived_at: float
    """Monotonic seconds, like every time here."""
    deadline_at: float
    expires_at: float = math.inf
    """When its wait ends, whatever the reason."""
    work: float = 1.0
    """For how long it will have its slot, in multiples of what is usual for the worker."""
    is_short: bool = False
    weight: float = 1.0
    """Its tenant's weight."""
    number: int = 0
    """In the order of arrival; given by the queue."""
    passes: int = 0
    reserve_at: float | None = None
    """When it is reserved for; set once it was its turn and it did not fit."""

    @property
    def order(self) -> tuple[float, int]:
        """Its place within its tenant."""
        return min(self.deadline_at, self.arrived_at + PATIENCE_S), self.number


@dataclass(slots=True)
class _Sum:
    """Of entries together."""

    work: float = 0.0
    cost: int = 0
    cells: int = 0

    def add(self, entry: Waiting, sign: int = 1) -> None:
        self.work += sign * entry.work
        self.cost += sign * entry.cost
        self.cells += sign * entry.cells


@dataclass(slots=True)
class _Line:
    """Those of one priority."""

    ring: TenantRing[Waiting] = field(default_factory=TenantRing)
    arrivals: dict[int, Waiting] = field(default_factory=dict)
    tenants: dict[str, _Sum] = field(default_factory=dict)
    total: _Sum = field(default_factory=_Sum)


class WaitQueue:
    """Invariant: a token is in it once, from `put` to the one call that takes it out."""

    def __init__(
        self,
        *,
        pass_s: float = PASS_S,
        passes_max: int = PASSES_MAX,
        reserved: Mapping[Priority, float] = RESERVED,
    ) -> None:
        self.tokens = 0
        """KV cells that all of them will reserve."""
        self.shorts = 0
        """Of them, those of short load classes."""
        self._pass_s = pass_s
        self._passes_max = passes_max
        self._lines: dict[Priority, _Line] = {}
        self._arrivals: dict[Priority, Arrivals] = {}
        self._owes = reserved
        self._shares = PriorityShares(reserved)
        self._entries: dict[int, Waiting] = {}
        self._expiries: list[tuple[float, int]] = []
        self._numbers = 0
        self._reserved: Waiting | None = None
        self._blocked: Waiting | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, token: int) -> bool:
        return token in self._entries

    @property
    def latest(self) -> int:
        """Number of the latest one that came."""
        return self._numbers

    @property
    def waiting(self) -> Mapping[Priority, int]:
        """How many wait, by priority."""
        return {priority: len(line.arrivals) for priority, line in tuple(self._lines.items())}

    @property
    def reserved(self) -> Waiting | None:
        """The one that nobody passes any more."""
        return self._reserved

    def held_by(self, priority: Priority, tenant: str) -> tuple[int, int]:
        """How many of a tenant wait at that priority, and the KV cells that they will reserve."""
        line = self._lines.get(priority)
        if line is None or not line.ring.has(tenant):
            return 0, 0
        return line.ring.count(tenant), line.tenants[tenant].cells

    def below(self, priority: Priority) -> tuple[int, int]:
        """The same of all whose places one of that priority may take."""
        lines = [line for one, line in self._lines.items() if one < priority]
        return sum(len(line.arrivals) for line in lines), sum(line.total.cells for line in lines)

    # In and out

    def put(self, entry: Waiting) -> None:
        """One more waits."""
        assert entry.token not in self._entries
        self._numbers += 1
        entry.number = self._numbers
        line = self._lines.setdefault(entry.priority, _Line())
        line.ring.put(entry.tenant, entry, entry.weight)
        line.arrivals[entry.token] = entry
        line.total.add(entry)
        line.tenants.setdefault(entry.tenant, _Sum()).add(entry)
        self._arrivals.setdefault(entry.priority, Arrivals()).add(entry.tenant, entry.work, entry.arrived_at)
        self._entries[entry.token] = entry
        self.tokens += entry.cells
        self.shorts += entry.is_short
        if entry.expires_at < math.inf:
            heapq.heappush(self._expiries, (entry.expires_at, entry.token))

    def remove(self, token: int) -> Waiting:
        """It does not wait any more, and nobody is charged for it."""
        entry = self._entries[token]
        self._lines[entry.priority].ring.remove(entry.tenant, entry)
        self._forget(entry)
        return entry

    def next(
        self, now: float, *, may_start: Callable[[Waiting], bool], fits: Callable[[Waiting], bool]
    ) -> Waiting | None:
        """Take out whose turn it is; None: nobody that may be handed over now.

        Args:
            now: monotonic seconds.
            may_start: whether there is a slot for it.
            fits: whether there is KV for it.
        """
        reserved, self._blocked = self._reserved, None
        if reserved is not None:
            return self._take_reserved(reserved) if may_start(reserved) and fits(reserved) else None
        first = self._choose(may_start)
        if first is None:
            return None
        if fits(first[1].entry):
            return self._take(*first)
        entry = first[1].entry
        self._blocked = entry
        if entry.reserve_at is None:
            entry.reserve_at = now + self._pass_s
        if entry.passes >= self._passes_max or now >= entry.reserve_at:
            self._reserved = entry
            return None
        other = self._choose(lambda e: may_start(e) and fits(e))
        if other is None:
            return None
        entry.passes += 1
        return self._take(*other)

    def take_reserved(self) -> Waiting:
        """Take out the one that is reserved for, though it does not fit yet: the engine keeps what it gets free."""
        assert self._reserved is not None
        return self._take_reserved(self._reserved)

    # Time

    def expired(self, now: float) -> list[int]:
        """Those whose wait ends by now; they stay until they are removed."""
        found = []
        while self._expiries and self._expiries[0][0] <= now:
            token = heapq.heappop(self._expiries)[1]
            if token in self._entries:
                found.append(token)
        return found

    def next_due(self, *, has_room: bool) -> float:
        """When to look again though nothing has happened; infinite: never.

        Args:
            has_room: whether `next` is asked at all.
        """
        while self._expiries and self._expiries[0][1] not in self._entries:
            heapq.heappop(self._expiries)
        expiry = self._expiries[0][0] if self._expiries else math.inf
        blocked = self._blocked
        if not has_room or blocked is None or blocked.reserve_at is None or self._reserved is not None:
            return expiry
        return min(expiry, blocked.reserve_at)

    def head_age_s(self, now: float) -> float | None:
        """For how long the oldest of the highest priority has waited; None: nobody waits."""
        if not self._lines:
            return None
        line = self._lines[max(self._lines)]
        return now - next(iter(line.arrivals.values())).arrived_at

    def work_ahead(self, priority: Priority) -> float:
        """Work of all who wait at that priority and above."""
        return sum(line.total.work for one, line in self._lines.items() if one >= priority)

    def ahead_of(self, entry: Waiting, now: float) -> Ahead:
        """What would go before an entry that came now; it is not in the queue."""
        higher = lower_share = 0.0
        for priority, line in self._lines.items():
            if priority > entry.priority:
                higher += line.total.work
            elif priority < entry.priority:
                lower_share += self._owes.get(priority, 0.0)
        line = self._lines.get(entry.priority) or _Line()
        own = line.tenants.get(entry.tenant)
        return Ahead(
            higher=higher,
            higher_rate=sum(one.work.rate(now) for p, one in self._arrivals.items() if p > entry.priority),
            own=own.work * line.ring.ahead(entry.tenant, entry.order) if own is not None else 0.0,
            rivals=tuple(self._rivals(entry, line, now)),
            lower_share=lower_share,
            paid_at=self._paid_at(entry, line) if higher else math.inf,
        )

    def _rivals(self, entry: Waiting, line: _Line, now: float) -> Iterator[Rival]:
        """The other tenants of its priority that wait, or have come of late."""
        ring, need = line.ring, line.ring.need(entry.tenant, entry, entry.weight)
        come = self._arrivals.get(entry.priority)
        for tenant, waits in line.tenants.items():
            most = ring.most(tenant, need, 0) * waits.work / waits.cost if tenant != entry.tenant else 0.0
            if most > 0:
                rate = come.rate(tenant, now) if come is not None and most > waits.work else 0.0
                yield Rival(waits.work, rate, most)
        if come is None or not ring.passes(need):
            return
        usual = line.total if line.arrivals else entry  # where nobody waits, they are taken for its like
        for tenant in come:
            if tenant not in line.tenants and tenant != entry.tenant:
                most = ring.most(tenant, need, entry.cost) * usual.work / usual.cost
                yield Rival(0.0, come.rate(tenant, now), most)

    def _paid_at(self, entry: Waiting, line: _Line) -> float:
        """Work until its priority is owed what those of it who wait, and it, will cost; infinite: nothing is kept."""
        share = self._owes.get(entry.priority, 0.0)
        if not share:
            return math.inf
        cost = max(0.0, line.total.cost + entry.cost - self._shares.owed(entry.priority))
        lines = self._lines.values()
        return cost / share * sum(one.total.work for one in lines) / sum(one.total.cost for one in lines)

    # Shedding

    def victims(
        self, below: Priority, *, requests: int, tokens: int, bytes_: int, size_of: Callable[[int], int]
    ) -> list[int]:
        """The fewest, youngest of the lowest priority first, that make so much room; none when all are not enough."""
        found: list[int] = []
        for entry in self._lowest_first(below):
            if requests <= 0 and tokens <= 0 and bytes_ <= 0:
                break
            found.append(entry.token)
            requests, tokens, bytes_ = requests - 1, tokens - entry.cells, bytes_ - size_of(entry.token)
        return found if requests <= 0 and tokens <= 0 and bytes_ <= 0 else []

    def oldest_of_lowest(self) -> Waiting | None:
        """Whom the control of the queue's age sheds."""
        return next(iter(self._lines[min(self._lines)].arrivals.values())) if self._lines else None

    def _lowest_first(self, below: Priority) -> Iterator[Waiting]:
        for priority in sorted(self._lines):
            if priority >= below:
                return
            yield from reversed(self._lines[priority].arrivals.values())

    def _choose(self, fits: Callable[[Waiting], bool]) -> tuple[Priority, Choice[Waiting]] | None:
        choices: dict[Priority, Choice[Waiting]] = {}
        for priority, line in self._lines.items():
            choice = line.ring.choose(fits)
            if choice is not None:
                choices[priority] = choice
        if not choices:
            return None
        priority = self._shares.choose({p: c.entry.cost for p, c in choices.items()})
        return priority, choices[priority]

    def _take(self, priority: Priority, choice: Choice[Waiting]) -> Waiting:
        self._shares.charge(priority, choice.entry.cost, self._lines)
        self._lines[priority].ring.take(choice)
        self._forget(choice.entry)
        return choice.entry

    def _take_reserved(self, entry: Waiting) -> Waiting:
        return self._take(entry.priority, Choice(entry.tenant, entry, 0))

    def _forget(self, entry: Waiting) -> None:
        del self._entries[entry.token]
        self.tokens -= entry.cells
        self.shorts -= entry.is_short
        if self._reserved is entry:
            self._reserved = None
        if self._blocked is entry:
            self._blocked = None
        line = self._lines[entry.priority]
        del line.arrivals[entry.token]
        line.total.add(entry, -1)
        line.tenants[entry.tenant].add(entry, -1)
        if not line.arrivals:
            del self._lines[entry.priority]
            self._shares.forget(entry.priority)
        elif not line.ring.has(entry.tenant):
            del line.tenants[entry.tenant]
