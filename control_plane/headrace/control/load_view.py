"""How busy each replica is, as far as one Router can know: what it sent there itself, and what Schedulers report.

What this Router has in flight is exact: it is a set of attempt tokens, so it cannot drift from the truth. What others
have there comes from the latest report, which loses weight with its age towards what is usual for the revision. So an
old report neither attracts everybody to a replica that was idle once, nor keeps them away from one that was busy.

Sans-io: instants are monotonic seconds. One clock reading for each call; nothing here costs more than O(1) an attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.control.doors import Closed
from headrace.control.resources import FailureDomain, Replica, ReplicaState

HALF_LIFE = 0.35
"""Age at which a report counts half, in attempts' times: what is reported ends, and what comes instead goes elsewhere.
Simulated: a quarter to a half waits least (tests/control/test_herding.py)."""

HALF_LIFE_S_MIN, HALF_LIFE_S_MAX = 0.1, 10.0

SERVICE_S = 2.0
"""Time that an attempt holds a slot, seconds, until one of the revision has been measured."""

BYTES_PER_TOKEN = 4.0
"""Of text, until prompts of the revision have been measured."""

PREFILL_TOKENS_PER_S = 1000.0
"""Until a worker of the revision has told its own."""

NEVER = float("-inf")
"""When a report came that never did: its age is infinite, so it weighs nothing."""

_READY = ReplicaState.READY
_LEARN = 0.1
"""Weight of the newest measurement."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a Scheduler says of one replica; headrace.api.scheduler.v1.ReplicaLoad."""

    active: int = 0
    waiting: int = 0
    slots: int = 0
    kv_cells_reserved: int = 0
    kv_cells: int = 0
    queue_wait_s: float | None = None
    """What a request of middling size that came now would wait for its slot; None: not measured yet."""
    concurrency_limit: int = 0
    """Attempts that it runs at a time at present; 0: its slots."""
    admits_from: int = 0
    """Lowest priority that it takes at present; 0: any."""
    prefill_tokens_per_s: float = 0.0
    """0: not measured yet."""
    room: int | None = None
    """How many more may come before its queue is full; None: not told."""
    closed: tuple[Closed, ...] = ()
    """To whom it is closed."""
    kv_stored: int = 0
    """Tokens that its prefix cache stored since its engine's start; 0 with the next: not told."""
    kv_removed: int = 0

    width: int = field(init=False)
    """Attempts that it runs at a time; at least 1."""

    def __post_init__(self) -> None:
        """Derive the width, once: scores read it often."""
        width = min(self.concurrency_limit or self.slots, self.slots or self.concurrency_limit)
        object.__setattr__(self, "width", max(1, width))


_NO_REPORT = ReplicaReport()


class Habits:
    """What is usual for one revision, over all its replicas."""

    __slots__ = (
        "bytes_per_token", "in_flight", "in_flight_by_zone", "others_per_slot", "prefill_tokens_per_s",
        "replicas", "service_s", "slots", "slots_by_zone",
    )  # fmt: skip

    def __init__(self) -> None:
        self.service_s = SERVICE_S
        """From the engine's admission to the end of an attempt, mean."""
        self.others_per_slot = 0.0
        """Attempts of other Routers for each slot, mean over reports."""
        self.prefill_tokens_per_s = PREFILL_TOKENS_PER_S
        self.bytes_per_token = BYTES_PER_TOKEN
        self.in_flight = 0
        self.in_flight_by_zone: Counter[str] = Counter()
        self.replicas = 0
        self.slots = 0
        self.slots_by_zone: Counter[str] = Counter()


