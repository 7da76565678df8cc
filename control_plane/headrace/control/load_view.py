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
    kv_stored: int = 0
    """Tokens that its prefix cache stored since its engine's start; 0 with the next: not told."""
    kv_removed: int = 0

    width: int = field(init=False)
    """Attempts that it runs at a time; at least 1."""

    def __post_init__(self) -> None:
        """Derive the width, once: scores read it often."""
        width = min(self.concurrency_limit or self.slots, self.slots or self.concurrency_limit)
        object.__setattr__(self, "width", max(1, width))


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
    """What is known of one replica."""

    __slots__ = ("habits", "name", "replica", "report", "reported_at", "theirs", "tokens", "zone")

    def __init__(self, name: str, habits: Habits) -> None:
        self.name = name
        self.habits = habits
        self.replica: Replica | None = None
        """As the snapshot has it; None: it is in none."""
        self.zone = ""
        self.tokens: set[int] = set()
        """Attempts of this Router in flight there."""
        self.report: ReplicaReport | None = None
        self.reported_at = 0.0
        self.theirs = 0
        """Attempts of other Routers there, by that report."""

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
                standing.replica = standing.report = None
                self._forget_if_unused(standing)
                change.void.append(was)
        for name in gone:
            self._count(self._habits.pop(name), ())
        self._applied = dict(replicas_of)
        return change

    def report(self, name: str, report: ReplicaReport, now: float, age_s: float = 0.0) -> None:
        """Take in a report that is `age_s` seconds old; one of a replica that no snapshot has is left out."""
        standing = self.standings_by_name.get(name)
        if standing is None or standing.replica is None:
            return
        standing.report, standing.reported_at = report, now - age_s
        standing.theirs = max(0, report.active + report.waiting - len(standing.tokens))
        habits = standing.habits
        habits.others_per_slot += _LEARN * (standing.theirs / report.width - habits.others_per_slot)
        if report.prefill_tokens_per_s:
            habits.prefill_tokens_per_s += _LEARN * (report.prefill_tokens_per_s - habits.prefill_tokens_per_s)

    def begin(self, token: int, name: str) -> None:
        """An attempt was dispatched."""
        assert token not in self._flights, "a token is used once"
        standing = self.standings_by_name.get(name)
        if standing is None:
            standing = self.standings_by_name[name] = Standing(name, Habits())
        standing.tokens.add(token)
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

    def weight(self, standing: Standing, now: float) -> float:
        """How much its report counts now: 1 when fresh, 0 when there is none."""
        if standing.report is None:
            return 0.0
        age_s = now - standing.reported_at
        if age_s <= 0.0:
            return 1.0
        half_life_s = self._half_life * standing.habits.service_s
        if half_life_s < HALF_LIFE_S_MIN:
            half_life_s = HALF_LIFE_S_MIN
        elif half_life_s > HALF_LIFE_S_MAX:
            half_life_s = HALF_LIFE_S_MAX
        return float(0.5 ** (age_s / half_life_s))

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
            standing.report = None
        zone = replica.failure_domain.zone
        if standing.habits is not habits or standing.zone != zone:
            count = len(standing.tokens)
            for owner, where, sign in ((standing.habits, standing.zone, -1), (habits, zone, 1)):
                owner.in_flight += sign * count
                owner.in_flight_by_zone[where] += sign * count
        standing.replica, standing.habits, standing.zone = replica, habits, zone

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
