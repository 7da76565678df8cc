"""The figures of one run, and the aims."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.control.priority import Priority
from sim_load.tally import TTFT_SLO_S, jain, percentile
from sim_load.traffic import Traffic
from sim_load.world import TTFT_DEFAULT_S, Scenario, World, capacity

GOODPUT_SHARE = 0.95
JAIN = 0.95
ROUTING_SHARE = 0.95
AMPLIFICATION = 1.1
FAIR = ("3x", "10x", "10 shares asked by one")
JAIN_OF_ALL = 0.6
"""Where all ask more than their share and one ten times more than the others. Turns alone cannot make it 1: at any one
worker most tenants wait only now and then, and the one always."""
ALL_ASK = "1.5 by each, 15 by one"
SLOS = {"3x": TTFT_SLO_S, "3x, first tokens in 10 s": TTFT_DEFAULT_S}
VAIN_SHARE = 0.1
"""Of all calls, those that may wait for long in vain where three times as many come as can be served."""
STALE_TTFT_S = 3.2
"""p99 where reports are 5 s old, at 0.9 times what the fleet can do."""


@dataclass(frozen=True)
class Outcome:
    """One run's figures. Rates are of the time after warming up, while calls come."""

    scenario: str
    policy: str
    load: float
    offered: int
    accepted: int
    """Calls whose answer began."""
    refused: int
    """At once."""
    vain: int
    """Waited, and were then refused."""
    long_vain_share: float
    """Of calls after warming up, those that waited for more than half a second in vain."""
    resends: int
    goodput: float
    """Answers a second that began within the SLO, where somebody waits, and were whole before their deadline."""
    goodput_tokens: float
    """Tokens of those answers, a second."""
    ttft_p50_s: float
    ttft_p99_s: float
    jain: float
    """Of the tokens of prompts and answers that equal tenants got."""
    least_kept: float
    """Share of its calls that were answered well, of the equal tenant with the smallest."""
    longest_wait_s: float
    """Of a call that was accepted, to its first token."""
    starved_s: float
    """The longest that a tenant asked at STANDARD or above and got nothing."""
    starved_low_s: float
    """The same below STANDARD."""
    attempts_per_request: float
    """Sent to Schedulers, for each request that Routers took in; where something breaks, of those that came then."""
    drift: int
    """Attempts that Routers count and Schedulers do not have, or the reverse, at the end."""
    cached: float
    """Share of prompt tokens that engines had kept."""
    broken: tuple[str, ...]
    """Books that do not add up."""
    events: int
    refusals: Mapping[str, int]
    vain_by: Mapping[str, int]
    ends: Mapping[str, int]
    cpu_s: float = field(default=0.0, compare=False)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def simulate(scenario: Scenario, seed: int) -> Outcome:
    """Run one scenario. The calls depend on the seed and on what is offered, not on who serves them."""
    began = time.process_time()
    rate = scenario.load * scenario.replicas * capacity(scenario.kinds)
    calls = Traffic(seed, scenario.kinds, scenario.priorities).calls(rate, scenario.seconds, scenario.share_of)
    world = World(scenario, calls, seed)
    world.run()
    tally = world.tally
    seconds = tally.window[1] - tally.window[0]
    equal = scenario.equal
    prompts = sum(router.routing.prompt_tokens for router in world.routers)
    return Outcome(
        scenario=scenario.name,
        policy=scenario.policy,
        load=scenario.load,
        offered=tally.offered,
        accepted=tally.accepted,
        refused=tally.refusals.total(),
        vain=tally.vain.total(),
        long_vain_share=tally.long_vain / max(1, tally.asked.total()),
        resends=tally.resends,
        goodput=tally.good / seconds,
        goodput_tokens=tally.good_tokens / seconds,
        ttft_p50_s=percentile(tally.ttfts, 0.5),
        ttft_p99_s=percentile(tally.ttfts, 0.99),
        jain=jain(tally.good_work[t] for t in equal),
        least_kept=min(tally.good_calls[t] / max(1, tally.asked[t]) for t in equal),
        longest_wait_s=tally.longest_wait_s,
        starved_s=max(tally.starved_s[p] for p in (Priority.STANDARD, Priority.CRITICAL)),
        starved_low_s=max(tally.starved_s[p] for p in (Priority.SHEDDABLE, Priority.BATCH)),
        attempts_per_request=tally.attempts / max(1, tally.requests),
        drift=world.drift,
        cached=sum(router.routing.cached_tokens for router in world.routers) / max(1, prompts),
        broken=tuple(world.broken()),
        events=world.clock.events,
        refusals=dict(tally.refusals.most_common()),
        vain_by=dict(tally.vain.most_common()),
        ends=dict(tally.ends.most_common()),
        cpu_s=time.process_time() - began,
    )


