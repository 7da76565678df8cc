"""The scenarios that are simulated, in groups; each is one row of the table."""

from __future__ import annotations

from dataclasses import replace

from headrace.control.tenants import Tenant
from sim_load.clients import NAIVE_RESENDS
from sim_load.policies import POLICIES
from sim_load.traffic import GREEDY, ONE_PRIORITY, PREFIXED, SHORT, TENANTS, USUAL
from sim_load.world import REPORT_S, TTFT_DEFAULT_S, Scenario

FIVE_TIMES_SLOWER = {0: 5.0}
MODEST = tuple(tenant for tenant in TENANTS if tenant != GREEDY)
LOADS = (0.5, 0.8, 1.0, 3.0, 10.0)


def _bursts(tenant: str, at: float) -> float:
    """One second in five has two thirds of all."""
    return 3.2 if at % 5.0 < 1.0 else 0.45


def _greedy(tenant: str, at: float) -> float:
    return 10.0 if tenant == GREEDY else 1.0


def steady(load: float) -> Scenario:
    return Scenario(f"{load:g}x", load, seconds=20.0 if load > 5 else 30.0)


SLOW = Scenario("slow replica", 0.8, slow=FIVE_TIMES_SLOWER)
STALE = Scenario("reports 2 s old", 0.9, report_s=2.0)
PREFIX = Scenario("shared prefixes", 1.1, kinds=PREFIXED)
ZONE = Scenario("zone lost, back", 0.7, seconds=40.0, zone_lost=(12.0, 22.0))
OUTAGE = Scenario("full outage", 0.8, outage=(10.0, 30.0))
ALL_ASK_TOO_MUCH = Scenario("1.5 by each, 15 by one", 1.5, priorities=ONE_PRIORITY, share_of=_greedy)
"""All at one priority: tenants share within each, and what is asked at a higher one comes first, whoever asks."""

GROUPS: dict[str, list[Scenario]] = {
    "load": [
        *(steady(load) for load in LOADS),
        replace(steady(3.0), name="3x, first tokens in 10 s", ttft_s=TTFT_DEFAULT_S),
        replace(steady(3.0), name="3x, nothing promised", ttft_s=0.0),
    ],
    "bursts": [Scenario("bursts of 2.6x", 0.8, share_of=_bursts)],
    "a greedy tenant": [
        Scenario("10 shares asked by one", 0.9, share_of=_greedy, equal=MODEST),
        ALL_ASK_TOO_MUCH,
        replace(ALL_ASK_TOO_MUCH, name="the same, nothing promised", ttft_s=0.0),
        Scenario(
            "it is limited to 100,000 tokens/min",
            0.9,
            share_of=_greedy,
            equal=MODEST,
            tenants=(Tenant(GREEDY, tokens_per_minute=100_000),),
        ),
    ],
    "retry storm": [
        Scenario("2x, callers give up", 2.0),
        Scenario("2x, callers send 5 times more", 2.0, seconds=20.0, resends=NAIVE_RESENDS),
        Scenario("the same, no retries in Routers", 2.0, seconds=20.0, resends=NAIVE_RESENDS, attempts_max=1),
    ],
    "faults": [
        SLOW,
        ZONE,
        replace(ZONE, name="zone lost at 1x", load=1.0),
        OUTAGE,
        replace(OUTAGE, name="full outage, callers send 5 times more", resends=NAIVE_RESENDS),
    ],
    "load reports": [
        *(replace(STALE, name=f"reports {age:g} s old", report_s=age) for age in (0.1, 0.5, 1.0, 2.0, 5.0)),
        replace(STALE, name="2 s late, unknown to Routers", report_s=0.2, late_s=2.0),
    ],
}
BY_NAME = {scenario.name: scenario for scenarios in GROUPS.values() for scenario in scenarios}
COMPARED = (SLOW, STALE, PREFIX, ZONE)
"""What each policy of routing is compared in."""


def compared() -> dict[str, list[Scenario]]:
    """By scenario, one for each policy, ours first."""
    return {
        scenario.name: [scenario, *(replace(scenario, policy=policy) for policy in POLICIES)] for scenario in COMPARED
    }


def quick(scenario: Scenario) -> Scenario:
    """The same with a quarter of the replicas. Without documents, of which so small a fleet gets too few to compare."""
    kinds = SHORT if scenario.kinds is USUAL else scenario.kinds
    takes_time = scenario.zone_lost or scenario.outage or scenario.report_s > REPORT_S
    seconds = scenario.seconds if takes_time else min(scenario.seconds, 20.0)
    return replace(scenario, per_scheduler=2, kinds=kinds, seconds=seconds)
