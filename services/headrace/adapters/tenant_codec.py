"""Tenants and their keys to and from their protos. A key's digest is stored and followed, and never shown."""

from __future__ import annotations

from typing import Any

from headrace.adapters.route_codec import BadRecord, labels_of, timestamp
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.registry.v1 import resources_pb2
from headrace.control.priority import Priority
from headrace.control.tenants import ApiKey, Tenant

PRIORITIES: dict[Priority, Any] = {p: inference_pb2.Priority.Value(f"PRIORITY_{p.name}") for p in Priority}
_DIGEST_BYTES = 32


def tenant_to_proto(tenant: Tenant, *, with_digests: bool = True) -> resources_pb2.Tenant:
    """Encode a tenant.

    Args:
        tenant: what to encode.
        with_digests: False for whoever asks: only the store and those who follow it need the keys' digests.
    """
    return resources_pb2.Tenant(
        name=tenant.name,
        allowed_models=tenant.allowed_models,
        requests_per_minute=tenant.requests_per_minute,
        tokens_per_minute=tenant.tokens_per_minute,
        concurrency=tenant.concurrency,
        max_output_tokens=tenant.max_output_tokens,
        default_priority=PRIORITIES[tenant.default_priority],
        priority_ceiling=PRIORITIES[tenant.priority_ceiling],
        weight=tenant.weight,
        zones=tenant.zones,
        keys=[key_to_proto(key, with_digest=with_digests) for key in tenant.keys],
        certificate_names=tenant.certificate_names,
        etag=tenant.etag,
        update_time=timestamp(tenant.update_time_ms),
        labels=dict(tenant.labels),
    )


def tenant_from_proto(message: resources_pb2.Tenant) -> Tenant:
    """Decode a tenant; what is unset takes its meaning.

    Raises:
        BadRecord: a priority is unknown, or a key has no digest.
    """
    return Tenant(
        name=message.name,
        allowed_models=tuple(message.allowed_models),
        requests_per_minute=message.requests_per_minute,
        tokens_per_minute=message.tokens_per_minute,
        concurrency=message.concurrency,
        max_output_tokens=message.max_output_tokens,
        default_priority=priority_of(message.default_priority) or Priority.STANDARD,
        priority_ceiling=priority_of(message.priority_ceiling) or Priority.STANDARD,
        weight=message.weight or 1,
        zones=tuple(message.zones),
        keys=tuple(map(_key_from_proto, message.keys)),
        certificate_names=tuple(message.certificate_names),
        etag=message.etag,
        update_time_ms=message.update_time.ToMilliseconds(),
        labels=labels_of(message.labels),
    )


def key_to_proto(key: ApiKey, *, with_digest: bool) -> resources_pb2.ApiKey:
    """Encode a key."""
    return resources_pb2.ApiKey(
        name=key.name,
        sha256=key.sha256 if with_digest else b"",
        create_time=timestamp(key.create_time_ms),
        expire_time=timestamp(key.expire_time_ms) if key.expire_time_ms else None,
    )


def priority_of(number: int) -> Priority | None:
    """Decode a priority; None for unspecified.

    Raises:
        BadRecord: the number is unknown.
    """
    try:
        return Priority(number) if number else None
    except ValueError:
        raise BadRecord(f"the priority {number} is unknown") from None


def _key_from_proto(message: resources_pb2.ApiKey) -> ApiKey:
    if len(message.sha256) != _DIGEST_BYTES:
        raise BadRecord(f"{message.name or 'a key'} has no SHA-256")
    return ApiKey(
        message.name,
        message.sha256,
        message.create_time.ToMilliseconds(),
        message.expire_time.ToMilliseconds() if message.HasField("expire_time") else 0,
    )