@dataclass(frozen=True, slots=True)
class Aim:
    """What has to come out."""

    name: str
    found: str
    is_met: bool


def aims(outcomes: list[Outcome]) -> list[Aim]:
    """Those that these runs say something of."""
    found = []
    ours = {one.scenario: one for one in outcomes if one.policy == "headrace"}
    loads = [ours[name] for name in ("0.5x", "0.8x", "1x", "3x", "10x") if name in ours]
    over = ours.get("3x")
    if over is not None and len(loads) > 1:
        # In tokens: where much more is offered, those that cost least are more of the answers, not of the work.
        best = max(one.goodput_tokens for one in loads)
        share = over.goodput_tokens / best if best else 0.0
        found.append(Aim("goodput at 3x, in tokens, of its best", f"{share:.1%}", share >= GOODPUT_SHARE))
    if over is not None:
        share = over.long_vain_share
        found.append(Aim("more than 0.5 s in vain at 3x (at most 10 %)", f"{share:.1%}", share <= VAIN_SHARE))
    for name, slo_s in SLOS.items():
        if name in ours:
            ttft_s = ours[name].ttft_p99_s
            found.append(Aim(f"p99 TTFT, s (SLO {slo_s:g}): {name}", f"{ttft_s:.2f}", 0.0 < ttft_s <= slo_s))
    for one in outcomes:
        if one.policy == "headrace" and one.scenario in FAIR:
            found.append(Aim(f"Jain's index of equal tenants: {one.scenario}", f"{one.jain:.3f}", one.jain >= JAIN))
    if ALL_ASK in ours:
        index = ours[ALL_ASK].jain
        found.append(
            Aim(f"Jain's index of all: {ALL_ASK} (at least {JAIN_OF_ALL:g})", f"{index:.3f}", index >= JAIN_OF_ALL)
        )
    stale = ours.get("reports 5 s old")
    if stale is not None:
        ttft_s = stale.ttft_p99_s
        name = f"p99 TTFT with reports 5 s old, s (at most {STALE_TTFT_S:g})"
        found.append(Aim(name, f"{ttft_s:.2f}", 0.0 < ttft_s <= STALE_TTFT_S))
    found += [
        Aim(f"attempts per request: {one.scenario}", f"{one.attempts_per_request:.3f}", is_met)
        for one in outcomes
        if one.scenario.startswith("full outage")
        for is_met in (1.0 <= one.attempts_per_request <= AMPLIFICATION,)
    ]
    for scenario in {one.scenario: None for one in outcomes if one.policy != "headrace"}:
        best = max(one.goodput_tokens for one in outcomes if one.scenario == scenario and one.policy != "headrace")
        share = ours[scenario].goodput_tokens / best if best and scenario in ours else 0.0
        name = f"goodput of our routing, of the best other's: {scenario}"
        found.append(Aim(name, f"{share:.1%}", share >= ROUTING_SHARE))
    broken = [f"{one.scenario}, {one.policy}: {text}" for one in outcomes for text in one.broken]
    drift = max((one.drift for one in outcomes), default=0)
    found.append(Aim("nothing lost or counted twice", broken[0] if broken else "all books empty", not broken))
    found.append(Aim("counted in flight less truly in flight", str(drift), drift == 0))
    return found
