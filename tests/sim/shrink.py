"""Makes a failing scenario small: fewer requests, faults and acts, plainer numbers, while it breaks the same law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from sim.scenario import Ask, Scenario
from sim.violation import Violation
from sim.world import World

TRIES_MAX = 600
PLAIN_ASK = {
    "queue_ms": 0,
    "execution_ms": 0,
    "read_ms": 0,
    "at_ms": 0,
    "prompt": 2,
    "prompt_seed": 0,
    "resume_ms": 0,
    "deadline_ms": 6_000,
    "max_tokens": 48,
    "transport_events": 6,
    "log_events": 64,
    "is_interactive": False,
}
PLAIN = {
    "repeat_percent": 0,
    "run_ahead": 0,
    "workers": 1,
    "slots": 2,
    "delay_ms": 2,
    "step_ms": 10,
    "prefill_chunk": 16,
    "preempt_after_ms": 0,
}


def broken_law(scenario: Scenario) -> Violation | None:
    """Run it; None: all laws hold."""
    try:
        World(scenario).run()
    except Violation as violation:
        return violation
    return None


def shrink(scenario: Scenario, law: str, fails: Callable[[Scenario], Violation | None] = broken_law) -> Scenario:
    """The smallest scenario found that breaks the same law."""
    tries = 0
    improved = True
    while improved and tries < TRIES_MAX:
        improved = False
        for smaller in _smaller(scenario):
            tries += 1
            violation = fails(smaller)
            if violation is not None and violation.law == law:
                scenario, improved = smaller, True
                break
            if tries >= TRIES_MAX:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Each with one thing less, the biggest steps first."""
    for index in range(len(scenario.asks)):
        if len(scenario.asks) > 1:
            yield replace(scenario, asks=_without(scenario.asks, index))
    for index in range(len(scenario.faults)):
        yield replace(scenario, faults=_without(scenario.faults, index))
    for name, value in PLAIN.items():
        if getattr(scenario, name) != value:
            yield replace(scenario, **{name: value})
    for index, ask in enumerate(scenario.asks):
        for smaller in _smaller_ask(ask):
            yield replace(scenario, asks=(*scenario.asks[:index], smaller, *scenario.asks[index + 1 :]))


def _smaller_ask(ask: Ask) -> Iterator[Ask]:
    for index in range(len(ask.acts)):
        yield replace(ask, acts=_without(ask.acts, index))
    for name, value in PLAIN_ASK.items():
        if getattr(ask, name) != value:
            yield replace(ask, **{name: value})
    if ask.answer > 1:
        yield replace(ask, answer=ask.answer // 2)


def _without(items: tuple, index: int) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], *items[index + 1 :])


def as_code(scenario: Scenario) -> str:
    """The scenario as an expression, to be put into a test."""
    lines = [f"    {field.name}={getattr(scenario, field.name)!r}," for field in fields(scenario)]
    return "\n".join(["Scenario(", *lines, ")"])
