"""Which replicas are out of the question for a request, and by what.

Sans-io; instants are monotonic seconds. One look costs about a microsecond: decisions look at a handful of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from headrace.control.outliers import Health, Outliers
from headrace.control.prefix_index import BLOCK_BYTES, BLOCK_TOKENS
from headrace.control.priority import Priority
from headrace.control.resources import FailureDomain, Replica, ReplicaState, Revision
from headrace.control.snapshot import RoutingSnapshot

STALE_EPOCH_S = 2.0
"""How long a replica is left alone that said its epoch is another one; by then the snapshot has it."""

_POOLS_MAX = 256
_READY = ReplicaState.READY


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a replica, whatever attempt it is."""

    prompt_size: int = 0
    """Bytes of its text, or tokens where it has ids."""
    is_tokens: bool = False
    output_tokens: int = 0
    """Most of them."""
    blocks: tuple[bytes, ...] = ()
    """Hashes of its beginning; headrace.control.prefix_index."""
    affinity: int = 0
    """Its session; headrace.control.affinity. 0: none."""
    zones: frozenset[str] = frozenset()
    """Zones that may serve it; empty: all."""
    priority: int = Priority.STANDARD
    guided: str = ""
    """Kind of guided decoding; "": none."""

    @property
    def block_size(self) -> int:
        """Of one block, in the unit of `prompt_size`."""
        return BLOCK_TOKENS if self.is_tokens else BLOCK_BYTES


NO_DEMAND = Demand()
"""Of a request of which nothing is known."""


class Question(NamedTuple):
    """The facts of one decision."""

    snapshot: RoutingSnapshot
    revision: Revision
    demand: Demand
    reachable: Callable[[str], bool]
    """Whether a Scheduler, by endpoint, can be sent anything."""
    now: float
    tried: Container[str] = ()
    """Names of replicas that this request was on."""
    failed: tuple[FailureDomain, ...] = ()
    """Failure domains of those."""
    home: str = ""
    """The replica of the request's session; "": it has none."""


class Filters:
    """Of one Router.

    Args:
        outliers: who is ejected.
        zones_excluded: zones that get nothing.
    """

    def __init__(self, outliers: Outliers, zones_excluded: frozenset[str] = frozenset()) -> None:
        self._outliers = outliers
        self._zones_excluded = zones_excluded
        self._stale: dict[str, tuple[int, float]] = {}
        self._pools: dict[tuple[str, frozenset[str], str], tuple[tuple[Replica, ...], tuple[Replica, ...]]] = {}

    def excluded_by(self, replica: Replica, question: Question, *, ejected: bool = True) -> str:
        """Name of the first filter that excludes a replica of the revision; "" if none does. Cheap ones come first.

        Args:
            replica: of the revision.
            question: of what decision.
            ejected: whether ejection counts.
        """
        name, demand = replica.name, question.demand
        if replica.state is not _READY:
            return "not ready"
        if name in question.snapshot.revocation_of:
            return "revoked"
        if name in question.tried:
            return "tried"
        if not replica.epoch or (self._stale and self._is_stale(replica, question.now)):
            return "epoch"
        if demand.zones or self._zones_excluded:
            zone = replica.failure_domain.zone
            if demand.zones and zone not in demand.zones:
                return "zone"
            if zone in self._zones_excluded:
                return "zone excluded"
        if demand.guided and demand.guided not in replica.guided:
            return "capability"
        if demand.is_tokens and 0 < replica.kv_cells < demand.prompt_size:
            return "capability"
        if not question.reachable(replica.endpoint):
            return "unreachable"
        if ejected and self._outliers.is_any_out and self._outliers.excludes(name, question.now):
            return "ejected" if self._outliers.health(name, question.now) is Health.EJECTED else "probed"
        return ""

    def pool(self, question: Question) -> tuple[Replica, ...]:
        """Ready replicas that will do by zone and by kind of guide: drawn from directly, so that few of many cost no
        search.
        """
        name, zones, guided = question.revision.name, question.demand.zones, question.demand.guided
        ready = question.snapshot.ready_of[name]
        if not zones and not self._zones_excluded and not guided:
            return ready
        kept = self._pools.get((name, zones, guided))
        if kept is None or kept[0] is not ready:
            if len(self._pools) >= _POOLS_MAX:
                self._pools.clear()
            found = tuple(r for r in ready if self._is_in(r.failure_domain.zone, zones))
            if guided:
                found = tuple(r for r in found if guided in r.guided)
            kept = self._pools[name, zones, guided] = (ready, found)
        return kept[1]

    def epoch_refused(self, replica: str, epoch: int, now: float) -> None:
        """A replica says that its epoch is another one."""
        self._stale[replica] = (epoch, now + STALE_EPOCH_S)

    def forget(self, replica: str) -> None:
        """It is gone, or has another epoch."""
        self._stale.pop(replica, None)

    def _is_in(self, zone: str, zones: frozenset[str]) -> bool:
        return (not zones or zone in zones) and zone not in self._zones_excluded

    def _is_stale(self, replica: Replica, now: float) -> bool:
        epoch, until = self._stale.get(replica.name, (0, 0.0))
        return epoch == replica.epoch and now < until
