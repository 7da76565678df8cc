"""Tenants and keys over real gRPC and a real etcd: what is stored, what is told once, and what is never told."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import Reason
from headrace.registry.tenant_checks import KEYS_MAX
from support.registry import Start
from support.registry_api import Api, names, refused


def set_tenant(name: str = "tenants/acme", **fields: Any) -> Any:
    return pb.SetTenantRequest(tenant=resources_pb2.Tenant(name=name, **fields))


async def make(api: Api, name: str = "tenants/acme", **fields: Any) -> Any:
    return (await api.stub.SetTenant(set_tenant(name, **fields))).tenant


async def make_key(api: Api, key_id: str = "k", tenant: str = "tenants/acme", **fields: Any) -> Any:
    return await api.stub.CreateApiKey(pb.CreateApiKeyRequest(tenant=tenant, key_id=key_id, **fields))


async def get(api: Api, name: str = "tenants/acme") -> Any:
    return (await api.other.GetTenant(pb.GetTenantRequest(name=name))).tenant


async def test_a_tenant_is_set_changed_over_what_was_read_and_deleted(api: Api) -> None:
    first = await make(api, concurrency=4, labels={"team": "a"})
    assert (first.weight, first.default_priority) == (1, inference_pb2.PRIORITY_STANDARD)
    assert await get(api) == first
    assert await make(api, concurrency=4, labels={"team": "a"}) == first, "what is set already is not written again"
    second = await make(api, concurrency=5, etag=first.etag)
    assert second.etag != first.etag
    failure = await refused(api.stub.SetTenant(set_tenant(concurrency=6, etag=first.etag)))
    assert failure.reason is Reason.ETAG_MISMATCH
    assert (await get(api)).concurrency == 5
    failure = await refused(api.stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/acme", etag=first.etag)))
    assert failure.reason is Reason.ETAG_MISMATCH
    await api.stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/acme", etag=second.etag))
    assert (await refused(api.stub.GetTenant(pb.GetTenantRequest(name="tenants/acme")))).reason is Reason.NOT_FOUND
    assert (
        await refused(api.stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/acme")))
    ).reason is Reason.NOT_FOUND
    methods = [record.method for record in await api.audit(resource="tenants/acme")]
    assert methods == ["DeleteTenant", "SetTenant", "SetTenant"]


async def test_tenants_are_listed_by_page_and_label(api: Api) -> None:
    for number in range(5):
        await make(api, f"tenants/t{number}", labels={"odd": str(number % 2)})
    page = await api.stub.ListTenants(pb.ListTenantsRequest(page_size=3))
    rest = await api.stub.ListTenants(pb.ListTenantsRequest(page_size=3, page_token=page.next_page_token))
    assert names([*page.tenants, *rest.tenants]) == [f"tenants/t{n}" for n in range(5)]
    odd = await api.stub.ListTenants(pb.ListTenantsRequest(labels={"odd": "1"}))
    assert names(odd.tenants) == ["tenants/t1", "tenants/t3"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "acme"}, "tenant.name"),
        ({"name": "tenants/Acme"}, "tenant.name"),
        ({"keys": [resources_pb2.ApiKey(name="tenants/acme/keys/k")]}, "tenant.keys"),
        ({"weight": 1001}, "tenant.weight"),
        ({"allowed_models": ["aliases/a", "chat"]}, "tenant.allowed_models[1]"),
        ({"allowed_models": ["models/m/revisions/0123456789ab"]}, "tenant.allowed_models[0]"),
        ({"allowed_models": ["models/m", "models/m"]}, "tenant.allowed_models[1]"),
        ({"zones": [""]}, "tenant.zones[0]"),
        ({"certificate_names": ["a\nb"]}, "tenant.certificate_names[0]"),
        ({"certificate_names": [f"n{n}" for n in range(65)]}, "tenant.certificate_names"),
        ({"default_priority": 9}, "tenant.default_priority"),
        ({"priority_ceiling": 9}, "tenant.priority_ceiling"),
        ({"default_priority": inference_pb2.PRIORITY_CRITICAL}, "tenant.default_priority"),
        ({"labels": {"Bad": ""}}, "tenant.labels"),
    ],
)
async def test_a_tenant_that_is_not_understood_names_the_field(api: Api, fields: dict[str, Any], field: str) -> None:
    failure = await refused(api.stub.SetTenant(set_tenant(**fields)))
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, field)


async def test_a_default_priority_that_is_not_given_is_at_most_the_ceiling(api: Api) -> None:
    made = await make(api, priority_ceiling=inference_pb2.PRIORITY_BATCH)
    assert made.default_priority == inference_pb2.PRIORITY_BATCH


async def test_a_certificate_name_is_of_one_tenant(api: Api) -> None:
    await make(api, certificate_names=["spiffe://acme"])
    await make(api, certificate_names=["spiffe://acme"], concurrency=1)
    failure = await refused(api.stub.SetTenant(set_tenant("tenants/other", certificate_names=["spiffe://acme"])))
    assert (failure.reason, failure.field) == (Reason.RESOURCE_IN_USE, "tenant.certificate_names")
    assert failure.metadata["usedBy"] == "tenants/acme"


async def test_a_key_is_told_once_and_only_its_digest_is_kept(api: Api) -> None:
    await make(api)
    made = await make_key(api, lifetime=Duration(seconds=60))
    secret, digest = made.secret, hashlib.sha256(made.secret.encode()).digest()
    assert secret.startswith("hr_")
    assert len(secret) >= 3 + 43, "256 bits"
    assert made.key.expire_time.seconds - made.key.create_time.seconds == 60
    stored = await api.store.get("tenants/acme")
    assert stored is not None
    assert digest in stored.value
    everything = (await api.store.range("")).items
    assert not any(secret.encode() in kv.value for kv in everything), "the key itself is nowhere"
    told = [await get(api), await api.stub.ListTenants(pb.ListTenantsRequest()), *await api.audit()]
    assert len(told) == 4
    for message in told:
        assert digest not in message.SerializeToString()
        assert digest.hex() not in str(message)
    assert names((await get(api)).keys) == ["tenants/acme/keys/k"]
    assert (await make_key(api, "other")).secret != secret


async def test_a_key_that_is_there_is_not_made_again_and_limits_leave_keys_alone(api: Api) -> None:
    await make(api)
    await make_key(api)
    failure = await refused(make_key(api))
    assert (failure.reason, failure.field) == (Reason.ALREADY_EXISTS, "key_id")
    changed = await make(api, concurrency=9)
    assert names(changed.keys) == ["tenants/acme/keys/k"]
    stored = await api.store.get("tenants/acme")
    assert stored is not None
    assert len(resources_pb2.Tenant.FromString(stored.value).keys[0].sha256) == 32
    await api.stub.DeleteApiKey(pb.DeleteApiKeyRequest(name="tenants/acme/keys/k"))
    failure = await refused(api.stub.DeleteApiKey(pb.DeleteApiKeyRequest(name="tenants/acme/keys/k")))
    assert failure.reason is Reason.NOT_FOUND
    assert not (await get(api)).keys
    assert (await get(api)).concurrency == 9


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"key_id": ""}, "key_id"),
        ({"key_id": "A"}, "key_id"),
        ({"tenant": "acme"}, "tenant"),
        ({"lifetime": Duration()}, "lifetime"),
        ({"lifetime": Duration(seconds=-1)}, "lifetime"),
        ({"lifetime": Duration(seconds=4_000_000_000)}, "lifetime"),
    ],
)
async def test_a_key_that_is_not_understood_names_the_field(api: Api, fields: dict[str, Any], field: str) -> None:
    await make(api)
    failure = await refused(make_key(api, **fields))
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, field)


@pytest.mark.parametrize("name", ["tenants/acme", "tenants/acme/keys/", "tenants/acme/k/k", "aliases/a/keys/k", ""])
async def test_what_is_no_key_is_not_deleted(api: Api, name: str) -> None:
    assert (await refused(api.stub.DeleteApiKey(pb.DeleteApiKeyRequest(name=name)))).reason is Reason.INVALID_REQUEST


async def test_a_key_of_no_tenant_a_revoked_one_and_one_too_many_are_refused(api: Api) -> None:
    assert (await refused(make_key(api))).reason is Reason.NOT_FOUND
    await make(api)
    revoked = resources_pb2.Revocation(name="tenants/acme/keys/k", reason="stolen")
    await api.stub.Revoke(pb.RevokeRequest(revocation=revoked))
    assert (await refused(make_key(api))).reason is Reason.RESOURCE_IN_USE
    for number in range(KEYS_MAX):
        await make_key(api, f"k{number}")
    failure = await refused(make_key(api, "more"))
    assert failure.metadata["limitKeys"] == str(KEYS_MAX)


async def test_writers_at_once_lose_nothing(api: Api) -> None:
    await make(api)
    made = await asyncio.gather(
        *(make_key(api, f"k{n}") for n in range(6)),
        *(api.other.SetTenant(set_tenant(concurrency=n)) for n in range(1, 4)),
    )
    assert len({answer.secret for answer in made[:6]}) == 6
    found = await get(api)
    assert names(found.keys) == [f"tenants/acme/keys/k{n}" for n in range(6)]
    assert found.concurrency in (1, 2, 3)


async def test_what_is_published_has_the_tenants_without_digests(start: Start) -> None:
    async with start() as registry:
        await registry.stub.SetTenant(set_tenant(concurrency=3))
        made = await registry.stub.CreateApiKey(pb.CreateApiKeyRequest(tenant="tenants/acme", key_id="k"))

        snapshot = await registry.shows(lambda s: [k.name for t in s.tenants for k in t.keys] == [made.key.name])
        assert snapshot.tenants[0].concurrency == 3
        assert hashlib.sha256(made.secret.encode()).digest() not in snapshot.SerializeToString()
