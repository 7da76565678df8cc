"""Whether a Router takes a request in: a few comparisons, before anything is made for it.

    bound      of                     limit
    requests   the whole Router       `requests_max`
    tokens     the whole Router       `tokens_max`, where one is set
    bytes      the whole Router       `bytes_max`: input, output that may wait for its reader, events kept
    requests   the revision           what its usable replicas can hold (headrace.control.router_capacity)
    tokens     the revision           the same, prompt and output as estimated
    replicas   the revision           all its replicas say that they refuse this priority
    share      one tenant             of each of the first five, while others ask: headrace.control.fair_room

Each priority has the room up to its share of a limit; what is above is kept for higher ones. One request always fits
where nothing else runs, however large: it would never be served otherwise.

A refusal names the bound, its limit and what is held, and a time to come back that is spread, so that those who were
refused together do not return together. Sans-io; O(1) a request, and O(replicas) ten times a second where all of them
refuse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.control.doors import Asking, Doors
from headrace.control.errors import RULES, Failure, Reason
from headrace.control.fair_room import FairRoom, has_share
from headrace.control.priority import Priority
from headrace.control.resources import Replica, ReplicaState, Revision
from headrace.control.router_capacity import RevisionCapacity
from headrace.control.sliding_count import SlidingCount

SHARES: Mapping[Priority, float] = {
    Priority.SHEDDABLE: 0.7,
    Priority.BATCH: 0.8,
    Priority.STANDARD: 0.9,
    Priority.CRITICAL: 1.0,
}
VERDICT_S = 0.1
"""For how long it is believed that so many replicas refuse, where looking at all of them costs something."""
LOOKED_AT_MAX = 64
"""Up to so many replicas are looked at for each request."""
REFUSED_MAX = 1024
DEMAND_S = 60.0
"""Over which demand is counted."""
RETRY_MIN_S = 0.1
RETRY_MAX_S = 30.0
RETRY_S = RULES[Reason.OVERLOADED].retry_after_s or RETRY_MIN_S


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request takes."""

    revision: str
    priority: Priority
    tokens: int
    """Prompt and output, estimated."""
    size: int
    """Bytes of its input, and of output that may wait for its reader."""
    tenant: str = ""
    weight: float = 1.0
    """Its tenant's."""
    queue_s: float = math.inf
    """How long it may wait for a slot."""
    deadline_at: float = math.inf

    @property
    def asking(self) -> Asking:
        """What a replica might refuse it for."""
        return Asking(int(self.priority), self.tenant, self.tokens, self.queue_s, self.deadline_at)


@dataclass(slots=True)
class _Held:
    """What requests that run have taken."""

    requests: int = 0
    tokens: int = 0
    size: int = 0

    def add(self, demand: Demand, sign: int = 1) -> None:
        self.requests += sign
        self.tokens += sign * demand.tokens
        self.size += sign * demand.size


_NOTHING = _Held()


@dataclass(frozen=True, slots=True)
class _Refused:
    """Who was refused by all replicas."""

    asking: Asking
    bound: str
    until: float

    def covers(self, other: Asking, now: float) -> bool:
        """Whether `other` asks for no less, may wait no longer and is no more important."""
        asked = self.asking
        return (
            now < self.until
            and other.priority <= asked.priority
            and other.tokens >= asked.tokens
            and other.queue_s <= asked.queue_s
            and other.deadline_at <= asked.deadline_at + VERDICT_S
        )


@dataclass(slots=True)
class _Revision:
    capacity: RevisionCapacity = field(default_factory=RevisionCapacity)
    requests: int = 0
    tokens: int = 0
    tenants: dict[str, _Held] = field(default_factory=dict)
    """Those that hold something."""
    offered: SlidingCount = field(default_factory=lambda: SlidingCount(DEMAND_S))
    """What came, refused or not."""
    refusing: dict[str, float] = field(default_factory=dict)
    """What one would wait there, seconds, by usable replica that has little room or refuses somebody."""
    refused: dict[str, _Refused] = field(default_factory=dict)
    """By tenant, what all of very many replicas have refused."""


