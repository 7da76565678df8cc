"""Which replica an attempt goes to: filters, then scores, over a small sample.

Two replicas that nothing excludes are drawn, one that keeps the prompt's beginning and the home of the session are
added, what each would cost is compared (`headrace.control.costs`) and the lowest taken; chance decides between equals.
Two choices are nearly as good as looking at all, and when what is known is a little old they do not send everybody to
the same place (Mitzenmacher, "The power of two choices in randomized load balancing"). One that keeps the beginning is
enough: each that takes a request keeps its prompt, too, so what many ask for is soon in many places, and found by
drawing. Drawing costs the same for ten replicas and for ten thousand; all are looked at only when hardly any will do.

Sans-io: snapshot, clock readings (monotonic seconds) and a source of chance are arguments. `Routing` remembers what it
is told of attempts: `dispatched`, `admitted`, `first_output`, `ended`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.control.affinity import Affinity
from headrace.control.costs import costs
from headrace.control.doors import Doors
from headrace.control.errors import Reason
from headrace.control.evictions import Evictions
from headrace.control.filters import Demand, Filters, Question
from headrace.control.guided import check_guided
from headrace.control.load_view import HALF_LIFE, LoadView, ReplicaReport, Standing
from headrace.control.outliers import FAULTS, EjectionRules, Outliers
from headrace.control.placement import Random, no_replica
from headrace.control.pools import Pools
from headrace.control.prefix_index import PrefixIndex
from headrace.control.resources import FailureDomain, Replica, Revision
from headrace.control.scores import Score, score
from headrace.control.slow_start import RAMP_S, SlowStart
from headrace.control.snapshot import RoutingSnapshot

CHOICES = 2
DRAWS_MAX = 12
"""Replicas drawn, at most, before all are looked at: if half of them will do, one choice in 300 comes to that."""

EQUAL_S = 1e-9
"""Scores closer than this are equal."""

_LEARN = 0.1


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """What an operator sets."""

    half_life: float = HALF_LIFE
    """Age at which a load report counts half, in attempts' mean times."""
    ramp_s: float = RAMP_S
    """Slow start of replicas that are new or recovered."""
    ejection: EjectionRules = field(default_factory=EjectionRules)
    zones_excluded: frozenset[str] = frozenset()
    """Zones that get nothing."""


class Candidate(NamedTuple):
    """One replica, as a decision saw it."""

    replica: Replica
    excluded_by: str
    """Name of the filter that excludes it; "": none does."""
    score: Score | None
    """None: it is excluded."""
    in_flight: int
    load_age_s: float | None


@dataclass(slots=True)
class _Flight:
    replica: str
    revision: str
    epoch: int
    demand: Demand
    expected: int
    """Blocks that were believed to be kept there."""


def _observe_nothing(outcome: str, age_s: float | None) -> None:
    return


