"""Who may call, and how much: tenants, their keys, and what a tenant may ask for.

Sans-io: the time is an argument; digests are arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.priority import Priority
from headrace.control.resources import Labels, Revision

K = TypeVar("K")
V = TypeVar("V")

ANONYMOUS = "tenants/anonymous"
"""The tenant of callers without credentials, where the Router takes them."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key: never the key."""

    name: str
    """"tenants/{t}/keys/{k}"."""
    sha256: bytes
    """Of the key. Keys are 256 random bits, so a slow hash adds nothing."""
    create_time_ms: int = 0
    """Unix time, for people."""
    expire_time_ms: int = 0
    """Unix time from which on it is not accepted; 0: never."""

    def is_expired(self, now_ms: int) -> bool:
        """Whether it is no longer accepted at `now_ms`, Unix time."""
        return 0 < self.expire_time_ms <= now_ms


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. Limits are of the whole fleet; 0 and empty mean no limit."""

    name: str
    allowed_models: tuple[str, ...] = ()
    """Aliases and models that it may use; empty: all."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt and output."""
    concurrency: int = 0
    """Requests at a time."""
    max_output_tokens: int = 0
    """Of one request; 0: what the revision allows."""
    default_priority: Priority = Priority.STANDARD
    priority_ceiling: Priority = Priority.STANDARD
    weight: int = 1
    """Share between tenants of the same priority, relative."""
    zones: tuple[str, ...] = ()
    """Zones that may serve it; empty: all."""
    keys: tuple[ApiKey, ...] = ()
    certificate_names: tuple[str, ...] = ()
    """Names in client certificates that are this tenant."""
    etag: str = ""
    update_time_ms: int = 0
    """Unix time, for people."""
    labels: Labels = ()

    def priority(self, asked: Priority | None) -> Priority:
        """The priority in force: what was asked for or the default, at most the ceiling."""
        return min(asked or self.default_priority, self.priority_ceiling)

    def may_use(self, model: str, revision: Revision) -> bool:
        """Whether it may use `revision` by the name `model`: an alias, with or without "aliases/", or a revision.

        Where aliases are allowed, the revision behind one may be used by the alias only.
        """
        allowed = self.allowed_models
        return not allowed or f"models/{revision.model}" in allowed or model in allowed or f"aliases/{model}" in allowed


def unlimited(name: str) -> Tenant:
    """A tenant that nobody registered: no limits, any priority."""
    return Tenant(name, priority_ceiling=Priority.CRITICAL)


def key_digest(secret: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(secret.encode()).digest()


def check_model(tenant: Tenant, model: str, revision: Revision) -> None:
    """Refuse a model that the tenant may not use.

    Raises:
        Failure: PERMISSION_DENIED.
    """
    if not tenant.may_use(model, revision):
        raise Failure(
            Reason.PERMISSION_DENIED,
            f"{tenant.name} may not use this model; operators allow it with `headrace tenant set`.",
            metadata={"tenant": tenant.name, "resourceName": model[:128]},
        )


def check_output(tenant: Tenant, max_tokens: int | None) -> None:
    """Refuse a request for more output than the tenant may ask for; None: it does not say.

    Raises:
        InvalidRequest: for max_tokens.
    """
    limit = tenant.max_output_tokens
    if limit and max_tokens is not None and max_tokens > limit:
        raise InvalidRequest((Violation("max_tokens", f"must be at most {limit}, the limit of {tenant.name}"),))


class Joined(Mapping[K, V]):
    """Several indexes as one, without a copy: a snapshot of ten thousand tenants is swapped in no time.

    A look-up asks each index, some tens of them. A key that more than one has is in none: what two claim is neither's.
    """

    __slots__ = ("_indexes", "_without")

    def __init__(self, indexes: Iterable[Mapping[K, V]], without: Container[K] = ()) -> None:
        self._indexes = tuple(index for index in indexes if index)
        self._without = without

    def __getitem__(self, key: K) -> V:
        found = [index[key] for index in self._indexes if key in index]
        if len(found) != 1 or key in self._without:
            raise KeyError(key)
        return found[0]

    def __iter__(self) -> Iterator[K]:
        return (key for index in self._indexes for key in index if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class Directory:
    """Tenants, by the ways in which a call can show whose it is."""

    by_name: Mapping[str, Tenant]
    by_digest: Mapping[bytes, tuple[Tenant, ApiKey]]
    """By the digest of a key."""
    by_certificate: Mapping[str, Tenant]
    """By a name in certificates. One that two tenants claim is neither's."""
    contested: frozenset[str] = frozenset()
    """Such names, among these tenants."""


def directory(tenants: Iterable[Tenant]) -> Directory:
    """Index tenants."""
    by_name: dict[str, Tenant] = {}
    by_digest: dict[bytes, tuple[Tenant, ApiKey]] = {}
    by_certificate: dict[str, Tenant] = {}
    contested: set[str] = set()
    for tenant in tenants:
        by_name[tenant.name] = tenant
        by_digest.update((key.sha256, (tenant, key)) for key in tenant.keys)
        contested.update(by_certificate.keys() & tenant.certificate_names)
        by_certificate.update((name, tenant) for name in tenant.certificate_names)
    for name in contested:
        del by_certificate[name]
    views = MappingProxyType(by_name), MappingProxyType(by_digest), MappingProxyType(by_certificate)
    return Directory(*views, frozenset(contested))


def join(directories: Iterable[Directory]) -> Directory:
    """Several directories as one."""
    all_of_them = tuple(directories)
    contested = frozenset().union(*(found.contested for found in all_of_them))
    return Directory(
        Joined(found.by_name for found in all_of_them),
        Joined(found.by_digest for found in all_of_them),
        Joined((found.by_certificate for found in all_of_them), contested),
        contested,
    )


def contested_certificates(tenants: Iterable[Tenant]) -> dict[str, tuple[str, ...]]:
    """Names in certificates that more than one tenant claims, with those tenants' names in order."""
    claims: dict[str, list[str]] = {}
    for tenant in tenants:
        for name in tenant.certificate_names:
            claims.setdefault(name, []).append(tenant.name)
    return {name: tuple(sorted(claimed)) for name, claimed in sorted(claims.items()) if len(claimed) > 1}