class RouterAdmission:
    """What one Router holds, and whether it takes more.

    Args:
        requests_max: requests at a time, whatever the replicas could hold.
        bytes_max: bytes of input, of output that may wait for its reader, and of events kept.
        tokens_max: tokens of prompt and output that they may reserve; 0: what the replicas can hold.
        random: 0 <= random() < 1, for the spread of retries.
        doors: what replicas say of whom they refuse; told of a report before `report` is.
    """

    def __init__(
        self,
        *,
        requests_max: int,
        bytes_max: int,
        random: Callable[[], float],
        tokens_max: int = 0,
        doors: Doors | None = None,
    ) -> None:
        self.doors = doors if doors is not None else Doors()
        self.requests_max = requests_max
        self.bytes_max = bytes_max
        self.tokens_max = tokens_max
        self.requests = 0
        self.tokens = 0
        self.input_bytes = 0
        self.buffered_bytes = 0
        """Events kept for readers of requests that run; set by who knows, now and then."""
        self.refused: Counter[str] = Counter()
        """Refusals, by bound."""
        self._random = random
        self._tenants: dict[str, _Held] = {}
        """Those that hold something, over all revisions."""
        self._rooms = {priority: FairRoom() for priority in Priority}
        self._revisions: dict[str, _Revision] = {}
        self._revision_of: dict[str, str] = {}
        """By usable replica."""
        self._queues: dict[str, int] = {}
        """Attempts that may wait, by usable replica, where its Scheduler has said it."""
        self.is_stale = False
        """Whether what replicas hold has changed since `apply`."""

    # What there is

    def apply(
        self,
        revisions: Iterable[Revision],
        replicas_of: Mapping[str, Sequence[Replica]],
        *,
        is_usable: Callable[[Replica], bool],
        routers: int,
        now: float,
    ) -> None:
        """Take over what the snapshot, the links and the ejections say; when one of them changed.

        Costs about a microsecond a replica, and several for each that is new.
        """
        self.is_stale = False
        known = set()
        for revision in revisions:
            known.add(revision.name)
            state = self._revisions.setdefault(revision.name, _Revision())
            replicas = replicas_of.get(revision.name, ())
            capacity = state.capacity
            before = capacity.replicas
            capacity.apply(
                [r for r in replicas if r.state is ReplicaState.READY and is_usable(r)],
                revision.execution,
                planned={r.name for r in replicas if r.state is ReplicaState.DRAINING},
                routers=routers,
                now=now,
                queues=self._queues,
            )
            for name in before - capacity.replicas:
                state.refusing.pop(name, None)
                self._queues.pop(name, None)
                if self._revision_of.get(name) == revision.name:
                    del self._revision_of[name]
            self._revision_of.update(dict.fromkeys(capacity.replicas - before, revision.name))
        for name in [name for name, state in self._revisions.items() if name not in known and not state.requests]:
            for replica in self._revisions.pop(name).capacity.replicas:
                self._revision_of.pop(replica, None)
                self._queues.pop(replica, None)

    def report(self, replica: str, *, queue_wait_s: float | None, waiting_max: int = 0) -> None:
        """A Scheduler tells how busy a replica is; whom it refuses, `doors` has been told.

        Args:
            replica: its name.
            queue_wait_s: what a request of middling size would wait there; None: not known.
            waiting_max: attempts that may wait there; 0: not told.
        """
        state = self._revisions.get(self._revision_of.get(replica, ""))
        if state is None:
            return
        if waiting_max != self._queues.get(replica, 0):
            self._queues[replica] = waiting_max
            self.is_stale = True
        if replica in self.doors:
            state.refusing[replica] = RETRY_S if queue_wait_s is None else queue_wait_s
        else:
            state.refusing.pop(replica, None)

    # Requests

    def came(self, revision: str, now: float) -> _Revision:
        """Count a request as demand; `admit` does it itself."""
        state = self._revisions.setdefault(revision, _Revision())
        state.offered.add(now)
        return state

    def admit(self, demand: Demand, now: float) -> None:
        """Take a request in; `release` gives back what it takes.

        Raises:
            Failure: OVERLOADED, with the bound, its limit and what is held.
        """
        share = SHARES[demand.priority]
        state = self.came(demand.revision, now)
        is_shared = self._rooms[demand.priority].asks(demand.tenant, now)
        own = self._tenants.get(demand.tenant, _NOTHING) if is_shared else _NOTHING
        self._check("requests", demand, self.requests, 1, self.requests_max * share, own.requests)
        if self.tokens_max:
            self._check("tokens", demand, self.tokens, demand.tokens, self.tokens_max * share, own.tokens)
        held = self.input_bytes + self.buffered_bytes
        self._check("bytes", demand, held, demand.size, self.bytes_max * share, own.size)
        if state.capacity.replicas:  # where there is nobody, placement says why
            allowed = state.capacity.allowed(now)
            own = state.tenants.get(demand.tenant, _NOTHING) if is_shared else _NOTHING
            self._check("requests", demand, state.requests, 1, allowed.requests * share, own.requests, state)
            self._check("tokens", demand, state.tokens, demand.tokens, allowed.tokens * share, own.tokens, state)
            self._check_replicas(demand, state, now)
        self.requests += 1
        self.tokens += demand.tokens
        self.input_bytes += demand.size
        state.requests += 1
        state.tokens += demand.tokens
        for tenants in (self._tenants, state.tenants):
            tenants.setdefault(demand.tenant, _Held()).add(demand)

    def release(self, demand: Demand) -> None:
        """A request that was taken in is over."""
        state = self._revisions[demand.revision]
        assert state.requests > 0, "released twice"
        self.requests -= 1
        self.tokens -= demand.tokens
        self.input_bytes -= demand.size
        state.requests -= 1
        state.tokens -= demand.tokens
        for tenants in (self._tenants, state.tenants):
            tenants[demand.tenant].add(demand, -1)
            if not tenants[demand.tenant].requests:
                del tenants[demand.tenant]

    def withdraw(self, demand: Demand, now: float) -> None:
        """Take back that a request was taken in: it was only asked whether it may be."""
        self.release(demand)
        self._revisions[demand.revision].offered.add(now, -1)

    def demand(self, now: float) -> dict[str, float]:
        """Requests a minute that came, refused or not, by revision."""
        return {name: state.offered.total(now) * 60 / DEMAND_S for name, state in self._revisions.items()}

    def held(self) -> tuple[int, int]:
        """Requests and tokens of all revisions."""
        return self.requests, self.tokens

    def allowed(self, now: float) -> tuple[float, float]:
        """Requests and tokens that the replicas of all revisions can hold."""
        found = [state.capacity.allowed(now) for state in self._revisions.values()]
        return sum(f.requests for f in found), sum(f.tokens for f in found)

    def retry_s(self, wait_s: float = RETRY_S) -> float:
        """When to come back after a refusal, where the wait is `wait_s`: bounded and spread."""
        return min(max(wait_s, RETRY_MIN_S), RETRY_MAX_S) * (0.75 + 0.5 * self._random())

    @property
    def shocks(self) -> int:
        """Failure domains that were lost whole, over revisions."""
        return sum(state.capacity.shocks for state in self._revisions.values())

    def _check(
        self,
        bound: str,
        demand: Demand,
        held: int,
        more: int,
        limit: float,
        own: int,
        state: _Revision | None = None,
    ) -> None:
        """Refuse what is above a limit; `own`: of what is held, the tenant's, where others ask, too."""
        is_over = held > 0 and held + more > math.ceil(limit)
        if not is_over and has_share(own, more, math.ceil(limit) - held, demand.weight):
            return
        wait_s = RETRY_S
        if state is not None:
            wait_s = min(state.refusing.values(), default=RETRY_S)
        if is_over:
            raise self._refusal(bound, demand, wait_s, limit=math.ceil(limit), current=held)
        raise self._refusal(
            "share", demand, wait_s, limit=math.ceil(limit), current=held, tenantCurrent=str(own), of=bound
        )

    def _check_replicas(self, demand: Demand, state: _Revision, now: float) -> None:
        replicas = state.capacity.replicas
        if len(state.refusing) < len(replicas):
            return
        asking, known = demand.asking, state.refused.get(demand.tenant)
        if known is not None and known.covers(asking, now):
            bound = known.bound
        else:
            bound = ""
            for name in replicas:
                why = self.doors.refuses(name, asking, now)
                if not why:
                    return
                bound = max(bound, why)
            if len(replicas) > LOOKED_AT_MAX:
                if len(state.refused) >= REFUSED_MAX:
                    state.refused.clear()
                state.refused[demand.tenant] = _Refused(asking, bound, now + VERDICT_S)
        raise self._refusal(
            bound,
            demand,
            min(state.refusing.values()),
            limit=len(replicas),
            current=len(replicas),
            **({} if bound == "replicas" else {"of": "replicas"}),
        )

    def _refusal(self, bound: str, demand: Demand, wait_s: float, *, limit: int, current: int, **more: str) -> Failure:
        self.refused[bound] += 1
        return Failure(
            Reason.OVERLOADED,
            _WORDS[bound],
            metadata={
                "stage": "router",
                "bound": bound,
                "limit": str(limit),
                "current": str(current),
                "priority": demand.priority.name,
                "revision": demand.revision,
                **more,
            },
            retry_after_s=self.retry_s(wait_s),
        )


_WORDS: Mapping[str, str] = {
    "requests": "As many requests run as may at this priority; try again shortly.",
    "tokens": "The requests that run have reserved all tokens that they may; try again shortly.",
    "bytes": "This Router holds as many bytes as it may; try again shortly, or another one.",
    "share": "What is left is for tenants that hold less; try again shortly.",
    "replicas": "All replicas of the model refuse more at present; try again shortly.",
    "wait": "At each replica of the model it would wait longer than it may, or be too late; try again shortly.",
}
