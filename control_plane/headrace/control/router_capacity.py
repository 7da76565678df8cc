"""How much of one revision a Router takes in: what its replicas can hold, and never more than that at once.

    holds    = sum over usable replicas of (slots + the queue that their Scheduler allows) x HEADROOM, and as many KV
               cells; with several Routers, twice an even share at most
    allowed  = holds x share; share is 1 in quiet times

    replicas go                  allowed shrinks with them, at once
    a whole failure domain goes  allowed falls to SHOCK of what remains and ramps up from there: what ran in the
                                 domain is made again on the survivors, and the callers' retries come on top
    replicas come                allowed ramps up from where it was: they are cold, and so is what leads to them

What runs already is kept. While it is more than `allowed`, nothing new is taken in. Sans-io.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from headrace.control.attempt_book import waiting_max
from headrace.control.resources import Execution, Replica

HEADROOM = 1.25
"""A Router knows the Schedulers' load late; they have the last word."""
SHOCK = 0.8
RAMP_PER_S = 0.1
"""Share of what can be held by which the limit grows in a second."""
RESTART = 0.5
"""Share after nobody could be reached at all."""
DOMAIN_SHARE = 0.1
"""A domain that held less than this share of the capacity is no shock."""


@dataclass(frozen=True, slots=True)
class Holds:
    """What can be held: requests, and tokens of prompt and output together."""

    requests: float = 0.0
    tokens: float = 0.0

    def scaled(self, factor: float) -> Holds:
        """So many times of it."""
        return Holds(self.requests * factor, self.tokens * factor)


def holds_of(replica: Replica, execution: Execution, queue: int = 0) -> Holds:
    """What one replica and the queue in front of it can hold; `queue` 0: its Scheduler has not said how many wait."""
    slots = replica.slots or execution.slots or 1
    cells = replica.kv_cells or execution.kv_cells or slots * execution.context_tokens
    requests = slots + (queue or waiting_max(slots))
    return Holds(requests, cells * requests / slots)


def domains_of(replica: Replica) -> tuple[tuple[str, ...], ...]:
    """The failure domains that a replica is in, the largest first; levels without a name are none."""
    domain = replica.failure_domain
    path = (domain.zone, domain.rack, domain.host)
    return tuple(path[: level + 1] for level in range(3) if path[level])


class _Member(NamedTuple):
    replica: Replica
    queue: int
    holds: Holds
    domains: tuple[tuple[str, ...], ...]


class RevisionCapacity:
    """The limit of one revision in one Router."""

    __slots__ = ("_had_any", "_holds", "_members", "_share", "_since", "shocks")

    def __init__(self) -> None:
        self._holds = Holds()
        self._members: dict[str, _Member] = {}
        self._had_any = False
        self._share = 1.0
        self._since = 0.0
        self.shocks = 0
        """Failure domains that were lost whole."""

    @property
    def replicas(self) -> Set[str]:
        """Names of the usable replicas."""
        return self._members.keys()

    def allowed(self, now: float) -> Holds:
        """What may be held now."""
        return self._holds.scaled(self._share_at(now))

    def apply(
        self,
        usable: Iterable[Replica],
        execution: Execution,
        *,
        planned: Container[str],
        routers: int,
        now: float,
        queues: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Take over which replicas are usable.

        Args:
            usable: ready, reachable and not ejected.
            execution: of the revision, for what replicas do not say themselves.
            planned: names of those that leave because somebody wants it; their going is no shock.
            routers: how many share them.
            now: monotonic seconds.
            queues: attempts that may wait, by replica, where a Scheduler has said it.

        Most replicas are as they were, since snapshots share them: those cost little.
        """
        allowed = self.allowed(now).requests
        before, members = self._members, {}
        requests = tokens = 0.0
        for replica in usable:
            one, queue = before.get(replica.name), queues.get(replica.name, 0)
            if one is None or one.replica is not replica or one.queue != queue:
                one = _Member(replica, queue, holds_of(replica, execution, queue), domains_of(replica))
            members[replica.name] = one
            requests += one.holds.requests
            tokens += one.holds.tokens
        self._members = members
        self._holds = Holds(requests, tokens).scaled(HEADROOM * min(1.0, 2.0 / max(1, routers)))
        self._since = now
        if not members or not self._had_any:
            self._share = 1.0  # nothing can have piled up for those who come first
            self._had_any = self._had_any or bool(members)
            return
        if not before:
            self._share = RESTART
            return
        self._share = min(1.0, allowed / self._holds.requests)
        if _lost_domain(before, members, planned):
            self.shocks += 1
            self._share = min(self._share, SHOCK)

    def _share_at(self, now: float) -> float:
        return min(1.0, self._share + RAMP_PER_S * max(0.0, now - self._since))


def _lost_domain(before: dict[str, _Member], after: dict[str, _Member], planned: Container[str]) -> bool:
    """Whether a domain that mattered has nobody left, and not because somebody wanted it."""
    gone = {name: member for name, member in before.items() if name not in after and name not in planned}
    if not gone:
        return False
    alive = {domain for member in after.values() for domain in member.domains}
    lost: dict[tuple[str, ...], float] = {}
    for member in gone.values():
        for domain in member.domains:
            if domain not in alive:
                lost[domain] = lost.get(domain, 0.0) + member.holds.requests
    return max(lost.values(), default=0.0) >= DOMAIN_SHARE * sum(member.holds.requests for member in before.values())
