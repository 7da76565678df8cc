"""What routing is compared with: each chooses among the replicas that can be reached and were not tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.control.resources import Replica

InFlight = Callable[[str], int]
Choose = Callable[[Sequence[Replica], InFlight, Callable[[], float]], Replica]


def round_robin() -> Choose:
    """One after the other."""
    turn = -1

    def choose(replicas: Sequence[Replica], in_flight: InFlight, random: Callable[[], float]) -> Replica:
        nonlocal turn
        turn += 1
        return replicas[turn % len(replicas)]

    return choose


def at_random() -> Choose:
    """Any."""
    return lambda replicas, in_flight, random: replicas[int(random() * len(replicas))]


def least_requests() -> Choose:
    """The one with the fewest requests of this Router; any of those."""

    def choose(replicas: Sequence[Replica], in_flight: InFlight, random: Callable[[], float]) -> Replica:
        least = min(in_flight(r.name) for r in replicas)
        found = [r for r in replicas if in_flight(r.name) == least]
        return found[int(random() * len(found))]

    return choose


def power_of_two() -> Choose:
    """The one of two, drawn at random, with fewer requests of this Router."""

    def choose(replicas: Sequence[Replica], in_flight: InFlight, random: Callable[[], float]) -> Replica:
        one, other = (replicas[int(random() * len(replicas))] for _ in range(2))
        return one if in_flight(one.name) <= in_flight(other.name) else other

    return choose


POLICIES: dict[str, Callable[[], Choose]] = {
    "round robin": round_robin,
    "random": at_random,
    "least requests": least_requests,
    "power of two": power_of_two,
}
