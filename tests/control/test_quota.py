"""Quotas: what is refused and for how long, that debt is carried, and that after any sequence the books are true."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.control.errors import Failure, Reason
from headrace.control.quota import Bucket, Charge, Quotas, concurrency_share
from headrace.control.tenants import Tenant, unlimited

ACME = Tenant("tenants/acme")


def refused(quotas: Quotas, tenant: Tenant, estimate: int = 1, routers: int = 1, now: float = 0.0) -> Failure:
    with pytest.raises(Failure) as caught:
        quotas.admit(tenant, estimate, routers, now)
    assert caught.value.reason is Reason.QUOTA_EXCEEDED
    return caught.value


def admitted(quotas: Quotas, tenant: Tenant, estimate: int, routers: int, now: float) -> Charge | Failure:
    try:
        return quotas.admit(tenant, estimate, routers, now)
    except Failure as failure:
        return failure


def test_requests_a_minute_are_refused_with_the_exact_time_until_one_passes() -> None:
    quotas, tenant = Quotas(), replace(ACME, requests_per_minute=60)
    for _ in range(60):
        quotas.admit(tenant, 1, 1, 0.0)
    failure = refused(quotas, tenant, now=0.25)
    assert failure.retry_after_s == pytest.approx(0.75)
    assert failure.metadata == {"tenant": "tenants/acme", "quota": "requestsPerMinute", "limit": "60"}
    refused(quotas, tenant, now=0.99)
    quotas.admit(tenant, 1, 1, 1.0)
    refused(quotas, tenant, now=1.5)


def test_tokens_are_settled_by_what_was_used_and_a_debt_is_waited_for() -> None:
    quotas, tenant = Quotas(), replace(ACME, tokens_per_minute=600)
    first = quotas.admit(tenant, 500, 1, 0.0)
    assert quotas.tokens_left("tenants/acme") == 100
    assert refused(quotas, tenant, 200).retry_after_s == pytest.approx(10.0)
    quotas.settle(first, 100, 0.0)
    assert quotas.tokens_left("tenants/acme") == 500
    second = quotas.admit(tenant, 100, 1, 0.0)
    quotas.settle(second, 1000, 0.0)
    assert quotas.tokens_left("tenants/acme") == -500
    failure = refused(quotas, tenant, 1)
    assert failure.retry_after_s == pytest.approx(50.1)
    assert failure.metadata["quota"] == "tokensPerMinute"


def test_more_than_a_bucket_holds_passes_when_it_is_full_and_leaves_a_debt() -> None:
    quotas, tenant = Quotas(), replace(ACME, tokens_per_minute=60)
    quotas.admit(tenant, 1000, 1, 0.0)
    assert quotas.tokens_left("tenants/acme") == -940
    assert refused(quotas, tenant, 1000).retry_after_s == pytest.approx(1000.0)


def test_concurrency_is_freed_once_and_by_nobody_else() -> None:
    quotas, tenant = Quotas(), replace(ACME, concurrency=2)
    one, _two = quotas.admit(tenant, 1, 1, 0.0), quotas.admit(tenant, 1, 1, 0.0)
    assert refused(quotas, tenant).metadata["quota"] == "concurrency"
    quotas.admit(replace(tenant, name="tenants/other"), 1, 1, 0.0)
    assert quotas.settle(one, 1, 0.0)
    assert not quotas.settle(one, 1, 0.0)
    assert not quotas.cancel(one, 0.0)
    assert quotas.running("tenants/acme") == 1
    quotas.admit(tenant, 1, 1, 0.0)
    refused(quotas, tenant)


def test_what_is_refused_takes_nothing() -> None:
    quotas, tenant = Quotas(), replace(ACME, requests_per_minute=60, tokens_per_minute=600, concurrency=1)
    charge = quotas.admit(tenant, 10, 1, 0.0)
    for _ in range(100):
        refused(quotas, tenant, 10)
    quotas.settle(charge, 10, 0.0)
    assert quotas.tokens_left("tenants/acme") == 590
    for _ in range(59):
        quotas.settle(quotas.admit(tenant, 1, 1, 0.0), 1, 0.0)
    assert refused(quotas, tenant).metadata["quota"] == "requestsPerMinute"


def test_what_was_never_started_is_given_back() -> None:
    quotas, tenant = Quotas(), replace(ACME, requests_per_minute=1, tokens_per_minute=10, concurrency=1)
    for _ in range(5):
        assert quotas.cancel(quotas.admit(tenant, 10, 1, 0.0), 0.0)
    assert quotas.running("tenants/acme") == 0
    assert quotas.tokens_left("tenants/acme") == 10


def test_the_longest_wait_is_told() -> None:
    quotas, tenant = Quotas(), replace(ACME, requests_per_minute=1, tokens_per_minute=60)
    quotas.admit(tenant, 100, 1, 0.0)
    assert refused(quotas, tenant, 1).metadata["quota"] == "requestsPerMinute"
    assert refused(quotas, tenant, 60).metadata["quota"] == "tokensPerMinute"


@pytest.mark.parametrize(("routers", "passes"), [(0, 8), (1, 8), (2, 4), (3, 2), (8, 1), (100, 1)])
def test_a_router_enforces_its_share(routers: int, passes: int) -> None:
    assert concurrency_share(8, routers) == passes
    for tenant in (replace(ACME, concurrency=8), replace(ACME, requests_per_minute=8)):
        quotas = Quotas()
        for _ in range(passes):
            quotas.admit(tenant, 1, routers, 0.0)
        refused(quotas, tenant, 1, routers)


def test_limits_that_change_count_from_then_on() -> None:
    quotas, tenant = Quotas(), replace(ACME, tokens_per_minute=600)
    quotas.admit(tenant, 600, 1, 0.0)
    refused(quotas, tenant, 100, now=0.0)
    quotas.admit(replace(tenant, tokens_per_minute=0), 100, 1, 0.0)
    raised = replace(tenant, tokens_per_minute=6000)
    quotas.admit(raised, 6000, 1, 0.0)
    refused(quotas, raised, 100, now=0.5)
    quotas.admit(raised, 100, 1, 1.0)
    assert refused(quotas, replace(tenant, concurrency=1, tokens_per_minute=0), now=1.0)


def test_a_share_that_changes_while_tokens_are_out_changes_how_much_there_can_be() -> None:
    quotas, tenant = Quotas(), replace(ACME, tokens_per_minute=600)
    quotas.cancel(quotas.admit(tenant, 1, 1, 0.0), 0.0)
    assert quotas.tokens_left("tenants/acme") == 600
    quotas.cancel(quotas.admit(tenant, 1, 10, 0.0), 0.0)
    assert quotas.tokens_left("tenants/acme") == 60, "more Routers share it now"
    quotas.cancel(quotas.admit(tenant, 1, 1, 27.0), 27.0)
    assert quotas.tokens_left("tenants/acme") == 60, "what had flowed in before was by the old rate"
    quotas.cancel(quotas.admit(tenant, 1, 1, 54.0), 54.0)
    assert quotas.tokens_left("tenants/acme") == pytest.approx(60 + 270)


def test_tenants_without_limits_are_counted_and_forgotten() -> None:
    quotas, tenant = Quotas(), unlimited("tenants/anonymous")
    charges = [quotas.admit(tenant, 10**9, 1, 0.0) for _ in range(50)]
    assert quotas.running("tenants/anonymous") == 50
    quotas.sweep((), 0.0)
    assert quotas.running("tenants/anonymous") == 50, "what runs is not forgotten"
    for charge in charges:
        quotas.settle(charge, 1, 0.0)
    quotas.sweep((), 0.0)
    assert len(quotas) == 0


def test_a_debt_is_not_forgotten_while_the_tenant_is_known() -> None:
    quotas, tenant = Quotas(), replace(ACME, tokens_per_minute=60)
    quotas.settle(quotas.admit(tenant, 1, 1, 0.0), 120, 0.0)
    quotas.sweep({"tenants/acme"}, 119.0)
    refused(quotas, tenant, 60, now=119.0)
    quotas.sweep({"tenants/acme"}, 120.0)
    assert len(quotas) == 0


@given(
    st.integers(1, 100_000),
    st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 30)), max_size=30),
    st.integers(1, 10_000),
)
def test_after_the_time_that_is_told_it_passes_and_not_much_before(
    per_minute: int, taken: list[tuple[int, float]], amount: int
) -> None:
    bucket, now = Bucket(per_minute, 0.0), 0.0
    for some, later in taken:
        now += later
        bucket.flow(now)
        bucket.take(some)
    wait_s = bucket.wait_s(amount)
    early = now + 0.99 * wait_s
    bucket.flow(early)
    assert (bucket.wait_s(amount) > 0) == (wait_s > 0 and not math.isclose(early, now + wait_s, abs_tol=1e-4))
    bucket.flow(now + math.ceil(wait_s * 1000) / 1000)
    assert bucket.wait_s(amount) == 0.0


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 200), st.integers(0, 400)), max_size=60),
)
def test_what_is_used_over_any_time_is_at_most_one_minutes_worth_more_than_what_flows_in(
    per_minute: int, requests: list[tuple[float, int, int]]
) -> None:
    quotas, tenant, now, used, largest = Quotas(), replace(ACME, tokens_per_minute=per_minute), 0.0, 0, 0
    for later, estimate, actual in requests:
        now += later
        try:
            charge = quotas.admit(tenant, estimate, 1, now)
        except Failure:
            continue
        quotas.settle(charge, actual, now)
        used += actual
        largest = max(largest, actual)
    assert used <= per_minute + per_minute * now / 60 + largest + 1e-3


class Books(RuleBasedStateMachine):
    """Any sequence of admissions, ends of all kinds, changes of limits and of the fleet."""

    @initialize()
    def begin(self) -> None:
        self.quotas = Quotas()
        self.now = 0.0
        self.running: list[tuple[Charge, int]] = []
        self.tenants = {name: Tenant(name) for name in ("tenants/a", "tenants/b")}
        self.ended: list[Charge] = []

    @rule(name=st.sampled_from(["tenants/a", "tenants/b"]), estimate=st.integers(0, 300), routers=st.integers(0, 4))
    def admit(self, name: str, estimate: int, routers: int) -> None:
        tenant, before = self.tenants[name], self.quotas.running(name)
        charge = admitted(self.quotas, tenant, estimate, routers, self.now)
        if isinstance(charge, Failure):
            assert charge.retry_after_s is not None
            assert charge.retry_after_s > 0
            assert self.quotas.running(name) == before
            return
        assert not tenant.concurrency or before < concurrency_share(tenant.concurrency, routers)
        self.running.append((charge, estimate))

    @rule(data=st.data(), used=st.integers(0, 600), started=st.booleans())
    def end(self, data: st.DataObject, used: int, started: bool) -> None:
        if not self.running:
            return
        charge, estimate = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before = self.quotas.tokens_left(charge.tenant)
        assert self.quotas.settle(charge, used, self.now) if started else self.quotas.cancel(charge, self.now)
        after = self.quotas.tokens_left(charge.tenant)
        if before is not None and after is not None and started and used >= estimate:
            assert after >= before - (used - estimate) - 1e-6, "only what was used beyond the estimate is taken"
        self.ended.append(charge)

    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        if self.ended:
            charge = data.draw(st.sampled_from(self.ended))
            before = self.quotas.tokens_left(charge.tenant)
            assert not self.quotas.settle(charge, 1000, self.now)
            assert not self.quotas.cancel(charge, self.now)
            assert self.quotas.tokens_left(charge.tenant) == before

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        name=st.sampled_from(["tenants/a", "tenants/b"]),
        requests=st.sampled_from([0, 1, 60]),
        tokens=st.sampled_from([0, 10, 600]),
        concurrency=st.integers(0, 3),
    )
    def set_limits(self, name: str, requests: int, tokens: int, concurrency: int) -> None:
        self.tenants[name] = Tenant(
            name, requests_per_minute=requests, tokens_per_minute=tokens, concurrency=concurrency
        )

    @rule(known=st.sets(st.sampled_from(["tenants/a", "tenants/b"])))
    def sweep(self, known: set[str]) -> None:
        self.quotas.sweep(known, self.now)

    @invariant()
    def what_runs_is_what_was_admitted_and_has_not_ended(self) -> None:
        for name in self.tenants:
            assert self.quotas.running(name) == sum(1 for charge, _ in self.running if charge.tenant == name)
        assert self.quotas.in_flight == len(self.running)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 600), st.booleans()), max_size=40))
def test_when_all_have_ended_the_bucket_has_lost_exactly_what_was_used(ends: list[tuple[int, int, bool]]) -> None:
    quotas, tenant = Quotas(), replace(ACME, tokens_per_minute=10**9)
    charges = [quotas.admit(tenant, estimate, 1, 0.0) for estimate, _, _ in ends]
    for charge, (_, used, started) in zip(charges, ends, strict=True):
        if started:
            quotas.settle(charge, used, 0.0)
        else:
            quotas.cancel(charge, 0.0)
    assert quotas.running("tenants/acme") == 0
    used_tokens = sum(used for _, used, started in ends if started)
    if ends:
        assert quotas.tokens_left("tenants/acme") == 10**9 - used_tokens