class Standing:
    """What is known of one replica, in one flat record.

    A decision reads a few of ten thousand, so each object that it follows to is a cache miss.
    """

    __slots__ = (
        "admits_from", "endpoint", "epoch", "habits", "is_open", "kv_cells", "kv_free", "name", "own",
        "prefill_tokens_per_s", "queue_wait_s", "queued_per_slot", "replica", "report", "reported_at", "theirs",
        "tokens", "width", "zone",
    )  # fmt: skip

    def __init__(self, name: str, habits: Habits) -> None:
        self.name = name
        self.habits = habits
        self.replica: Replica | None = None
        """As the snapshot has it; None: it is in none."""
        self.is_open = False
        """Whether it is ready and has an epoch: one look in place of three."""
        self.epoch = 0
        self.endpoint = ""
        self.zone = ""
        self.tokens: set[int] = set()
        """Attempts of this Router in flight there."""
        self.own = 0
        """How many those are."""
        self.width = 1
        """Attempts that it runs at a time: by the report, or its slots."""
        self.report: ReplicaReport | None = None
        """What follows is out of it."""
        self.reported_at = NEVER
        self.theirs = 0
        """Attempts of other Routers there, by that report."""
        self.queue_wait_s: float | None = None
        self.queued_per_slot = 0.0
        """What waits for each that runs at a time, where it is only counted."""
        self.admits_from = 0
        self.kv_cells = self.kv_free = 0
        self.prefill_tokens_per_s = 0.0

    def place(self, replica: Replica, habits: Habits) -> None:
        """The snapshot has it, as `replica`."""
        self.replica, self.habits, self.zone = replica, habits, replica.failure_domain.zone
        self.is_open = replica.state is _READY and replica.epoch != 0
        self.epoch, self.endpoint = replica.epoch, replica.endpoint
        if self.report is None:
            self.width = replica.slots or 1

    def take(self, report: ReplicaReport, at: float) -> None:
        """A report has come; it was true at the instant `at`."""
        self.report, self.reported_at = report, at
        self.theirs = max(0, report.active + report.waiting - self.own)
        self.width = width = report.width
        self.queue_wait_s = report.queue_wait_s
        self.queued_per_slot = max(0.0, report.active + report.waiting + 1.0 - width) / width
        self.admits_from = report.admits_from
        self.kv_cells, self.kv_free = report.kv_cells, report.kv_cells - report.kv_cells_reserved
        self.prefill_tokens_per_s = report.prefill_tokens_per_s

    def forget_report(self) -> None:
        """It was another process's."""
        self.take(_NO_REPORT, NEVER)
        self.report = None
        self.width = (self.replica.slots if self.replica is not None else 0) or 1

    def age_s(self, now: float) -> float | None:
        """Age of the report; None: there is none."""
        return None if self.report is None else max(0.0, now - self.reported_at)


class Change(NamedTuple):
    """What a snapshot changed."""

    void: list[Replica]
    """As they were: gone, or another epoch has come in their place. What was known of them holds no more."""
    fresh: list[Replica]
    """Ready, and were not before. None in the first snapshot: a Router that starts knows nobody's age."""


@dataclass(slots=True)
class _Flight:
    standing: Standing
    admitted_at: float | None = None


