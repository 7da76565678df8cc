"""A quarter of the fleet under load: the aims are met, a seed is one run, and what is broken on purpose is noticed."""

from __future__ import annotations

from functools import cache

import pytest
from sim.breakage import Mutation

from sim_load.breakages import BREAKAGES
from sim_load.clock import Clock
from sim_load.engine import BASE_S, PREFILL_S, SLOPE_S, Engine, Sequence
from sim_load.outcome import Aim, Outcome, aims, simulate
from sim_load.scenarios import BY_NAME, quick

SEED = 2
SCENARIOS = (
    "0.8x", "1x", "3x", "10x", "3x, first tokens in 10 s", "10 shares asked by one", "1.5 by each, 15 by one",
    "zone lost, back", "full outage", "full outage, callers send 5 times more", "reports 5 s old",
)  # fmt: skip


@cache
def outcome(name: str) -> Outcome:
    return simulate(quick(BY_NAME[name]), SEED)


def missed(outcomes: list[Outcome]) -> list[Aim]:
    return [aim for aim in aims(outcomes) if not aim.is_met]


def test_every_aim_is_met() -> None:
    outcomes = [outcome(name) for name in SCENARIOS]
    assert missed(outcomes) == []
    assert len(aims(outcomes)) == 13


def test_what_is_meant_to_happen_does() -> None:
    assert outcome("0.8x").refused + outcome("0.8x").vain == 0
    assert outcome("10x").refused > outcome("3x").refused > 0
    assert outcome("zone lost, back").attempts_per_request > 1.0
    assert outcome("full outage").refused > outcome("full outage").accepted
    assert outcome("full outage, callers send 5 times more").resends > 1000
    assert outcome("1.5 by each, 15 by one").offered > outcome("1x").offered * 2


def test_a_seed_is_the_same_run_every_time() -> None:
    again = simulate(quick(BY_NAME["0.8x"]), SEED)
    assert again == outcome("0.8x")
    assert simulate(quick(BY_NAME["0.8x"]), SEED + 1) != again


@pytest.mark.parametrize(("mutation", "scenarios"), BREAKAGES, ids=lambda value: getattr(value, "name", ""))
def test_a_breakage_is_noticed(mutation: Mutation, scenarios: tuple[str, ...]) -> None:
    with mutation.applied():
        found = missed([simulate(quick(BY_NAME[name]), SEED) for name in scenarios])
    (aim,) = mutation.laws
    assert any(one.name.startswith(aim) for one in found), found


class Heard:
    """What an engine said, and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.told: list[tuple[str, int, float]] = []

    def admitted(self, engine: Engine, sequence: Sequence) -> None:
        self.told.append(("admitted", sequence.token, self.clock.now))

    def first_token(self, engine: Engine, sequence: Sequence) -> None:
        self.told.append(("first", sequence.token, self.clock.now))

    def finished(self, engine: Engine, sequence: Sequence) -> None:
        self.told.append(("finished", sequence.token, self.clock.now))

    def failed(self, engine: Engine, sequence: Sequence) -> None:
        raise AssertionError

    def responded(self, engine: Engine, steps: int) -> None:
        return

    def settled(self, engine: Engine) -> None:
        return


def test_the_engine_takes_its_steps_as_it_says() -> None:
    clock = Clock()
    heard = Heard(clock)
    engine = Engine(clock, "replicas/a", 1, heard)
    engine.submit(Sequence(1, prompt=600, output=11, cells=700))
    clock.at(0.3, engine.submit, Sequence(2, prompt=100, output=1, cells=700))
    clock.run(10.0)
    first = 2 * BASE_S + 600 * PREFILL_S
    alone = BASE_S + SLOPE_S
    steps = -(-(0.3 - first) // alone)
    begins = first + steps * alone
    beside = BASE_S + SLOPE_S + 100 * PREFILL_S
    assert heard.told == [
        ("admitted", 1, 0.0),
        ("first", 1, pytest.approx(first)),
        ("admitted", 2, pytest.approx(begins)),
        ("first", 2, pytest.approx(begins + beside)),
        ("finished", 2, pytest.approx(begins + beside)),
        ("finished", 1, pytest.approx(begins + beside + (9 - steps) * alone)),
    ]
    assert engine.is_empty
    assert engine.cells == 0
