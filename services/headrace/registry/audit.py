"""The record of every change: who did what, what it was before and after.

    audit/{milliseconds}-{sequence}-{random}

A record is written in the transaction of its change, so there is neither a change without a record nor a record without
a change; the same transaction drops the oldest records beyond AUDIT_KEPT (writers at once may drop the same ones: then
the next writes drop the rest). Resources hold no secrets, and neither do records.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from google.protobuf.json_format import MessageToDict

from headrace.api.registry.v1 import resources_pb2
from headrace.registry.catalogue import AUDIT_PREFIX
from headrace.runtime.ports import Put, Store

AUDIT_KEPT = 10_000
"""Records kept, the newest."""

JSON_BYTES_MAX = 4096
"""Largest before or after, bytes of JSON; of a larger resource the largest fields are left out, and named."""

ACTOR = "headrace-actor"
"""Metadata key: who calls, percent-encoded. The caller's own claim: it is a record, not an authentication."""

_ACTOR_CHARACTERS_MAX = 64
_TRIM_MAX = 16
"""Records dropped by one transaction, which has room for 128 operations."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a call changes; None stands for a resource that does not exist."""

    method: str
    resource: str
    before: Any
    after: Any


class Audit:
    """Makes the records of this process.

    Args:
        store: where they are.
        kept: how many, of all processes together.
    """

    def __init__(self, store: Store, *, kept: int = AUDIT_KEPT) -> None:
        self._store = store
        self._kept = kept
        self._last_ms = 0
        self._sequence = 0

    def record(self, change: Change, *, actor: str, now_ms: int) -> Put:
        """The write that belongs into the transaction of `change`."""
        name = self._next_name(now_ms)
        message = resources_pb2.AuditRecord(
            name=name,
            actor=actor,
            method=change.method,
            resource=change.resource,
            before_json=to_json(change.before),
            after_json=to_json(change.after),
        )
        message.time.FromMilliseconds(now_ms)
        return Put(name, message.SerializeToString(deterministic=True))

    async def surplus(self) -> list[str]:
        """Keys of the oldest records, as many as must go so that one more can be kept."""
        oldest = await self._store.page(AUDIT_PREFIX, limit=_TRIM_MAX, keys_only=True)
        return [kv.key for kv in oldest.items][: max(0, oldest.count + 1 - self._kept)]

    def _next_name(self, now_ms: int) -> str:
        # Within a process ids rise even when the clock is set back or several changes share a millisecond.
        if now_ms > self._last_ms:
            self._last_ms, self._sequence = now_ms, 0
        else:
            self._sequence += 1
        return f"{AUDIT_PREFIX}{self._last_ms:014d}-{self._sequence:06d}-{secrets.token_hex(4)}"


def actor_of(context: Any) -> str:
    """Who makes this call: the name it gives, and the address it comes from."""
    said = next((str(v) for k, v in context.invocation_metadata() or () if k == ACTOR), "") if context else ""
    name = "".join(c for c in unquote(said) if c.isprintable())[:_ACTOR_CHARACTERS_MAX].strip()
    peer = unquote(context.peer()) if context else "this process"
    return f"{name or 'unknown'} ({peer})"


def to_json(message: Any) -> str:
    """A resource as JSON of at most JSON_BYTES_MAX bytes; "" for None."""
    if message is None:
        return ""
    fields = MessageToDict(message)
    omitted: list[str] = []
    while len(text := json.dumps(fields, separators=(",", ":"))) > JSON_BYTES_MAX:
        largest = max((f for f in fields if f != "omitted"), key=lambda f: len(json.dumps(fields[f])))
        omitted.append(largest)
        fields = {**{f: v for f, v in fields.items() if f != largest}, "omitted": omitted}
    return text
