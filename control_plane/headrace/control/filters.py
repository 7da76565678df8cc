"""Which replicas are out of the question for a request, and by what.

Sans-io; instants are monotonic seconds. One look costs about a microsecond: decisions look at a handful of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from headrace.control.doors import Asking, Doors
from headrace.control.load_view import Standing
from headrace.control.outliers import Health, Outliers
from headrace.control.prefix_index import BLOCK_BYTES, BLOCK_TOKENS
from headrace.control.priority import Priority
from headrace.control.resources import FailureDomain, ReplicaState, Revision
from headrace.control.snapshot import RoutingSnapshot

STALE_EPOCH_S = 2.0
"""How long a replica is left alone that said its epoch is another one; by then the snapshot has it."""

_READY = ReplicaState.READY


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a replica, whatever attempt it is."""

    prompt_size: int = 0
    """Bytes of its text, or tokens where it has ids."""
    is_tokens: bool = False
    output_tokens: int = 0
    """Most of them."""
    blocks: tuple[int, ...] = ()
    """Hashes of its beginning; headrace.control.prefix_index."""
    affinity: int = 0
    """Its session; headrace.control.affinity. 0: none."""
    zones: frozenset[str] = frozenset()
    """Zones that may serve it; empty: all."""
    priority: int = Priority.STANDARD
    asking: Asking | None = None
    """What a replica might refuse it for."""
    guided: str = ""
    """Kind of guided decoding; "": none."""

    @property
    def block_size(self) -> int:
        """Of one block, in the unit of `prompt_size`."""
        return BLOCK_TOKENS if self.is_tokens else BLOCK_BYTES


NO_DEMAND = Demand()
"""Of a request of which nothing is known."""


@dataclass(slots=True)
class Question:
    """The facts of one decision. Nobody changes them; frozen it would cost twice as much to make."""

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
        doors: who refuses whom.
    """

    def __init__(
        self, outliers: Outliers, zones_excluded: frozenset[str] = frozenset(), doors: Doors | None = None
    ) -> None:
        self._outliers = outliers
        self._doors = (doors if doors is not None else Doors()).by_replica
        self.zones_excluded = zones_excluded
        self._stale: dict[str, tuple[int, float]] = {}

    def excluded_by(
        self, standing: Standing, question: Question, *, ejected: bool = True, refusing: bool = True
    ) -> str:
        """Name of the first filter that excludes a replica of the revision; "" if none does. Cheap ones come first.

        Args:
            standing: the replica's.
            question: of what decision.
            ejected: whether ejection counts.
            refusing: whether it counts that the replica would refuse the request.
        """
        name, demand = standing.name, question.demand
        if not standing.is_open and (standing.replica is None or standing.replica.state is not _READY):
            return "not ready"
        if name in question.snapshot.revocation_of:
            return "revoked"
        if name in question.tried:
            return "tried"
        if not standing.is_open or (self._stale and self._is_stale(standing, question.now)):
            return "epoch"
        if demand.zones or self.zones_excluded:
            if demand.zones and standing.zone not in demand.zones:
                return "zone"
            if standing.zone in self.zones_excluded:
                return "zone excluded"
        if demand.guided and (standing.replica is None or demand.guided not in standing.replica.guided):
            return "capability"
        if demand.is_tokens and standing.replica is not None and 0 < standing.replica.kv_cells < demand.prompt_size:
            return "capability"
        if not question.reachable(standing.endpoint):
            return "unreachable"
        door = self._doors.get(name) if refusing else None
        if door is not None and demand.asking is not None and door.refuses(demand.asking, question.now):
            return "refuses"
        if ejected and self._outliers.out_by_revision and self._outliers.excludes(name, question.now):
            return "ejected" if self._outliers.health(name, question.now) is Health.EJECTED else "probed"
        return ""

    def epoch_refused(self, replica: str, epoch: int, now: float) -> None:
        """A replica says that its epoch is another one."""
        self._stale[replica] = (epoch, now + STALE_EPOCH_S)

    def forget(self, replica: str) -> None:
        """It is gone, or has another epoch."""
        self._stale.pop(replica, None)

    def _is_stale(self, standing: Standing, now: float) -> bool:
        epoch, until = self._stale.get(standing.name, (0, 0.0))
        return epoch == standing.epoch and now < until