class LoadView:
    """Of one Router. `apply` the replicas of each snapshot, in order.

    Args:
        half_life: age at which a report counts half, in attempts' mean times.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self.standings_by_name: dict[str, Standing] = {}
        """What is known, to be read only."""
        self._habits: dict[str, Habits] = {}
        self._flights: dict[int, _Flight] = {}
        self._applied: Mapping[str, tuple[Replica, ...]] = {}

    def apply(self, replicas_of: Mapping[str, tuple[Replica, ...]]) -> Change:
        """Take over the replicas by revision. Only revisions whose replicas changed are looked at."""
        changed = [name for name, found in replicas_of.items() if self._applied.get(name) is not found]
        gone = [name for name in self._applied if name not in replicas_of]
        before = {r.name: r for name in (*changed, *gone) for r in self._applied.get(name, ())}
        is_first, change = not self._applied, Change([], [])
        for name in changed:
            self._count(self.habits(name), replicas_of[name])
            for replica in replicas_of[name]:
                was = before.pop(replica.name, None)
                if was is not None and was.epoch != replica.epoch:
                    change.void.append(was)
                was_ready = was is not None and was.state is _READY and was.epoch == replica.epoch
                if replica.state is _READY and not was_ready and not is_first:
                    change.fresh.append(replica)
                self._place(replica, is_void=was is None or was.epoch != replica.epoch)
        for was in before.values():
            standing = self.standings_by_name[was.name]
            if standing.replica is was:
                standing.replica, standing.is_open = None, False
                standing.forget_report()
                self._forget_if_unused(standing)
                change.void.append(was)
        for name in gone:
            self._count(self._habits.pop(name), ())
        self._applied = dict(replicas_of)
        return change

    def report(self, name: str, report: ReplicaReport, now: float, age_s: float = 0.0) -> bool:
        """Take in a report that is `age_s` seconds old. False: no snapshot has the replica, and it is left out."""
        standing = self.standings_by_name.get(name)
        if standing is None or standing.replica is None:
            return False
        standing.take(report, now - age_s)
        habits = standing.habits
        habits.others_per_slot += _LEARN * (standing.theirs / report.width - habits.others_per_slot)
        if report.prefill_tokens_per_s:
            habits.prefill_tokens_per_s += _LEARN * (report.prefill_tokens_per_s - habits.prefill_tokens_per_s)
        return True

    def begin(self, token: int, name: str) -> None:
        """An attempt was dispatched."""
        assert token not in self._flights, "a token is used once"
        standing = self.standings_by_name.get(name)
        if standing is None:
            standing = self.standings_by_name[name] = Standing(name, Habits())
        standing.tokens.add(token)
        standing.own = len(standing.tokens)
        standing.habits.in_flight += 1
        standing.habits.in_flight_by_zone[standing.zone] += 1
        self._flights[token] = _Flight(standing)

    def admitted(self, token: int, now: float) -> None:
        """The engine has begun with it."""
        flight = self._flights.get(token)
        if flight is not None:
            flight.admitted_at = now

    def end(self, token: int, now: float, *, is_measured: bool = True) -> bool:
        """It is over; `is_measured` if its time says something of the worker. False: it was not in flight."""
        flight = self._flights.pop(token, None)
        if flight is None:
            return False
        standing = flight.standing
        habits = standing.habits
        standing.tokens.discard(token)
        standing.own = len(standing.tokens)
        habits.in_flight -= 1
        habits.in_flight_by_zone[standing.zone] -= 1
        if is_measured and flight.admitted_at is not None:
            habits.service_s += _LEARN * (max(0.0, now - flight.admitted_at) - habits.service_s)
        self._forget_if_unused(standing)
        return True

    def standing(self, name: str) -> Standing | None:
        """What is known of a replica; None: nothing."""
        return self.standings_by_name.get(name)

    def domains(self, names: Iterable[str]) -> tuple[FailureDomain, ...]:
        """Failure domains of these replicas, as far as a snapshot has them."""
        found = (self.standings_by_name.get(name) for name in names)
        return tuple(s.replica.failure_domain for s in found if s is not None and s.replica is not None)

    def habits(self, revision: str) -> Habits:
        """What is usual for a revision."""
        found = self._habits.get(revision)
        if found is None:
            found = self._habits[revision] = Habits()
        return found

    def known(self, replica: Replica) -> Standing:
        """What is known of a replica as some snapshot has it; where that is another one than the applied, its place."""
        standing = self.standings_by_name.get(replica.name)
        if standing is None or (standing.replica is not replica and standing.replica != replica):
            standing = Standing(replica.name, self.habits(replica.revision))
            standing.place(replica, standing.habits)
        return standing

    def half_life_s(self, habits: Habits) -> float:
        """Age at which reports of a revision count half."""
        half_life_s = self._half_life * habits.service_s
        if half_life_s < HALF_LIFE_S_MIN:
            return HALF_LIFE_S_MIN
        return half_life_s if half_life_s < HALF_LIFE_S_MAX else HALF_LIFE_S_MAX

    def weight(self, standing: Standing, now: float) -> float:
        """How much its report counts now: 1 when fresh, 0 when there is none."""
        age_s = now - standing.reported_at
        return 1.0 if age_s <= 0.0 else float(0.5 ** (age_s / self.half_life_s(standing.habits)))

    @property
    def in_flight(self) -> dict[str, int]:
        """Attempts of this Router in flight, by replica; those without any are left out."""
        return {name: len(standing.tokens) for name, standing in self.standings_by_name.items() if standing.tokens}

    @property
    def tokens(self) -> frozenset[int]:
        """All attempts of this Router in flight."""
        return frozenset(self._flights)

    @property
    def standings(self) -> Iterable[Standing]:
        """All that is known."""
        return self.standings_by_name.values()

    def _place(self, replica: Replica, *, is_void: bool) -> None:
        standing, habits = self.standings_by_name.get(replica.name), self.habits(replica.revision)
        if standing is None:
            standing = self.standings_by_name[replica.name] = Standing(replica.name, habits)
        elif is_void:
            standing.forget_report()
        zone = replica.failure_domain.zone
        if standing.habits is not habits or standing.zone != zone:
            count = len(standing.tokens)
            for owner, where, sign in ((standing.habits, standing.zone, -1), (habits, zone, 1)):
                owner.in_flight += sign * count
                owner.in_flight_by_zone[where] += sign * count
        standing.place(replica, habits)

    def _count(self, habits: Habits, replicas: tuple[Replica, ...]) -> None:
        habits.replicas, habits.slots = len(replicas), 0
        habits.slots_by_zone.clear()
        for replica in replicas:
            habits.slots += max(1, replica.slots)
            habits.slots_by_zone[replica.failure_domain.zone] += max(1, replica.slots)

    def _forget_if_unused(self, standing: Standing) -> None:
        """Nothing is kept of what left the snapshot, once its last attempt has ended."""
        if standing.replica is None and not standing.tokens:
            self.standings_by_name.pop(standing.name, None)
