"""Turns: priorities have their reserved shares, tenants differ by a quantum and two requests, nobody starves."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.fair_shares import AWAY_MAX, QUANTUM, RESERVED, PriorityShares, TenantRing
from headrace.control.priority import Priority


@dataclass
class Entry:
    cost: int
    number: int
    due: float = 0.0

    @property
    def order(self):
        return self.due, self.number


COSTS = st.integers(1, 5000)


def serve(ring, fits=lambda _: True):
    choice = ring.choose(fits)
    ring.take(choice)
    return choice.tenant, choice.entry


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcde"), st.lists(COSTS, min_size=5, max_size=60), min_size=2),
    st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.5, 1.0, 4.0])),
)
def test_tenants_who_wait_differ_by_a_quantum_and_two_requests(queues, weights):
    ring, number = TenantRing(), 0
    for tenant, costs in queues.items():
        for cost in costs:
            number += 1
            ring.put(tenant, Entry(cost, number), weights.get(tenant, 1.0))
    left = {tenant: len(costs) for tenant, costs in queues.items()}
    got = dict.fromkeys(queues, 0)
    most = max(max(costs) for costs in queues.values())
    while all(left.values()):
        tenant, entry = serve(ring)
        left[tenant] -= 1
        got[tenant] += entry.cost
        shares = {t: (tokens / weights.get(t, 1.0), weights.get(t, 1.0)) for t, tokens in got.items()}
        for one, weight in shares.values():
            for other, other_weight in shares.values():
                assert one - other <= QUANTUM + most / weight + most / other_weight + 1e-6


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS, st.floats(0, 100)), min_size=1, max_size=40))
def test_everybody_is_served_once_and_within_a_tenant_by_deadline(entries):
    ring, waiting = TenantRing(), {}
    for number, (tenant, cost, due) in enumerate(entries):
        entry = Entry(cost, number, due)
        ring.put(tenant, entry)
        waiting.setdefault(tenant, []).append(entry)
    for _ in entries:
        tenant, entry = serve(ring)
        assert entry is min(waiting[tenant], key=lambda e: e.order)
        waiting[tenant].remove(entry)
    assert not len(ring)
    assert ring.choose(lambda _: True) is None


def test_a_heavy_tenant_does_not_delay_a_light_one_behind_its_backlog():
    ring = TenantRing()
    for number in range(100):
        ring.put("heavy", Entry(1000, number))
    served = [serve(ring)[0] for _ in range(3)]
    ring.put("light", Entry(100, 1000))
    served = [serve(ring)[0] for _ in range(2)]
    assert "light" in served


def test_one_that_does_not_fit_is_passed_and_saves_up_no_more_than_it_needs():
    ring = TenantRing()
    ring.put("a", Entry(4000, 0))
    for number in range(1, 200):
        ring.put("b", Entry(500, number))
    for _ in range(150):
        assert serve(ring, lambda e: e.cost < 1000)[0] == "b"
    ring.put("a", Entry(4000, 500))
    assert serve(ring)[0] == "a"
    # Had it saved up 150 rounds, its second one would follow at once.
    assert [serve(ring)[0] for _ in range(3)] == ["b"] * 3


def test_a_tenant_that_left_keeps_no_claim():
    ring = TenantRing()
    for number in range(8):
        ring.put("a", Entry(QUANTUM, number))
        ring.put("b", Entry(QUANTUM, 100 + number))
    entry = Entry(QUANTUM, 99)
    ring.put("c", entry)
    ring.remove("c", entry)
    assert not ring.has("c")
    assert sorted(serve(ring)[0] for _ in range(4)) == ["a", "a", "b", "b"]


@given(st.lists(st.tuples(st.sampled_from(Priority), st.booleans()), max_size=300), st.integers(1, 3000))
def test_each_priority_that_waits_gets_its_share_of_what_is_handed_out(others, cost):
    """SHEDDABLE waits all the time with requests of one size; whoever else waits, it gets its share, to one request."""
    shares = PriorityShares()
    low, total, got = Priority.SHEDDABLE, 0, 0
    for other, is_large in others:
        costs = {low: cost, other: cost if other is low else (4000 if is_large else 10)}
        chosen = shares.choose(costs)
        shares.charge(chosen, costs[chosen], costs)
        total += costs[chosen]
        got += costs[chosen] if chosen is low else 0
    assert got >= RESERVED[low] * total - cost - 4000 * RESERVED[low] - 1e-6


def test_the_highest_goes_first_but_for_what_is_owed():
    shares = PriorityShares()
    costs = dict.fromkeys(Priority, 100)
    served = []
    for _ in range(2000):
        chosen = shares.choose(costs)
        shares.charge(chosen, costs[chosen], costs)
        served.append(chosen)
    assert served[:4] == [Priority.CRITICAL] * 4
    for priority in (Priority.STANDARD, Priority.BATCH, Priority.SHEDDABLE):
        assert abs(served.count(priority) / len(served) - RESERVED[priority]) < 0.005
    assert served.count(Priority.CRITICAL) / len(served) > 0.6


def test_an_idle_priority_saves_up_nothing():
    shares = PriorityShares()
    for _ in range(1000):
        shares.charge(Priority.CRITICAL, 1000, [Priority.CRITICAL])
    assert shares.choose({Priority.CRITICAL: 10, Priority.BATCH: 10}) is Priority.CRITICAL
    for _ in range(50):
        shares.charge(Priority.CRITICAL, 1000, [Priority.CRITICAL, Priority.BATCH])
    assert shares.choose({Priority.CRITICAL: 10, Priority.BATCH: 10}) is Priority.BATCH
    shares.forget(Priority.BATCH)
    assert shares.choose({Priority.CRITICAL: 10, Priority.BATCH: 10}) is Priority.CRITICAL


def test_one_that_seldom_waits_is_served_before_those_who_always_do():
    ring = TenantRing()
    for tenant in ("a", "b", "c"):
        for number in range(40):
            ring.put(tenant, Entry(500, number))
    for _ in range(12):
        serve(ring)
    ring.put("seldom", Entry(500, 1000))
    served = [serve(ring)[0] for _ in range(2)]
    assert "seldom" in served
    # At once again it has missed nothing, and takes its turn like everybody.
    ring.put("seldom", Entry(500, 1001))
    assert "seldom" not in [serve(ring)[0] for _ in range(2)]


def test_what_was_missed_is_worth_one_request_at_most():
    ring = TenantRing()
    for number in range(100):
        ring.put("always", Entry(500, number))
    ring.put("seldom", Entry(500, 1000))
    while ring.has("seldom"):
        serve(ring)
    for _ in range(40):
        assert serve(ring)[0] == "always"
    for number in range(6):
        ring.put("seldom", Entry(500, 2000 + number))
    served = [serve(ring)[0] for _ in range(8)]
    assert 3 <= served.count("seldom") <= 5, "its turn at once, and then every other one"


def test_leaving_and_coming_back_gains_nothing():
    def served_with(tricks):
        ring = TenantRing()
        for number in range(60):
            ring.put("a", Entry(300, number))
            ring.put("b", Entry(300, 100 + number))
        found = []
        for number in range(40):
            for trick in range(tricks):
                entry = Entry(300, 1000 + 10 * number + trick)
                ring.put("b", entry)
                ring.remove("b", entry)
            found.append(serve(ring)[0])
        return found

    assert served_with(3) == served_with(0)


def test_memory_of_who_is_away_is_bounded():
    ring = TenantRing()
    ring.put("stays", Entry(10, 0))
    for number in range(AWAY_MAX + 50):
        entry = Entry(10, number + 1)
        ring.put(f"t{number}", entry)
        ring.remove(f"t{number}", entry)
    assert len(ring._away) == AWAY_MAX
