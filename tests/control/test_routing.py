"""The choice of a replica: each filter, the better of a sample, chance between equals, and what is remembered."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.doors import Asking
from headrace.control.errors import Failure, Reason
from headrace.control.filters import STALE_EPOCH_S, Demand
from headrace.control.load_view import ReplicaReport
from headrace.control.prefix_index import BLOCK_BYTES, salt, text_blocks
from headrace.control.priority import Priority
from headrace.control.resources import Replica, ReplicaState
from headrace.control.revocation import Revocation
from headrace.control.routing import DRAWS_MAX
from support.fleets import REVISION, Fleet, replica, snapshot

LOST = Reason.WORKER_LOST_BEFORE_OUTPUT


def draw(seed: int = 1) -> random.Random:
    return random.Random(seed)


def chosen(fleet: Fleet, times: int = 40, **facts: object) -> set[str]:
    return {fleet.choose(draw(n).random, **facts).name for n in range(times)}  # type: ignore[arg-type]


# Filters: one is excluded, the other is taken


@pytest.mark.parametrize("state", [s for s in ReplicaState if s is not ReplicaState.READY])
def test_only_ready_replicas_are_taken(state: ReplicaState) -> None:
    assert chosen(Fleet(replica("a", state=state), replica("b"))) == {"replicas/b"}


@pytest.mark.parametrize("count", [2, 40], ids=["few", "many"])
@pytest.mark.parametrize(
    ("word", "first", "facts"),
    [
        ("tried", {}, {"tried": ("replicas/r0",)}),
        ("unreachable", {}, {"reachable": lambda endpoint: endpoint != "r0:1"}),
        ("epoch", {"epoch": 0}, {}),
        ("zone", {"zone": "west"}, {"demand": Demand(zones=frozenset({"east"}))}),
        ("zone excluded", {"zone": "dark"}, {}),
        ("capability", {"kv_cells": 99}, {"demand": Demand(prompt_size=100, is_tokens=True)}),
        ("capability", {"guided": frozenset()}, {"demand": Demand(guided="regex")}),
        ("not ready", {"state": ReplicaState.DRAINING}, {}),
        ("refuses", {}, {"demand": Demand(priority=Priority.BATCH, asking=Asking(Priority.BATCH, "t"))}),
    ],
)
def test_a_filter_excludes_and_is_named(
    word: str, first: dict[str, object], facts: dict[str, object], count: int
) -> None:
    base = {"zone": "east", "kv_cells": 100, "guided": frozenset({"regex"})}
    others = [replica(f"r{n}", **base) for n in range(1, count)]  # type: ignore[arg-type]
    odd = replica("r0", **{**base, **first})  # type: ignore[arg-type]
    fleet = Fleet(odd, *others, zones_excluded=frozenset({"dark"}))
    if word == "refuses":
        fleet.routing.report("replicas/r0", ReplicaReport(admits_from=Priority.STANDARD), 0.0)
    # It would be the best: all others are busy.
    for one in others:
        fleet.send(one.name.removeprefix("replicas/"))
    assert "replicas/r0" not in chosen(fleet, 200, **facts)
    asked = {key: value for key, value in facts.items() if key not in ("tried",)}
    if word != "tried":
        demand, reachable = asked.get("demand", Demand()), asked.get("reachable", lambda endpoint: True)
        _, candidates = fleet.routing.explain(
            fleet.snapshot, REVISION, demand, reachable=reachable, random=draw().random, now=0.0, most=100  # type: ignore[arg-type]
        )  # fmt: skip
        assert {c.replica.name: c.excluded_by for c in candidates if c.excluded_by} == {"replicas/r0": word}


def test_a_revoked_replica_is_not_taken() -> None:
    fleet = Fleet(replica("a"), replica("b"))
    fleet.snapshot = replace(fleet.snapshot, revocations=(Revocation("replicas/a"),))
    assert chosen(fleet) == {"replicas/b"}


def test_a_replica_that_says_its_epoch_is_another_one_is_left_alone_until_the_snapshot_has_it() -> None:
    fleet = Fleet(replica("a"), replica("b"))
    fleet.routing.ended(fleet.send("a"), Reason.STALE_EPOCH, 1.0)
    assert chosen(fleet, now=1.5) == {"replicas/b"}
    assert len(chosen(fleet, now=1.0 + STALE_EPOCH_S)) == 2, "not for ever: the Scheduler may have been behind"
    fleet.routing.ended(fleet.send("a"), Reason.STALE_EPOCH, 5.0)
    fleet.apply(replica("a", epoch=8), replica("b"), now=5.1)
    assert len(chosen(fleet, now=5.2)) == 2


@pytest.mark.parametrize(
    ("replicas", "reason", "words"),
    [
        ((), Reason.NO_HEALTHY_WORKER, "No worker"),
        ((replica("a", state=ReplicaState.LOADING),), Reason.MODEL_LOADING, "loading"),
        ((replica("a", state=ReplicaState.FAILED, detail="bad digest"),), Reason.NO_HEALTHY_WORKER, "bad digest"),
        ((replica("a", state=ReplicaState.DRAINING),), Reason.NO_HEALTHY_WORKER, "No worker"),
    ],
    ids=["no replica", "one loads", "one failed, and why", "one drains"],
)
def test_nobody_ready_says_why(replicas: tuple[Replica, ...], reason: Reason, words: str) -> None:
    with pytest.raises(Failure) as caught:
        Fleet(*replicas).choose(draw().random)
    assert caught.value.reason is reason
    assert words in caught.value.message


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_excludes_a_replica_it_is_never_chosen(data: st.DataObject) -> None:
    names = [f"r{n}" for n in range(data.draw(st.integers(1, 30)))]
    some = st.sets(st.sampled_from(names))
    revoked, tried, down, failed, stale, foreign = (data.draw(some) for _ in range(6))
    fleet = Fleet(*(replica(name, zone="far" if name in foreign else "near") for name in names))
    for name in failed:
        for n in range(3):
            fleet.routing.ended(fleet.send(name), LOST, float(n))
    for name in stale:
        fleet.routing.ended(fleet.send(name), Reason.STALE_EPOCH, 2.0)
    fleet.snapshot = replace(fleet.snapshot, revocations=tuple(Revocation(f"replicas/{n}") for n in sorted(revoked)))
    hard = revoked | tried | down | stale | foreign
    ejected = {n for n in names if fleet.routing.outliers.excludes(f"replicas/{n}", 2.5)}
    assert len(ejected) <= len(names) // 2, "a share stays"
    blocks = text_blocks([b"x" * BLOCK_BYTES], salt("", ""))
    for name in names:  # that a prefix is kept there excuses nothing
        fleet.routing.prefixes.keep(f"replicas/{name}", blocks)
    facts = {
        "demand": Demand(BLOCK_BYTES, blocks=blocks, zones=frozenset({"near"}), affinity=data.draw(st.integers(0, 9))),
        "tried": [f"replicas/{n}" for n in tried],
        "reachable": lambda endpoint: endpoint.removesuffix(":1") not in down,
        "now": 2.5,
    }
    seed = draw(data.draw(st.integers(0, 99))).random
    if not set(names) - hard:
        with pytest.raises(Failure):
            fleet.choose(seed, **facts)  # type: ignore[arg-type]
        return
    name = fleet.choose(seed, **facts).name.removeprefix("replicas/")  # type: ignore[arg-type]
    assert name not in hard
    assert name not in ejected or not set(names) - hard - ejected, "one that fails only where nobody else is left"


# Choice


def test_the_lighter_of_two_is_taken() -> None:
    fleet = Fleet(replica("a"), replica("b"))
    fleet.send("a")
    assert chosen(fleet) == {"replicas/b"}


def test_load_counts_by_slots() -> None:
    fleet = Fleet(replica("a", slots=2), replica("b", slots=8))
    fleet.send("a")
    for _ in range(3):
        fleet.send("b")
    assert chosen(fleet) == {"replicas/b"}


@pytest.mark.parametrize("count", [2, 5, 40])
def test_equals_are_chosen_equally_often(count: int) -> None:
    fleet, rng, rounds = Fleet(*(replica(f"r{n}") for n in range(count))), draw(), 400
    drawn = Counter(fleet.choose(rng.random).name for _ in range(rounds * count))
    assert len(drawn) == count
    # 5 standard deviations of a binomial.
    assert all(abs(times - rounds) < 5 * rounds**0.5 for times in drawn.values())


def test_the_same_seed_chooses_the_same() -> None:
    fleet = Fleet(*(replica(f"r{n}") for n in range(50)))
    one, two = ([fleet.choose(rng.random).name for _ in range(50)] for rng in (draw(3), draw(3)))
    assert one == two


@pytest.mark.parametrize("fit", [2, 50, 100])
def test_requests_spread_evenly_over_those_that_fit(fit: int) -> None:
    """By drawing or, where few fit, by looking at all."""
    fleet, rng = Fleet(*(replica(f"r{n:03}") for n in range(100))), draw(3)
    for _ in range(20 * fit):
        name = fleet.choose(rng.random, reachable=lambda e: int(e[1:4]) < fit).name
        fleet.send(name.removeprefix("replicas/"))
    counts = fleet.routing.loads.in_flight
    assert len(counts) == fit
    assert max(counts.values()) - min(counts.values()) <= 8, (
        "the lighter of two evens out; chance alone leaves 20 and more"
    )


def test_the_only_one_of_many_that_will_do_is_found() -> None:
    fleet = Fleet(*(replica(f"r{n:04}") for n in range(2000)))
    assert chosen(fleet, 3, reachable=lambda endpoint: endpoint == "r1234:1") == {"replicas/r1234"}


def test_many_that_fit_are_not_all_looked_at() -> None:
    fleet = Fleet(*(replica(f"r{n:04}") for n in range(2000)))
    asked: list[str] = []

    def reachable(endpoint: str) -> bool:
        asked.append(endpoint)
        return int(endpoint[1:5]) % 2 == 0

    looks = []
    for n in range(200):
        asked.clear()
        fleet.choose(draw(n).random, reachable=reachable)
        looks.append(len(asked))
    assert sorted(looks)[190] <= DRAWS_MAX


def test_one_zone_of_many_is_drawn_from_directly() -> None:
    fleet = Fleet(*(replica(f"r{n:04}", zone=f"z{n % 100}") for n in range(2000)))
    asked: list[str] = []
    demand = Demand(zones=frozenset({"z7"}))
    for n in range(50):
        found = fleet.choose(draw(n).random, demand, reachable=lambda e: asked.append(e) is None)
        assert found.failure_domain.zone == "z7"
    assert len(asked) <= 50 * 4
    fleet.apply(replica("new", zone="z7"))
    assert chosen(fleet, 3, demand=demand) == {"replicas/new"}, "of the snapshot in use"


# Prefixes and sessions

PROMPT = [b"%04d" % n * (BLOCK_BYTES // 4) for n in range(20)]
ASKS = Demand(20 * BLOCK_BYTES, blocks=text_blocks(PROMPT, salt("t", REVISION.name)))


def test_who_keeps_the_prefix_is_found_among_many() -> None:
    fleet = Fleet(*(replica(f"r{n:04}") for n in range(2000)))
    fleet.routing.admitted(fleet.send("r1234", ASKS), 1280, 0, 0.0)
    assert chosen(fleet, demand=ASKS) == {"replicas/r1234"}
    assert len(chosen(fleet)) > 1, "others are drawn"


def test_a_queue_outweighs_a_prefix() -> None:
    fleet = Fleet(*(replica(f"r{n}") for n in range(10)))
    fleet.routing.admitted(fleet.send("r3", ASKS), 1280, 0, 0.0)
    for _ in range(11):
        fleet.send("r3")
    assert "replicas/r3" not in chosen(fleet, demand=ASKS)


def test_an_engine_that_keeps_nothing_is_not_believed_again() -> None:
    fleet = Fleet(*(replica(f"r{n}") for n in range(10)))
    for _ in range(12):
        token = fleet.send("r3", ASKS)
        fleet.routing.admitted(token, 1280, 0, 0.0)
        fleet.routing.ended(token, None, 0.0)
    assert len(chosen(fleet, 100, demand=ASKS)) > 5


def test_a_restart_forgets_the_prefix() -> None:
    fleet = Fleet(*(replica(f"r{n}") for n in range(10)))
    token = fleet.send("r3", ASKS)
    fleet.routing.admitted(token, 1280, 0, 0.0)
    fleet.routing.ended(token, None, 0.0)
    fleet.apply(*(replica(f"r{n}", epoch=8 if n == 3 else 7) for n in range(10)))
    assert fleet.routing.prefixes.depth("replicas/r3", ASKS.blocks) == 0
    token = fleet.send("r3", ASKS)  # of the old epoch: `send` names it
    fleet.routing.admitted(token, 1280, 0, 0.0)
    assert fleet.routing.prefixes.depth("replicas/r3", ASKS.blocks) == 0, "an old process's cache"


def test_a_session_stays_where_it_was() -> None:
    fleet = Fleet(*(replica(f"r{n:02}") for n in range(50)))
    demand = Demand(100, affinity=77)
    first = fleet.choose(draw().random, demand).name
    fleet.routing.ended(fleet.send("r31", demand), None, 0.0)
    assert chosen(fleet, demand=demand) == {"replicas/r31"}
    other = Fleet(*fleet.replicas)
    assert chosen(other, demand=demand) == {first}, "Routers that do not remember agree"
    for _ in range(5):
        fleet.send("r31")
    assert "replicas/r31" not in chosen(fleet, demand=demand), "a hint, never more"


# What becomes of attempts


def test_three_faults_eject_and_the_probe_brings_it_back_slowly() -> None:
    fleet = Fleet(*(replica(f"r{n}") for n in range(4)))
    for n in range(3):
        fleet.routing.ended(fleet.send("r0"), LOST, float(n))
    assert chosen(fleet, now=3.0) == {"replicas/r1", "replicas/r2", "replicas/r3"}
    for n in (1, 2, 3):
        fleet.send(f"r{n}")
    assert "replicas/r0" in chosen(fleet, now=7.5)
    probe = fleet.send("r0", now=7.5)
    assert "replicas/r0" not in chosen(fleet, 200, now=7.6), "one at a time"
    fleet.routing.ended(probe, Reason.OVERLOADED, 7.7)
    assert "replicas/r0" in chosen(fleet, now=7.8), "a refusal says nothing: the next one is the probe"
    probe = fleet.send("r0", now=7.8)
    fleet.routing.first_output(probe, 8.0)
    assert fleet.routing.slow_start.weight("replicas/r0", 8.0) < 0.2
    assert fleet.routing.slow_start.weight("replicas/r0", 60.0) == 1.0


@pytest.mark.parametrize(
    "reason",
    [r for r in Reason if r not in (LOST, Reason.ENGINE_FAILED)],
    ids=lambda reason: reason.value,
)
def test_refusals_and_the_callers_own_errors_eject_nobody(reason: Reason) -> None:
    fleet = Fleet(replica("r0"), replica("r1"))
    for n in range(20):
        fleet.routing.ended(fleet.send("r0", now=float(n)), reason, float(n))
    assert fleet.routing.outliers.ejections == 0


@pytest.mark.parametrize("reason", [LOST, Reason.ENGINE_FAILED])
def test_a_fault_after_the_first_token_ejects_nobody(reason: Reason) -> None:
    fleet = Fleet(replica("r0"), replica("r1"))
    for n in range(20):
        token = fleet.send("r0")
        fleet.routing.first_output(token, float(n))
        fleet.routing.ended(token, reason, float(n))
    assert fleet.routing.outliers.ejections == 0


def test_a_replica_that_comes_later_starts_slowly_and_a_whole_fleet_does_not() -> None:
    fleet = Fleet(replica("r0"), replica("r1", state=ReplicaState.LOADING))
    assert fleet.routing.slow_start.weight("replicas/r0", 0.0) == 1.0
    fleet.apply(replica("r0"), replica("r1"), now=5.0)
    assert fleet.routing.slow_start.weight("replicas/r1", 5.0) < 0.2
    fresh = Fleet(replica("r0", state=ReplicaState.LOADING))
    fresh.apply(replica("r0"), replica("r1"))
    assert fresh.routing.slow_start.weight("replicas/r1", 0.0) == 1.0


def test_a_retry_prefers_another_host_and_takes_the_same_one_if_it_must() -> None:
    a, b, c = (replica(name, zone="z", rack=f"k{name}", host=f"h{name}") for name in "abc")
    beside = replica("d", zone="z", rack="ka", host="ha")
    fleet = Fleet(a, b, c, beside)
    facts = {"tried": ("replicas/a", "replicas/c"), "failed": (a.failure_domain,)}
    assert chosen(fleet, **facts) == {"replicas/b"}
    assert chosen(fleet, **{**facts, "tried": ("replicas/a", "replicas/b", "replicas/c")}) == {"replicas/d"}


def test_explaining_changes_nothing() -> None:
    fleet = Fleet(*(replica(f"r{n:03}") for n in range(300)))
    token = fleet.send("r007", ASKS)
    fleet.routing.admitted(token, 1280, 0, 0.0)
    fleet.routing.report("replicas/r001", ReplicaReport(4, 2, 4, queue_wait_s=1.5), 0.0)
    seen: list[str] = []
    fleet.routing.observe = lambda outcome, age: seen.append(outcome)
    got, candidates = fleet.routing.explain(
        fleet.snapshot, REVISION, ASKS, reachable=lambda e: True, random=draw().random, now=1.0, most=50
    )
    assert got is not None
    assert got.name == "replicas/r007" == candidates[0].replica.name
    assert len(candidates) == 50
    totals = [c.score.total for c in candidates if c.score]
    assert totals == sorted(totals)
    assert len(totals) == 50
    assert candidates[0].score is not None
    assert candidates[0].score.prefix_locality < 0
    assert candidates[0].in_flight == 1
    assert not seen
    assert fleet.routing.loads.tokens == {token}


def test_decisions_are_counted_by_what_made_them() -> None:
    fleet, seen = Fleet(*(replica(f"r{n}") for n in range(4))), Counter[str]()
    fleet.routing.observe = lambda outcome, age: seen.update([outcome])
    fleet.choose(draw().random)
    fleet.routing.admitted(fleet.send("r1", ASKS), 1280, 0, 0.0)
    fleet.choose(draw().random, ASKS)
    fleet.routing.ended(fleet.send("r2", Demand(affinity=5)), None, 0.0)
    fleet.choose(draw().random, Demand(100, affinity=5))
    with pytest.raises(Failure):
        fleet.choose(draw().random, reachable=lambda e: False)
    assert seen == {"load": 1, "prefix": 1, "affinity": 1, "refused": 1}
    for n in range(3):
        fleet.routing.ended(fleet.send("r3"), LOST, float(n))
    fleet.choose(draw().random, tried=("replicas/r0", "replicas/r1", "replicas/r2"), now=2.5)
    assert seen["last_resort"] == 1


def test_a_snapshot_of_before_still_serves_a_request_that_was_pinned_to_it() -> None:
    fleet = Fleet(replica("a"), replica("b"))
    before = fleet.snapshot
    fleet.routing.apply(replace(snapshot(), version=9), 1.0)
    fleet.snapshot = before
    assert len(chosen(fleet, now=1.0)) == 2
    token = fleet.send("a")
    assert fleet.routing.loads.in_flight == {"replicas/a": 1}
    fleet.routing.ended(token, None, 2.0)
    assert fleet.routing.loads.in_flight == {}
    assert not list(fleet.routing.loads.standings)
