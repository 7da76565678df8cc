"""Tenants: what they may ask for, and to whom a key or a certificate belongs."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.control.errors import Failure, InvalidRequest, Reason
from headrace.control.priority import Priority
from headrace.control.resources import Engine, Execution, Revision
from headrace.control.snapshot import InconsistentSnapshot, Part, RoutingSnapshot, compile_snapshot
from headrace.control.tenants import (
    ApiKey,
    Tenant,
    check_model,
    check_output,
    contested_certificates,
    key_digest,
    unlimited,
)

P = Priority
REVISION = Revision("gemma", "", "", Execution(Engine.SYNTHETIC, 64, 1, 64))
KEY = ApiKey("tenants/acme/keys/k", key_digest("hr_secret"))
ACME = Tenant("tenants/acme", keys=(KEY,), certificate_names=("spiffe://acme", "both"))
OTHER = Tenant("tenants/other", certificate_names=("both",))


@pytest.mark.parametrize(
    ("default", "ceiling", "asked", "effective"),
    [
        (P.STANDARD, P.STANDARD, None, P.STANDARD),
        (P.STANDARD, P.STANDARD, P.CRITICAL, P.STANDARD),
        (P.STANDARD, P.CRITICAL, P.CRITICAL, P.CRITICAL),
        (P.STANDARD, P.BATCH, None, P.BATCH),
        (P.BATCH, P.STANDARD, None, P.BATCH),
        (P.BATCH, P.STANDARD, P.STANDARD, P.STANDARD),
        (P.STANDARD, P.STANDARD, P.SHEDDABLE, P.SHEDDABLE),
    ],
)
def test_the_priority_in_force_is_at_most_the_ceiling(
    default: Priority, ceiling: Priority, asked: Priority | None, effective: Priority
) -> None:
    tenant = Tenant("tenants/t", default_priority=default, priority_ceiling=ceiling)
    assert tenant.priority(asked) is effective


@pytest.mark.parametrize(
    ("allowed", "model", "fine"),
    [
        ((), "chat", True),
        (("aliases/chat",), "chat", True),
        (("aliases/chat",), "aliases/chat", True),
        (("aliases/chat",), "draft", False),
        (("aliases/chat",), REVISION.name, False),
        (("models/gemma",), REVISION.name, True),
        (("models/gemma",), "any-alias-of-it", True),
        (("models/other",), "chat", False),
        (("chat",), "draft", False),
    ],
)
def test_a_model_is_used_by_an_allowed_name_only(allowed: tuple[str, ...], model: str, fine: bool) -> None:
    tenant = Tenant("tenants/t", allowed_models=allowed)
    if fine:
        check_model(tenant, model, REVISION)
        return
    with pytest.raises(Failure) as caught:
        check_model(tenant, model, REVISION)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert caught.value.metadata["tenant"] == "tenants/t"


@pytest.mark.parametrize(("limit", "asked", "fine"), [(0, 9, True), (8, None, True), (8, 8, True), (8, 9, False)])
def test_more_output_than_the_tenants_limit_is_refused_by_name(limit: int, asked: int | None, fine: bool) -> None:
    tenant = Tenant("tenants/t", max_output_tokens=limit)
    if fine:
        check_output(tenant, asked)
        return
    with pytest.raises(InvalidRequest, match="8, the limit of tenants/t") as caught:
        check_output(tenant, asked)
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize(("expires", "now", "expired"), [(0, 10**15, False), (5, 4, False), (5, 5, True), (5, 6, True)])
def test_a_key_expires_at_its_time(expires: int, now: int, expired: bool) -> None:
    assert dataclasses.replace(KEY, expire_time_ms=expires).is_expired(now) is expired


def test_a_snapshot_finds_a_tenant_by_name_key_and_certificate() -> None:
    snapshot = RoutingSnapshot("here", 1, tenants=(ACME, OTHER))
    assert snapshot.tenant_by_name["tenants/acme"] is ACME
    assert snapshot.tenant_by_key_digest[key_digest("hr_secret")] == (ACME, KEY)
    assert key_digest("hr_secret2") not in snapshot.tenant_by_key_digest
    assert dict(snapshot.tenant_by_certificate) == {"spiffe://acme": ACME}, "what two claim is nobody's"
    with pytest.raises(InconsistentSnapshot):
        RoutingSnapshot("here", 1, tenants=(ACME, ACME))


def test_what_two_parts_of_a_snapshot_claim_is_nobodys_and_the_rest_is_found() -> None:
    snapshot = RoutingSnapshot("here", 1, parts=(Part(tenants=(OTHER,)), Part(), Part(tenants=(ACME,))))
    assert snapshot.tenants == (OTHER, ACME)
    assert dict(snapshot.tenant_by_certificate) == {"spiffe://acme": ACME}
    assert dict(snapshot.tenant_by_name) == {"tenants/acme": ACME, "tenants/other": OTHER}
    assert snapshot.tenant_by_key_digest.get(KEY.sha256) == (ACME, KEY)
    assert snapshot.tenant_by_certificate.get("both") is None
    third = Tenant("tenants/third", certificate_names=("both", "own"))
    for parts in (
        [(ACME, OTHER), (third,)],
        [(third,), (OTHER, ACME)],
        [(ACME, OTHER, third)],
        [(ACME,), (OTHER,), (third,)],
    ):
        snapshot = RoutingSnapshot("here", 1, parts=tuple(Part(tenants=some) for some in parts))
        assert dict(snapshot.tenant_by_certificate) == {"spiffe://acme": ACME, "own": third}
    with pytest.raises(InconsistentSnapshot):
        RoutingSnapshot("here", 1, parts=(Part(tenants=(ACME,)), Part(tenants=(ACME,))))


def test_a_certificate_that_two_claim_is_reported() -> None:
    assert contested_certificates((OTHER, ACME)) == {"both": ("tenants/acme", "tenants/other")}
    snapshot, problems = compile_snapshot(
        incarnation="here", version=1, artifacts=(), revisions=(), aliases=(), replicas=(), tenants=(OTHER, ACME)
    )
    assert snapshot.tenants == (ACME, OTHER)
    assert problems == ("the certificate name both is nobody's: tenants/acme and tenants/other claim it",)


def test_a_tenant_that_nobody_registered_has_no_limits() -> None:
    tenant = unlimited("tenants/anonymous")
    assert tenant.priority(P.CRITICAL) is P.CRITICAL
    assert tenant.priority(None) is P.STANDARD
    assert tenant == Tenant("tenants/anonymous", priority_ceiling=P.CRITICAL), "and nothing else is set"
