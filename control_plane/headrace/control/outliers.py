"""Which replicas are left out because they fail: faults before the first token count, nothing else, and a share stays.

    CLOSED ──faults in a row, or most of the latest──> EJECTED
    EJECTED ──its time is over──> HALF_OPEN ──first token of the probe──> CLOSED, slow start
                                  HALF_OPEN ──fault of the probe──> EJECTED, for twice as long

A refusal is no fault: a replica that says "full", "draining" or "not my epoch" is healthy. Nor is what its caller did.
Attempts that are lost together (a process died, a link broke) are one fault, not one each.

Sans-io; instants are monotonic seconds.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.control.errors import Reason

FAULTS = frozenset({Reason.WORKER_LOST_BEFORE_OUTPUT, Reason.ENGINE_FAILED})
"""Ends of an attempt that speak against its replica, where no token had come. A lost link is the first of them."""


class Health(enum.Enum):
    """What a replica's faults say."""

    CLOSED = "closed"
    EJECTED = "ejected"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class EjectionRules:
    """When a replica is ejected, and for how long."""

    in_a_row: int = 3
    """Faults without a first token between them."""
    rate: float = 0.5
    """Share of faults among the latest outcomes..."""
    outcomes_min: float = 8.0
    """...if there are so many; older ones count less and less."""
    half_life_s: float = 10.0
    """Age at which an outcome counts half."""
    together_s: float = 0.1
    """Faults closer together than this are one."""
    time_s: float = 5.0
    """First ejection; each further one takes twice as long as the one before."""
    time_s_max: float = 300.0
    forgive_s: float = 300.0
    """Time in good health after which the next ejection is a first one again."""
    share_max: float = 0.5
    """Most of a revision's replicas that may be out at a time; faults of more say that the fault is elsewhere."""


class _Record:
    """One replica's."""

    __slots__ = ("closed_at", "ejections", "fault_at", "faults", "health", "outcome_at", "outcomes", "probe", "row",
                 "until")  # fmt: skip

    def __init__(self) -> None:
        self.health = Health.CLOSED
        self.row = 0
        self.faults = 0.0
        self.outcomes = 0.0
        self.outcome_at = 0.0
        self.fault_at = float("-inf")
        self.ejections = 0
        self.until = 0.0
        self.probe: int | None = None
        self.closed_at = float("-inf")


class Outliers:
    """Of one Router. `resize` tells how many replicas each revision has."""

    def __init__(self, rules: EjectionRules | None = None) -> None:
        self.ejections = 0
        """How often a replica was ejected."""
        self.spared = 0
        """How often one was not, because too many of its revision were out."""
        self._rules = rules or EjectionRules()
        self._records: dict[str, _Record] = {}
        self.out_by_revision: dict[str, OrderedDict[str, None]] = {}
        """Those that are not CLOSED, the longest out first; to be read only."""
        self._sizes: dict[str, int] = {}

    @property
    def is_any_out(self) -> bool:
        """Whether any replica is not CLOSED."""
        return bool(self.out_by_revision)

    def resize(self, replicas_of: Mapping[str, int]) -> None:
        """The revisions have so many replicas now. Where too many are out, the longest out come back."""
        self._sizes = dict(replicas_of)
        for revision, out in list(self.out_by_revision.items()):
            while len(out) > self._out_max(revision):
                name, _ = out.popitem(last=False)
                record = self._records[name]
                record.health, record.probe = Health.CLOSED, None
            if not out:
                del self.out_by_revision[revision]

    def forget(self, revision: str, replica: str) -> None:
        """It is gone, or another process is behind it: nothing is held against that one."""
        self._records.pop(replica, None)
        out = self.out_by_revision.get(revision)
        if out is not None:
            out.pop(replica, None)
            if not out:
                del self.out_by_revision[revision]

    def health(self, replica: str, now: float) -> Health:
        """What its faults say now."""
        record = self._records.get(replica)
        if record is None or record.health is Health.CLOSED:
            return Health.CLOSED
        return Health.EJECTED if now < record.until else Health.HALF_OPEN

    def excludes(self, replica: str, now: float) -> bool:
        """Whether it is left out now: it is ejected, or its probe is on the way."""
        record = self._records.get(replica)
        if record is None or record.health is Health.CLOSED:
            return False
        return now < record.until or record.probe is not None

    def out(self, now: float) -> dict[Health, int]:
        """How many are not CLOSED, by what they are. Metrics read it from another thread: from copies."""
        found = {Health.EJECTED: 0, Health.HALF_OPEN: 0}
        for names in tuple(self.out_by_revision.values()):
            for name in tuple(names):
                found[self.health(name, now)] += 1
        return found

    def dispatched(self, replica: str, token: int, now: float) -> None:
        """An attempt goes there; to one that is half open it is the probe."""
        record = self._records.get(replica)
        if record is None or record.health is Health.CLOSED or now < record.until:
            return
        if record.probe is None:
            record.health, record.probe = Health.HALF_OPEN, token

    def succeeded(self, revision: str, replica: str, token: int, now: float) -> bool:
        """An attempt's first token came. True: the replica has recovered by that."""
        record = self._records.get(replica)
        if record is None:
            return False
        self._count(record, now, fault=False)
        record.row = 0
        if record.health is Health.CLOSED or record.probe != token:
            return False
        self._close(revision, replica, record, now)
        return True

    def faulted(self, revision: str, replica: str, token: int, now: float) -> bool:
        """An attempt ended by a fault before its first token. True: the replica is ejected by that."""
        record = self._records.setdefault(replica, _Record())
        if record.health is not Health.CLOSED:
            if record.probe == token:
                record.probe = None
                self._eject(record, now)
                return True
            return False
        together = now - record.fault_at < self._rules.together_s
        record.fault_at = now
        if together:
            return False
        self._count(record, now, fault=True)
        record.row += 1
        rules = self._rules
        if record.row < rules.in_a_row and not (
            record.outcomes >= rules.outcomes_min and record.faults >= rules.rate * record.outcomes
        ):
            return False
        out = self.out_by_revision.setdefault(revision, OrderedDict())
        if len(out) + 1 > self._out_max(revision):
            self.spared += 1
            return False
        out[replica] = None
        self._eject(record, now)
        return True

    def released(self, replica: str, token: int) -> None:
        """An attempt ended without saying anything of its replica; if it was the probe, the next one is."""
        record = self._records.get(replica)
        if record is not None and record.probe == token:
            record.probe = None

    def _out_max(self, revision: str) -> int:
        return int(self._rules.share_max * self._sizes.get(revision, 0))

    def _eject(self, record: _Record, now: float) -> None:
        rules = self._rules
        if record.health is Health.CLOSED and now - record.closed_at > rules.forgive_s:
            record.ejections = 0
        record.health = Health.EJECTED
        record.until = now + min(rules.time_s_max, rules.time_s * 2.0 ** min(record.ejections, 32))
        record.ejections += 1
        self.ejections += 1

    def _close(self, revision: str, replica: str, record: _Record, now: float) -> None:
        record.health, record.probe, record.closed_at = Health.CLOSED, None, now
        record.row, record.faults, record.outcomes = 0, 0.0, 0.0
        out = self.out_by_revision.get(revision)
        if out is not None:
            out.pop(replica, None)
            if not out:
                del self.out_by_revision[revision]

    def _count(self, record: _Record, now: float, *, fault: bool) -> None:
        kept = 0.5 ** (max(0.0, now - record.outcome_at) / self._rules.half_life_s)
        record.outcomes = record.outcomes * kept + 1.0
        record.faults = record.faults * kept + fault
        record.outcome_at = now
