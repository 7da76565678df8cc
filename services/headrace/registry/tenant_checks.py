"""What a request about tenants must hold before anything is stored: all that is wrong is named at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from headrace.adapters import tenant_codec
from headrace.adapters.route_codec import BadRecord
from headrace.api.registry.v1 import resources_pb2
from headrace.control import names
from headrace.control.errors import InvalidRequest, Violation
from headrace.control.priority import Priority
from headrace.control.tenants import Tenant
from headrace.registry.checks import Wrong, check_labels

KEYS_MAX = 64
NAMES_MAX = 64
"""Allowed models, zones or certificate names of one tenant."""
NAME_CHARACTERS_MAX = 256
WEIGHT_MAX = 1000
LIFETIME_S_MAX = 100 * 366 * 86400


def checked_tenant(message: resources_pb2.Tenant, now_ms: int) -> Tenant:
    """Make a tenant of a request. Models that it may use need not exist yet.

    Raises:
        InvalidRequest: with every field that is wrong.
    """
    names.parse(message.name, "tenants", field="tenant.name")
    wrong = Wrong()
    wrong.unless(not message.keys, "tenant.keys", "must be empty: keys are made by CreateApiKey")
    wrong.unless(message.weight <= WEIGHT_MAX, "tenant.weight", f"must be at most {WEIGHT_MAX}")
    for field in ("default_priority", "priority_ceiling"):
        known = getattr(message, field) in (0, *Priority)
        wrong.unless(known, f"tenant.{field}", "must be a known priority")
    for index, name in enumerate(message.allowed_models[:NAMES_MAX]):
        rule = "must be aliases/ID or models/ID"
        wrong.unless(_is_model(name), f"tenant.allowed_models[{index}]", rule)
    _check_names(wrong, message.allowed_models, "tenant.allowed_models")
    _check_names(wrong, message.zones, "tenant.zones")
    _check_names(wrong, message.certificate_names, "tenant.certificate_names")
    check_labels(wrong, message.labels, "tenant.labels")
    wrong.done()
    try:
        made = tenant_codec.tenant_from_proto(message)
    except BadRecord as error:
        raise InvalidRequest((Violation("tenant", str(error)),)) from None
    fits = not message.default_priority or made.default_priority <= made.priority_ceiling
    wrong.unless(fits, "tenant.default_priority", "must not be above priority_ceiling, which is STANDARD if unset")
    wrong.done()
    default = min(made.default_priority, made.priority_ceiling)
    return dataclasses.replace(made, default_priority=default, update_time_ms=now_ms)


def checked_lifetime_ms(lifetime: Duration) -> int:
    """How long a key is accepted.

    Raises:
        InvalidRequest: it is no time, or longer than anybody's plans.
    """
    milliseconds = lifetime.seconds * 1000 + lifetime.nanos // 1_000_000
    if not 0 < milliseconds <= LIFETIME_S_MAX * 1000:
        raise InvalidRequest((Violation("lifetime", "must be above 0 and at most 100 years; unset: for ever"),))
    return milliseconds


def parse_key(name: str) -> str:
    """The tenant's name in "tenants/{t}/keys/{k}".

    Raises:
        InvalidRequest: `name` is not of that form.
    """
    parts = name.split("/")
    if (
        len(parts) == 4
        and (parts[0], parts[2]) == ("tenants", "keys")
        and names.is_id(parts[1])
        and names.is_id(parts[3])
    ):
        return f"tenants/{parts[1]}"
    raise InvalidRequest((Violation("name", f"must be tenants/ID/keys/ID, where ID is {names.ID_RULE}"),))


def _is_model(name: str) -> bool:
    collection, _, tail = name.partition("/")
    return collection in ("aliases", "models") and names.is_id(tail)


def _check_names(wrong: Wrong, found: Sequence[str], field: str) -> None:
    wrong.unless(len(found) <= NAMES_MAX, field, f"must be at most {NAMES_MAX}")
    for index, name in enumerate(found[:NAMES_MAX]):
        good = 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable()
        wrong.unless(good, f"{field}[{index}]", f"must be 1 to {NAME_CHARACTERS_MAX} printable characters")
        wrong.unless(name not in found[:index], f"{field}[{index}]", "occurs twice")
