"""The simulation: seeded runs of the real classes under races, and proof that each law can be broken."""

from __future__ import annotations

import time

import pytest

from sim.mutations import MUTATIONS, Mutation
from sim.run import Report, explain, run_many, run_seeds
from sim.scenario import generate
from sim.shrink import as_code, broken_law, shrink
from sim.trace import Tracer
from sim.violation import Violation
from sim.world import World

RUNS = 2_000
RUNS_PER_MUTATION = 600


@pytest.fixture(scope="module")
def report() -> Report:
    return run_many(0, RUNS, jobs=2)


def test_all_laws_hold_in_every_run(report: Report) -> None:
    assert report.runs == RUNS
    assert not report.failures, "\n".join(explain(seed) for seed, _, _ in report.failures[:2])


def test_every_kind_of_fault_happened(report: Report) -> None:
    assert report.missing == []


def test_a_seed_is_the_same_run_every_time() -> None:
    def told(seed: int) -> list[str]:
        lines: list[str] = []
        World(generate(seed)).run(Tracer(lines.append).watch)
        return lines

    first = told(11)
    assert len(first) > 20
    assert told(11) == first


def first_violation(runs: int) -> Violation | None:
    for seed in range(runs):
        violation = broken_law(generate(seed))
        if violation is not None:
            return violation
    return None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_breakage_is_noticed_by_its_law(mutation: Mutation) -> None:
    with mutation.applied():
        violation = first_violation(RUNS_PER_MUTATION)
    assert violation is not None, f"nothing noticed in {RUNS_PER_MUTATION} runs"
    assert violation.law in mutation.laws, str(violation)


def test_a_failing_seed_is_shrunk_to_a_small_scenario_that_fails_alike() -> None:
    (mutation,) = [one for one in MUTATIONS if one.name == "a_resume_begins_one_event_too_early"]
    with mutation.applied():
        seed = next(seed for seed in range(RUNS_PER_MUTATION) if broken_law(generate(seed)))
        violation = broken_law(generate(seed))
        assert violation is not None
        small = shrink(generate(seed), violation.law)
        again = broken_law(small)
    assert again is not None
    assert again.law == violation.law
    assert (len(small.asks), len(small.faults), small.repeat_percent) == (1, 0, 0)
    assert "Scenario(" in as_code(small)
    assert broken_law(small) is None, "without the breakage it holds"


def test_a_report_counts_runs_and_keeps_failures() -> None:
    (mutation,) = [one for one in MUTATIONS if one.name == "nothing_is_ever_granted"]
    began = time.monotonic()
    with mutation.applied():
        report = run_seeds(0, 50)
    assert report.runs == 50
    assert {law for _, law, _ in report.failures} == {"progress"}
    assert report.events > 1_000
    assert time.monotonic() - began < 60
