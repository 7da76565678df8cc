"""What the services need of a durable store, as values and protocols; `headrace.adapters.etcd` has the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.control.watch_cursor import Change

STALE_S = 5.0
"""Silence of the store after which a watch counts as broken, seconds."""


class LeaseNotFound(Exception):
    """The lease has expired or was revoked, and its keys are gone."""


class Compacted(Exception):
    """The revision asked for is no longer kept; list again."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as stored; revisions are the store's."""

    key: str
    """Without the installation's prefix."""
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    """Counts the writes since the key was created, from 1."""
    lease: int = 0
    """Lease that it lives under; 0 means none."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys below a prefix at one revision."""

    items: tuple[KeyValue, ...]
    revision: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Page:
    """Some keys below a prefix, in order."""

    items: tuple[KeyValue, ...]
    count: int
    """Of all keys from where this page begins to the end of the prefix."""

    @property
    def more(self) -> bool:
        """Whether there are keys behind these."""
        return self.count > len(self.items)


@dataclass(frozen=True, slots=True)
class Head:
    """Which store this is and how far it has come."""

    incarnation: str
    revision: int


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction: the key's revisions as given. 0 as create_revision means "does not exist".

    With `unchanged_since`, `key` is a prefix, and no key below it may have been written after that revision of the
    store (deleted ones do not count).
    """

    key: str
    create_revision: int | None = None
    mod_revision: int | None = None
    exists: bool | None = None
    unchanged_since: int | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """A write of a transaction."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Whether the conditions held, and the store's revision then (of the write, when they did)."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class SwapResult:
    """What came of a conditional write: the revision of the write, or the key as it is instead."""

    revision: int
    """0: nothing was written."""
    found: KeyValue | None = None
    """If nothing was written: what is there; None: nothing is."""


@dataclass(frozen=True, slots=True)
class WatchState:
    """How current a reader is. Times are those of the clock given to the watch."""

    heard_at: float | None = None
    """When the store was last heard on this watch; None means never."""
    revision: int = 0
    incarnation: str = ""
    relists: int = 0
    """Listings after the first."""
    last_relist: str = ""
    """Why the last one was made: one of RELIST_REASONS, "periodic" or "handler_failed"."""
    duplicates: int = 0

    def is_fresh(self, now: float, stale_s: float = STALE_S) -> bool:
        """Whether the store was heard within `stale_s` seconds."""
        return self.heard_at is not None and now - self.heard_at <= stale_s


class Watch(Protocol):
    """One list-and-watch."""

    @property
    def state(self) -> WatchState:
        """How current its reader is."""

    async def run(self) -> None:
        """Follow until cancelled."""


class Store(Protocol):
    """The store as its users see it; what raises what is said at `headrace.adapters.etcd.EtcdStore`."""

    async def get(self, key: str, *, timeout_s: float = ...) -> KeyValue | None:
        """Read one key."""

    async def range(self, prefix: str, *, timeout_s: float = ...) -> Listing:
        """Read everything below a prefix at one revision."""

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = ...,
        newest_first: bool = ...,
        keys_only: bool = ...,
        timeout_s: float = ...,
    ) -> Page:
        """Read the next `limit` keys below a prefix."""

    async def txn(
        self,
        compares: Sequence[Compare],
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        *,
        timeout_s: float = ...,
    ) -> TxnResult:
        """Write all of it if all conditions hold, else nothing."""

    async def swap(self, put: Put, mod_revision: int, *, timeout_s: float = ...) -> SwapResult:
        """Write a key if it was last written at `mod_revision` (0: does not exist), else read it: one transaction."""

    async def lease_grant(self, ttl_s: int, *, timeout_s: float = ...) -> tuple[int, float]:
        """Grant a lease; returns its id and the seconds it really lasts."""

    async def lease_keepalive(self, lease: int, *, timeout_s: float = ...) -> float:
        """Renew a lease; returns the seconds it lasts from when this was sent."""

    async def lease_revoke(self, lease: int, *, timeout_s: float = ...) -> None:
        """End a lease and its keys."""

    def watch(
        self,
        prefix: str,
        on_reset: Callable[[Listing], None],
        on_changes: Callable[[tuple[Change, ...]], None],
    ) -> Watch:
        """Follow everything below a prefix."""
