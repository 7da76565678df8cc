"""What all methods of the Registry do with the store: read, list by page, change in one transaction with its record.

A method reads what it needs, decides, and commits under the condition that nothing of what it read has changed; when
something has, it decides again. So each change is decided on the state that it changes, however many clients write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from headrace.control.errors import Failure, Reason
from headrace.registry.audit import AUDIT_KEPT, Audit, Change, actor_of
from headrace.registry.paging import PAGE_BYTES_MAX, make_token, page_size, read_token
from headrace.runtime.ports import Compare, KeyValue, Put, Store, TxnResult
from headrace.runtime.telemetry import get_logger

TRIES = 20
"""How often a change is decided again because another client was first."""

_READ = 100
"""Resources read at a time: a hundred of the largest artifacts are 15 MB."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Which resources a request wants to see.

    Args:
        method: the request's method, "ListAliases".
        prefix: of their keys.
        read: makes the resource of a stored value; raises DecodeError.
        filters: of the request, as JSON; a page token is bound to them.
        labels: only resources with all of these.
        wanted: and only those that this is true of.
        newest_first: from the highest key to the lowest.
        batch: values read at a time; 0 for as many as suits large ones.
    """

    method: str
    prefix: str
    read: Callable[[KeyValue], Any]
    filters: Mapping[str, object] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    wanted: Callable[[Any], bool] = lambda message: True
    newest_first: bool = False
    batch: int = 0


class Records:
    """The base of the servicer's parts.

    Args:
        store: where everything is.
        now_ms: Unix time in milliseconds, for create and update times.
        audit_kept: how many audit records are kept.
    """

    def __init__(
        self,
        store: Store,
        *,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        audit_kept: int = AUDIT_KEPT,
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._audit = Audit(store, kept=audit_kept)

    async def _commit(
        self,
        context: Any,
        change: Change,
        compares: Sequence[Compare],
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
    ) -> TxnResult:
        """Make a change and its audit record, if all conditions hold."""
        record = self._audit.record(change, actor=actor_of(context), now_ms=self._now_ms())
        surplus = await self._audit.surplus()
        return await self._store.txn(compares, [*puts, record], [*deletes, *surplus])

    async def _get(self, key: str, name: str, message_class: Any, *, field: str = "name") -> tuple[KeyValue, Any]:
        """A stored resource.

        Raises:
            Failure: NOT_FOUND, or INTERNAL when the record is damaged.
        """
        found = await self._store.get(key)
        if found is None:
            raise not_found(name, field)
        try:
            return found, message_class.FromString(found.value)
        except DecodeError:
            raise damaged(name) from None

    async def _create(
        self, context: Any, *, method: str, key: str, message: Any, difference: str, requires: Sequence[Compare] = ()
    ) -> Any:
        """Put `message` if its key is free; else answer with what is there, if that has the same content.

        Returns None when it can be neither: what it requires is not there, or what was there has gone meanwhile.

        Raises:
            Failure: ALREADY_EXISTS.
        """
        found = await self._store.get(key)
        if found is None:
            change, free = Change(method, message.name, None, message), Compare(key, create_revision=0)
            done = await self._commit(context, change, [free, *requires], [Put(key, to_bytes(message))])
            if done.succeeded:
                return message
            found = await self._store.get(key)
        if found is None:
            return None
        try:
            stored = type(message).FromString(found.value)
        except DecodeError:
            raise damaged(message.name) from None
        if _content(stored) != _content(message):
            text = f"{message.name} exists with {difference}."
            raise Failure(Reason.ALREADY_EXISTS, text, metadata={"resourceName": message.name})
        return stored

    async def _list(self, request: Any, listed: Listed) -> tuple[list[Any], str]:
        """One page, and the token of the next one.

        Raises:
            InvalidRequest: the page token is of another request.
        """
        filters = {**listed.filters, "labels": dict(listed.labels)}
        after = last_key = read_token(request.page_token, listed.method, filters)
        size, room = page_size(request.page_size), PAGE_BYTES_MAX
        found: list[Any] = []
        while True:
            page = await self._store.page(
                listed.prefix, after=after, limit=listed.batch or _READ, newest_first=listed.newest_first
            )
            for kv in page.items:
                message = _wanted(kv, listed)
                if message is None:
                    continue
                room -= len(kv.value)
                if len(found) == size or (found and room < 0):
                    return found, make_token(listed.method, filters, last_key)
                found.append(message)
                last_key = kv.key
            if not page.more:
                return found, ""
            after = page.items[-1].key


def reader(message_class: Any) -> Callable[[KeyValue], Any]:
    """Makes a resource of its stored value."""
    return lambda kv: message_class.FromString(kv.value)


def has_labels(message: Any, labels: Mapping[str, str]) -> bool:
    """Whether a resource has all of these."""
    return all(key in message.labels and message.labels[key] == value for key, value in labels.items())


def not_found(name: str, field: str = "name") -> Failure:
    """What is named does not exist."""
    return Failure(Reason.NOT_FOUND, f"{name} does not exist.", field=field, metadata={"resourceName": name})


def damaged(name: str) -> Failure:
    """The stored bytes are no such resource."""
    return Failure(Reason.INTERNAL, f"The stored record of {name} is damaged.", metadata={"resourceName": name})


def busy(name: str) -> Failure:
    """Others were first, every time."""
    return Failure(
        Reason.STORE_UNAVAILABLE,
        f"{name}, or what it has to do with, changes faster than this call can decide; send it again.",
        metadata={"resourceName": name},
    )


def to_bytes(message: Any) -> bytes:
    """A resource as it is stored."""
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def _wanted(kv: KeyValue, listed: Listed) -> Any:
    try:
        message = listed.read(kv)
    except DecodeError:
        get_logger().error("damaged_record", key=kv.key)
        return None
    return message if listed.wanted(message) and has_labels(message, listed.labels) else None


def _content(message: Any) -> bytes:
    """What must be the same for two resources to be the same."""
    copy = type(message)()
    copy.CopyFrom(message)
    for field_name in ("create_time", "labels", "facts"):
        if field_name in message.DESCRIPTOR.fields_by_name:
            copy.ClearField(field_name)
    return to_bytes(copy)
