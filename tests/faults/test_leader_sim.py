"""Leader changes and watchers, simulated: deliveries late, lost and twice, processes that die, stores that change.

It has found: an epoch that outlived its store, a claim whose answer was lost (nobody led any more), a ghost of a
restored backup that fenced the living, a cancellation that a TaskGroup forgot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog

from faults.mutations import BLIND, MUTATIONS
from faults.sim_store import BrokenLaw
from faults.sim_world import simulate
from headrace.runtime.snapshot_follower import ROOT_KEY
from headrace.runtime.telemetry import configure_logging

SEEDS = int(os.environ.get("SEEDS", "150"))
"""SEEDS=5000 pytest tests/faults/test_leader_sim.py tries more."""
CHUNK = 50
HINTS = {
    "a watch resumes from the header's revision": (84,),
    "compaction is skipped over": (101,),
    "an old leader is not fenced": (26,),
}
"""Seeds that showed a mutation; when the code changes another one will, and the search goes on."""
SEARCH = 250


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = structlog.get_config()
    configure_logging("sim", level="critical")
    yield
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_law_is_broken(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            simulate(seed)
        except BrokenLaw as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken


def test_a_seed_is_one_story() -> None:
    assert simulate(7).trace() == simulate(7).trace()
    assert simulate(7).trace() != simulate(8).trace()


@pytest.mark.parametrize("name", [*MUTATIONS, BLIND])
def test_a_bug_is_noticed(name: str) -> None:
    hints = HINTS.get(name, ())
    for seed in (*hints, *range(SEARCH)):
        try:
            if name == BLIND:
                simulate(seed, blind_to=ROOT_KEY)
            else:
                with MUTATIONS[name]():
                    simulate(seed)
        except BrokenLaw:
            return
    raise AssertionError(f"no seed up to {SEARCH} shows it")
