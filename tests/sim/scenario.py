"""What happens in one run, as data: drawn from a seed, so that it can be replayed, edited and shrunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

ActKind = Literal["cancel_frame", "cancel_request", "disconnect", "resume", "stall", "repeat_ack", "old_ack"]
FaultKind = Literal["kill", "hang", "restart_late", "link_loss", "blink", "drain", "drain_scheduler", "drain_router"]

ACTS: tuple[ActKind, ...] = (
    "cancel_frame", "cancel_request", "disconnect", "disconnect", "stall", "stall", "repeat_ack", "old_ack",
)  # fmt: skip
"""What is drawn; resumes follow from a disconnect, or come by themselves."""
FAULTS: tuple[FaultKind, ...] = (
    "kill", "kill", "hang", "restart_late", "link_loss", "blink", "drain", "drain_scheduler", "drain_router",
)  # fmt: skip
EARLY_FAULTS: tuple[FaultKind, ...] = ("blink", "blink", "kill", "link_loss")


@dataclass(frozen=True, slots=True)
class Act:
    """What a client does, `at_ms` after its request."""

    at_ms: int
    kind: ActKind
    value: int = 0
    """stall: for how many ms; resume: from how many events before the last one that was read, -1: a future one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and its client."""

    at_ms: int
    answer: int
    """Tokens of the whole answer."""
    prompt: int
    """Tokens of the prompt, 2 or more."""
    prompt_seed: int
    max_tokens: int
    window: int
    is_interactive: bool
    resume_ms: int
    """0: it ends with its call."""
    deadline_ms: int
    queue_ms: int
    """0: no limit, like `execution_ms`."""
    execution_ms: int
    read_ms: int
    """Longest time that the client takes for an event."""
    transport_events: int
    """Events that the transport takes before the client reads."""
    log_events: int
    acts: tuple[Act, ...] = ()
    continues: bool = False
    """Another worker goes on where its own is lost."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls the service. `target` numbers the worker, or the Scheduler."""

    at_ms: int
    kind: FaultKind
    target: int
    lasts_ms: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. Everything that is not here is drawn from `seed` while it runs: delays, and ties."""

    seed: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    workers: int
    slots: int
    kv_cells: int
    delay_ms: int
    """Longest delay of a message between two processes."""
    step_ms: int
    prefill_chunk: int
    """Tokens of prompts that one step takes."""
    repeat_percent: int
    """Share of messages that come again later."""
    attempts_max: int
    slow_consumer_ms: int
    preempt_after_ms: int
    run_ahead: int
    """Tokens that engines run ahead of the credit; 0: they pause."""
    push_back_ms: int = 0
    """How long a lost worker asks not to be tried again, now and then; 0: never."""
    retry_floor: int = 100
    """Attempts beyond the first, in any 10 s, that the budget allows without successes."""


def generate(seed: int) -> Scenario:
    """The scenario of a seed. One in six is unlucky: long prompts, and one loss after another before any output.
    One in a hundred is crowded."""
    rng = Random(seed)
    scenario = _paused(_continued(_generate(seed, rng), Random(f"{seed} continues")), Random(f"{seed} pauses"))
    kind = rng.random()
    if kind < 0.01:
        return _crowd(scenario, rng)
    return _unlucky(scenario, rng) if kind < 0.17 else scenario


def _continued(scenario: Scenario, rng: Random) -> Scenario:
    """Some ask to be continued; in one of five runs all do, and workers are lost one after the other in mid-answer."""
    if rng.random() < 0.8:
        return replace(scenario, asks=tuple(replace(ask, continues=rng.random() < 0.3) for ask in scenario.asks))
    asks = tuple(
        replace(ask, continues=True, answer=rng.choice([12, 24, 40]), max_tokens=48, deadline_ms=6_000, execution_ms=0)
        for ask in scenario.asks
    )
    kinds: tuple[FaultKind, ...] = ("kill", "kill", "blink", "drain")
    faults = tuple(Fault(rng.randrange(50, 900), rng.choice(kinds), rng.randrange(2), 50) for _ in range(4))
    return replace(scenario, asks=asks, faults=faults, workers=2, slots=2, attempts_max=3)


def _paused(scenario: Scenario, rng: Random) -> Scenario:
    """Sometimes a loss pushes back, sometimes there is little room for retries."""
    return replace(scenario, push_back_ms=rng.choice([0, 0, 120, 600]), retry_floor=rng.choice([100, 100, 100, 1, 0]))


def _crowd(scenario: Scenario, rng: Random) -> Scenario:
    """More than the queue of one worker holds."""
    asks = tuple(
        replace(scenario.asks[0], at_ms=rng.randrange(30), prompt_seed=number, deadline_ms=3_000, acts=())
        for number in range(24)
    )
    return replace(scenario, asks=asks, workers=1, slots=1)


def _unlucky(scenario: Scenario, rng: Random) -> Scenario:
    return replace(
        scenario,
        asks=tuple(
            replace(ask, at_ms=rng.randrange(50), prompt=rng.randrange(30, 40), deadline_ms=3_000, queue_ms=0)
            for ask in scenario.asks
        ),
        faults=tuple(Fault(rng.randrange(20, 300), rng.choice(EARLY_FAULTS), rng.randrange(2), 50) for _ in range(5)),
        workers=2,
        slots=2,
        prefill_chunk=3,
        step_ms=10,
        attempts_max=3,
        repeat_percent=60,
    )


def _generate(seed: int, rng: Random) -> Scenario:
    span_ms = rng.choice([200, 600])
    twins = rng.random() < 0.4  # the same prompt, so that KV is shared
    shape = (rng.randrange(18, 40), rng.randrange(3))
    asks = tuple(_ask(rng, span_ms, shape if twins else None) for _ in range(rng.choice([1, 2, 2, 3, 4])))
    workers = rng.choice([1, 2, 2])
    return Scenario(
        seed=seed,
        asks=asks,
        faults=tuple(_fault(rng, span_ms, workers) for _ in range(rng.choice([0, 1, 1, 2, 3]))),
        workers=workers,
        slots=rng.choice([1, 1, 2]),
        kv_cells=rng.choice([96, 160]),
        delay_ms=rng.choice([2, 10, 40]),
        step_ms=rng.choice([5, 10, 20]),
        prefill_chunk=rng.choice([3, 16]),
        repeat_percent=rng.choice([0, 20, 60]),
        attempts_max=rng.choice([1, 2, 3, 3]),
        slow_consumer_ms=rng.choice([300, 1_500]),
        preempt_after_ms=rng.choice([0, 60]),
        run_ahead=rng.choice([0, 0, 0, 3, 6]),
    )


def _ask(rng: Random, span_ms: int, shape: tuple[int, int] | None) -> Ask:
    prompt, prompt_seed = shape or (rng.randrange(2, 40), rng.randrange(1_000))
    answer = rng.choice([0, 1, 5, 12, 24, 24, 40])
    is_slow = rng.random() < 0.4
    ask = Ask(
        at_ms=rng.randrange(span_ms),
        answer=24 if shape else answer,
        prompt=prompt,
        prompt_seed=prompt_seed,
        max_tokens=rng.choice([1, 6, 16, 48, 48]),
        window=rng.choice([2, 4, 8, 9, 16]),
        is_interactive=rng.random() < 0.6,
        resume_ms=rng.choice([0, 400, 3_000]),
        deadline_ms=rng.choice([50, 300, 1_000, 3_000, 6_000]),
        queue_ms=rng.choice([0, 0, 30, 200]),
        execution_ms=rng.choice([0, 0, 100, 500]),
        read_ms=rng.choice([60, 250]) if is_slow else rng.choice([0, 5]),
        transport_events=rng.choice([1, 2, 6]),
        log_events=rng.choice([3, 8, 64]),
    )
    acts: list[Act] = []
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        kind = rng.choice(ACTS)
        at = rng.randrange(ask.deadline_ms + 50) if rng.random() < 0.3 else rng.randrange(400)
        acts.append(Act(at, kind, rng.choice([100, 1_000, 4_000]) if kind == "stall" else 0))
    if rng.random() < 0.5 and ask.resume_ms:
        at = acts[-1].at_ms if acts else rng.randrange(300)
        for _ in range(rng.choice([1, 1, 2, 3])):
            at += rng.choice([0, 10, 100, 400, 1_000])
            acts.append(Act(at, "resume", rng.choice([0, 0, 1, 3, 1_000, -1])))
            if rng.random() < 0.5:
                at += rng.randrange(150)
                acts.append(Act(at, "disconnect"))
    if rng.random() < 0.05:
        acts.append(Act(rng.randrange(300), "resume", 0))  # perhaps of one that cannot be resumed
    return replace(ask, acts=tuple(sorted(acts, key=lambda act: act.at_ms)))


def _fault(rng: Random, span_ms: int, workers: int) -> Fault:
    at_ms = rng.randrange(span_ms + 300)
    return Fault(at_ms, rng.choice(FAULTS), rng.randrange(workers), rng.choice([0, 50, 300, 1_000]))