class Routing:
    """Of one Router. `apply` each snapshot, in order, before it is asked about it."""

    def __init__(self, rules: RoutingRules | None = None) -> None:
        self.rules = rules or RoutingRules()
        self.loads = LoadView(self.rules.half_life)
        self.prefixes = PrefixIndex()
        self.evictions = Evictions()
        self.affinity = Affinity()
        self.outliers = Outliers(self.rules.ejection)
        self.slow_start = SlowStart(self.rules.ramp_s)
        self.doors = Doors()
        """Who would refuse whom."""
        self.filters = Filters(self.outliers, self.rules.zones_excluded, self.doors)
        self.pools = Pools(self.loads, self.rules.zones_excluded)
        self.silent: set[int] = set()
        """Attempts in flight of which no token has come."""
        self.prompt_tokens = 0
        """Of admitted attempts."""
        self.cached_tokens = 0
        """Those of them that the engines had kept."""
        self.observe: Callable[[str, float | None], None] = _observe_nothing
        """Told of each decision: "prefix", "affinity", "load", "last_resort" or "refused", and the age of the report
        that was used, if there was one."""
        self._flights: dict[int, _Flight] = {}

    def apply(self, snapshot: RoutingSnapshot, now: float) -> None:
        """Use `snapshot` from now on; what was known of replicas that are gone or were replaced is forgotten."""
        void, fresh = self.loads.apply(snapshot.replicas_of)
        self.pools.apply(snapshot.ready_of)
        for replica in void:
            self.prefixes.forget(replica.name)
            self.evictions.forget(replica.name)
            self.outliers.forget(replica.revision, replica.name)
            self.slow_start.forget(replica.name)
            self.filters.forget(replica.name)
            self.doors.forget(replica.name)
        self.outliers.resize({name: len(ready) for name, ready in snapshot.ready_of.items()})
        new = {replica.name for replica in fresh}
        for replica in fresh:
            if any(other.name not in new for other in snapshot.ready_of[replica.revision]):
                self.slow_start.begin(replica.name, now)
        self.affinity.keep(frozenset(snapshot.replicas_of))

    # Decisions

    def choose(
        self,
        snapshot: RoutingSnapshot,
        revision: Revision,
        demand: Demand,
        *,
        tried: Container[str] = (),
        failed: tuple[FailureDomain, ...] = (),
        reachable: Callable[[str], bool],
        random: Random,
        now: float,
    ) -> Replica:
        """Choose a replica of `revision`.

        Args:
            snapshot: the one applied, or for a request that was pinned before its revision left, an earlier one.
            revision: pinned.
            demand: of the request.
            tried: names of replicas that are out of the question because the request was there.
            failed: failure domains of those.
            reachable: whether a Scheduler, by endpoint, can be sent anything.
            random: draws from [0, 1).
            now: monotonic seconds.

        Raises:
            Failure: MODEL_LOADING, NO_HEALTHY_WORKER or GUIDED_DECODING_UNSUPPORTED.
        """
        home = self.affinity.home(demand.affinity, revision.name, snapshot.ready_of[revision.name], now)
        chosen, outcome = self._choose(
            Question(snapshot, revision, demand, reachable, now, tried, failed, home), random
        )
        if chosen is None or chosen.replica is None:
            self.observe("refused", None)
            check_guided(snapshot, revision, demand.guided)
            raise no_replica(snapshot, revision)
        self.observe(outcome, chosen.age_s(now))
        return chosen.replica

    def explain(
        self,
        snapshot: RoutingSnapshot,
        revision: Revision,
        demand: Demand,
        *,
        tried: Container[str] = (),
        failed: tuple[FailureDomain, ...] = (),
        reachable: Callable[[str], bool],
        random: Random,
        now: float,
        most: int,
    ) -> tuple[Replica | None, list[Candidate]]:
        """What `choose` would say now, and at most `most` replicas as it sees them, the best first. Changes nothing."""
        home = self.affinity.home(demand.affinity, revision.name, snapshot.ready_of[revision.name], now)
        question = Question(snapshot, revision, demand, reachable, now, tried, failed, home)
        chosen, _ = self._choose(question, random)
        replicas = list(snapshot.replicas_of[revision.name])
        if len(replicas) > most:
            marked = (*self._preferred(question), *((chosen,) if chosen else ()))
            first = {s.name: s.replica for s in marked if s.replica is not None}
            step = len(replicas) / (most - len(first))
            spread = {r.name: r for r in (replicas[int(n * step)] for n in range(most - len(first)))}
            replicas = list({**spread, **first}.values())
        found = [self._candidate(replica, question) for replica in replicas]
        found.sort(key=lambda c: (c.score is None, c.score.total if c.score else 0.0, c.excluded_by, c.replica.name))
        return chosen.replica if chosen is not None else None, found

    def _choose(self, question: Question, random: Random) -> tuple[Standing | None, str]:
        revision, demand, excluded_by = question.revision.name, question.demand, self.filters.excluded_by
        pool = self.pools.pool(revision, question.snapshot.ready_of[revision], demand.zones, demand.guided)
        sample, outcome = self._draw(pool, question, random), "load"
        if not sample:
            # Somebody who failed lately is better than nobody, and so is for a first attempt one who would refuse it.
            sample = _sample([s for s in pool if not excluded_by(s, question, ejected=False)], CHOICES, random)
            if not sample and not question.tried:
                found = [s for s in pool if not excluded_by(s, question, ejected=False, refusing=False)]
                sample = _sample(found, CHOICES, random)
            if not sample:
                return None, "refused"
            outcome = "last_resort"
        preferred = self._preferred(question) if demand.blocks or question.home else []
        for standing in preferred:
            if standing not in sample and not excluded_by(standing, question):
                sample.append(standing)
        best = self._best(sample, question, random)
        if outcome == "load" and best in preferred:
            outcome = "prefix" if self.prefixes.depth(best.name, demand.blocks) else "affinity"
        return best, outcome

    def _draw(self, pool: tuple[Standing, ...], question: Question, random: Random) -> list[Standing]:
        """Replicas that nothing excludes, CHOICES different ones if there are so many."""
        excluded_by, count = self.filters.excluded_by, len(pool)
        if count <= CHOICES:
            return [standing for standing in pool if not excluded_by(standing, question)]
        found: list[Standing] = []
        for _ in range(DRAWS_MAX):
            drawn = pool[int(random() * count)]
            if (found and drawn is found[0]) or excluded_by(drawn, question):
                continue
            found.append(drawn)
            if len(found) == CHOICES:
                return found
        return _sample([standing for standing in pool if not excluded_by(standing, question)], CHOICES, random)

    def _preferred(self, question: Question) -> list[Standing]:
        """The latest of those who may take it to use the longest beginning of the prompt that anybody keeps, and the
        home of the session.
        """
        home, revision, standings = question.home, question.revision.name, self.loads.standings_by_name
        excluded_by = self.filters.excluded_by

        def may_take(name: str) -> bool:
            standing = standings.get(name)
            return standing is not None and standing.replica is not None and not excluded_by(standing, question)

        keeper = self.prefixes.keeper(question.demand.blocks, may_take) if question.demand.blocks else ""
        found = []
        for name in (keeper, home) if keeper != home else (home,):
            standing = standings.get(name) if name else None
            if standing is not None and standing.replica is not None and standing.replica.revision == revision:
                found.append(standing)
        return found

    def _best(self, sample: list[Standing], question: Question, random: Random) -> Standing:
        if len(sample) == 1:
            return sample[0]
        totals = costs(sample, question, self.loads, self.prefixes, self.slow_start)
        ordered = sorted(totals)
        least = ordered[0] + EQUAL_S
        if ordered[1] > least:
            return sample[totals.index(ordered[0])]
        best = [standing for standing, total in zip(sample, totals, strict=True) if total <= least]
        return best[int(random() * len(best))]

    def _candidate(self, replica: Replica, question: Question) -> Candidate:
        standing = self.loads.known(replica)
        excluded_by = self.filters.excluded_by(standing, question)
        return Candidate(
            replica,
            excluded_by,
            None if excluded_by else self._score(standing, question),
            standing.own,
            standing.age_s(question.now),
        )

    def _score(self, standing: Standing, question: Question) -> Score:
        """What `costs` says of a replica, with its parts."""
        demand, now, name = question.demand, question.now, standing.name
        tokens = demand.prompt_size if demand.is_tokens else demand.prompt_size / standing.habits.bytes_per_token
        kept = self.prefixes.believed(name, demand.blocks)
        return score(
            standing,
            self.loads.weight(standing, now),
            self.slow_start.weight(name, now),
            tokens,
            demand.output_tokens,
            kept * demand.block_size / demand.prompt_size if kept else 0.0,
            name == question.home,
            demand.priority,
            question.failed,
        )

    # What becomes of attempts

    def dispatched(self, token: int, replica: str, epoch: int, revision: str, demand: Demand, now: float) -> None:
        """An attempt was sent to a replica."""
        expected = self.prefixes.depth(replica, demand.blocks) if demand.blocks else 0
        self._flights[token] = _Flight(replica, revision, epoch, demand, expected)
        self.silent.add(token)
        self.loads.begin(token, replica)
        self.doors.sent(replica)
        self.outliers.dispatched(replica, token, now)
        self.affinity.serve(demand.affinity, replica, now)

    def admitted(self, token: int, prompt_tokens: int, cached_prompt_tokens: int, now: float) -> None:
        """An engine has begun: it tells how long the prompt is, and what of it was kept."""
        flight = self._flights.get(token)
        if flight is None:
            return
        self.loads.admitted(token, now)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_prompt_tokens
        demand, standing = flight.demand, self.loads.standing(flight.replica)
        if not prompt_tokens or not demand.prompt_size or standing is None or standing.replica is None:
            return
        if not demand.is_tokens:
            habits = standing.habits
            habits.bytes_per_token += _LEARN * (demand.prompt_size / prompt_tokens - habits.bytes_per_token)
        if demand.blocks and standing.replica.epoch == flight.epoch:
            hashed = len(demand.blocks) * demand.block_size
            share = cached_prompt_tokens / prompt_tokens * demand.prompt_size / hashed
            self.prefixes.correct(flight.replica, demand.blocks, flight.expected, min(1.0, share))
            self.prefixes.keep(flight.replica, demand.blocks)

    def first_output(self, token: int, now: float) -> None:
        """An attempt's first token has come. Called again it does nothing."""
        if token not in self.silent:
            return
        self.silent.discard(token)
        flight = self._flights[token]
        if self.outliers.succeeded(flight.revision, flight.replica, token, now):
            self.slow_start.begin(flight.replica, now)

    def ended(self, token: int, reason: Reason | None, now: float) -> None:
        """An attempt is over; `reason`: why, if it did not end well. Called again it does nothing."""
        flight = self._flights.pop(token, None)
        if flight is None:
            return
        is_silent = token in self.silent
        self.doors.ended(flight.replica)
        self.loads.end(token, now, is_measured=not is_silent)
        if not is_silent:
            return
        self.silent.discard(token)
        if reason is None:
            if self.outliers.succeeded(flight.revision, flight.replica, token, now):
                self.slow_start.begin(flight.replica, now)
        elif reason in FAULTS and self._is_current(flight):
            self.outliers.faulted(flight.revision, flight.replica, token, now)
        else:
            self.outliers.released(flight.replica, token)
            if reason is Reason.STALE_EPOCH:
                self.filters.epoch_refused(flight.replica, flight.epoch, now)

    def _is_current(self, flight: _Flight) -> bool:
        """Whether the process that an attempt went to is still the one behind its replica."""
        standing = self.loads.standing(flight.replica)
        return standing is not None and standing.replica is not None and standing.replica.epoch == flight.epoch

    def report(self, replica: str, report: ReplicaReport, now: float, age_s: float = 0.0) -> None:
        """A Scheduler's report has come, `age_s` seconds old."""
        if not self.loads.report(replica, report, now, age_s):
            return  # no snapshot has it, and nothing is kept of it
        self.doors.report(
            replica, admits_from=report.admits_from, room=report.room, closed=report.closed, now=now - age_s
        )
        gone = self.evictions.take(replica, report.kv_stored, report.kv_removed, self.prefixes.size(replica))
        self.prefixes.fade(replica, gone)


def _sample(found: list[Standing], count: int, random: Random) -> list[Standing]:
    """`count` different ones, or all."""
    if len(found) <= count:
        return found
    chosen: list[Standing] = []
    for _ in range(count):
        chosen.append(found.pop(int(random() * len(found))))
    return chosen
