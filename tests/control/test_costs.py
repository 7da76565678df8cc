"""What decisions compare is what explanations add up, and the replica that is taken is the one that they point to."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.costs import costs
from headrace.control.errors import Failure, Reason
from headrace.control.filters import Demand, Question
from headrace.control.load_view import ReplicaReport
from headrace.control.prefix_index import BLOCK_BYTES, salt, text_blocks
from headrace.control.resources import Replica, ReplicaState
from headrace.control.revocation import Revocation
from headrace.control.routing import CHOICES, DRAWS_MAX, EQUAL_S, Candidate
from support.fleets import REVISION, Fleet, replica

NOW = 3.0
READY, LOADING = ReplicaState.READY, ReplicaState.LOADING
SALT = salt("t", REVISION.name)


def blocks(*numbers: int) -> tuple[int, ...]:
    return text_blocks([bytes([n]) * BLOCK_BYTES for n in numbers], SALT)


NUMBERS = st.integers(0, 8)
PROMPTS = st.lists(st.integers(1, 2), max_size=3).map(tuple)
REPLICAS = st.fixed_dictionaries({
    "zone": st.sampled_from(["", "a", "a", "b"]), "rack": st.sampled_from(["", "k"]), "slots": st.integers(0, 8),
    "state": st.sampled_from([READY] * 9 + [LOADING]), "epoch": st.sampled_from([7] * 9 + [0]),
    "kv_cells": st.sampled_from([0, 0, 300, 900]),
})  # fmt: skip
REPORTS = st.builds(
    ReplicaReport, NUMBERS, NUMBERS, st.sampled_from([4, 8, 64]), st.integers(0, 300), st.sampled_from([0, 200]),
    st.sampled_from([None, 0.0, 4.0]), st.sampled_from([0, 2]), st.sampled_from([0, 3, 4]),
    st.sampled_from([0.0, 50.0]),
)  # fmt: skip
DEMANDS = st.builds(
    lambda prompt, extra, **fields: Demand(len(prompt) * BLOCK_BYTES + extra, blocks=blocks(*prompt), **fields),
    PROMPTS, st.integers(0, 99), is_tokens=st.booleans(), output_tokens=st.integers(0, 500),
    affinity=st.integers(0, 3), zones=st.sampled_from([frozenset(), frozenset(), frozenset(), frozenset("a")]),
    priority=st.integers(2, 4),
)  # fmt: skip


@dataclass
class Case:
    """A fleet that has lived a little, and what is asked of it."""

    fleet: Fleet
    demand: Demand
    facts: dict[str, Any] = field(default_factory=dict)

    def choose(self, seed: int) -> str:
        try:
            return self.fleet.choose(random.Random(seed).random, self.demand, **self.facts).name
        except Failure:
            return ""

    def candidates(self) -> dict[str, Candidate]:
        _, found = self.fleet.routing.explain(
            self.fleet.snapshot, REVISION, self.demand, random=random.Random(0).random, most=10_000, **self.facts
        )
        return {candidate.replica.name: candidate for candidate in found}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    made = draw(st.lists(REPLICAS, min_size=1, max_size=20) | st.lists(REPLICAS, min_size=8, max_size=20))
    replicas = [replica(f"r{n}", **facts) for n, facts in enumerate(made)]
    fleet = Fleet(*replicas, zones_excluded=draw(st.sampled_from([frozenset(), frozenset(), frozenset("b")])))
    names = [f"r{n}" for n in range(len(made))]
    some, name = st.sets(st.sampled_from(names), max_size=2), st.sampled_from(names)
    for one, prompt, times in draw(st.lists(st.tuples(name, PROMPTS, st.integers(1, 5)), max_size=12)):
        asked = Demand(len(prompt) * BLOCK_BYTES, blocks=blocks(*prompt), affinity=times)
        for _ in range(times):
            token = fleet.send(one, asked)
            fleet.routing.admitted(token, 64 * len(prompt), 0, 0.5)
        fleet.routing.first_output(token, 1.0)
        fleet.routing.ended(token, None, 1.0 + times)
    for one, report, at in draw(st.lists(st.tuples(name, REPORTS, st.floats(0, NOW)), min_size=6, max_size=20)):
        fleet.routing.report(f"replicas/{one}", report, at)
    fleet.routing.loads.habits(REVISION.name).others_per_slot = draw(st.sampled_from([0.0, 0.3, 2.0]))
    for one in draw(some):
        for n in range(3):
            fleet.routing.ended(fleet.send(one), Reason.WORKER_LOST_BEFORE_OUTPUT, float(n))
    for one in draw(some):
        fleet.routing.ended(fleet.send(one), Reason.STALE_EPOCH, NOW - 1)
    if draw(st.booleans()):  # some come anew, some are other processes, some are gone
        fresh, other, gone = draw(some), draw(some), draw(some)
        kept = [replace(r, epoch=8) if r.name.removeprefix("replicas/") in other else r for r in replicas]
        kept = [r for r in kept if r.name.removeprefix("replicas/") not in gone]
        fleet.apply(*kept, *(replica(f"new-{one}") for one in fresh), now=NOW - 1)
    revoked, tried, down = draw(some), draw(some), draw(some)
    fleet.snapshot = replace(fleet.snapshot, revocations=tuple(Revocation(f"replicas/{n}") for n in sorted(revoked)))
    listed = [f"replicas/{n}" for n in sorted(tried)]
    facts = {
        "tried": listed,
        "failed": fleet.routing.loads.domains(listed[:2]),
        "reachable": lambda endpoint: endpoint.removesuffix(":1") not in down,
        "now": NOW,
    }
    return Case(fleet, draw(DEMANDS), facts)


def explained(case: Case, seed: int) -> str:
    """The decision as docs/routing.md describes it, made of what `explain` says of every replica."""
    fleet, demand, seen, chance = case.fleet, case.demand, case.candidates(), random.Random(seed).random
    excluded = fleet.routing.rules.zones_excluded

    def fits(one: Replica) -> bool:
        return not seen[one.name].excluded_by

    def drawn(found: list[Replica]) -> list[Replica]:
        return found if len(found) <= CHOICES else [found.pop(int(chance() * len(found))) for _ in range(CHOICES)]

    ready = fleet.snapshot.ready_of[REVISION.name]
    pool = [
        r for r in ready if (z := r.failure_domain.zone) not in excluded and (not demand.zones or z in demand.zones)
    ]
    sample: list[Replica] = []
    for _ in range(DRAWS_MAX if len(pool) > CHOICES else 0):
        one = pool[int(chance() * len(pool))]
        if one not in sample and fits(one):
            sample.append(one)
        if len(sample) == CHOICES:
            break
    if len(sample) < CHOICES:
        sample = drawn([r for r in pool if fits(r)])
    scored = {r.name: seen[r.name].score for r in ready}
    if not sample:
        sample = drawn([r for r in pool if seen[r.name].excluded_by in ("", "ejected", "probed")])
        if len(sample) < 2:
            return sample[0].name if sample else ""
        # They have no score: they are told apart as if they were not out.
        scored = {name: found.score for name, found in _pardoned(case).items()}
    home = fleet.routing.affinity.home(demand.affinity, REVISION.name, ready, NOW)
    depths = {name: fleet.routing.prefixes.depth(name, demand.blocks) for name in fleet.routing.loads.standings_by_name}
    longest = max(depths.values())
    keepers = [r.name for r in ready if longest and depths[r.name] == longest and fits(r)]
    # Of several that keep as much, the latest to use it: the index alone knows.
    latest = fleet.routing.prefixes.keeper(demand.blocks, keepers.__contains__)
    assert (latest in keepers) if keepers else not latest
    for name in (latest, home):
        if name and all(r.name != name for r in sample):
            sample += [r for r in ready if r.name == name and fits(r)]
    totals = [found.total for r in sample if (found := scored[r.name]) is not None]
    best = [r for r, total in zip(sample, totals, strict=True) if total <= min(totals) + EQUAL_S]
    return best[0].name if len(best) == 1 else best[int(chance() * len(best))].name


def _pardoned(case: Case) -> dict[str, Candidate]:
    """What `explain` would say if nobody were ejected."""
    out, case.fleet.routing.outliers.out_by_revision = case.fleet.routing.outliers.out_by_revision, {}
    try:
        return case.candidates()
    finally:
        case.fleet.routing.outliers.out_by_revision = out


@settings(max_examples=300, deadline=None)
@given(cases(), st.lists(st.integers(0, 999), min_size=5, max_size=5))
def test_a_decision_takes_what_the_explanation_points_to(case: Case, seeds: list[int]) -> None:
    assert [case.choose(seed) for seed in seeds] == [explained(case, seed) for seed in seeds]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_decisions_compare_is_what_explanations_add_up(case: Case) -> None:
    routing, snapshot, facts = case.fleet.routing, case.fleet.snapshot, case.facts
    scored = {name: found.score.total for name, found in case.candidates().items() if found.score is not None}
    home = routing.affinity.home(case.demand.affinity, REVISION.name, snapshot.ready_of[REVISION.name], NOW)
    question = Question(
        snapshot, REVISION, case.demand, facts["reachable"], NOW, facts["tried"], facts["failed"], home
    )  # fmt: skip
    sample = [routing.loads.known(r) for r in snapshot.replicas if r.name in scored]
    if sample:
        found = costs(sample, question, routing.loads, routing.prefixes, routing.slow_start)
        assert found == pytest.approx([scored[standing.name] for standing in sample], abs=1e-10)


@pytest.mark.parametrize(("apart", "names"), [(EQUAL_S / 10, {"replicas/a", "replicas/b"}), (1e-6, {"replicas/a"})])
def test_costs_that_differ_by_rounding_are_equal(apart: float, names: set[str]) -> None:
    fleet = Fleet(replica("a"), replica("b"))
    for name, wait_s in (("a", 1.0), ("b", 1.0 + apart)):
        fleet.routing.report(f"replicas/{name}", ReplicaReport(4, 1, 4, queue_wait_s=wait_s), 0.0)
    assert {fleet.choose(random.Random(seed).random).name for seed in range(40)} == names
