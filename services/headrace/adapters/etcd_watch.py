"""Follow everything below a prefix: list, watch, resume; nothing lost, nothing twice, whatever breaks between.

    PrefixWatch.run ── session ──┬─ list, if the cursor needs one ──> on_reset(listing)
          ^                      ├─ open the watch, then check that it is still the same store
          │                      └─ read responses; ask for progress while it is quiet ──> on_changes(changes)
          └── back off, jittered ── silence, an error, or a Relist ends the session

The decisions are `headrace.control.watch_cursor`'s. This part does the waiting: silence of `STALE_S` means the
connection is given up, and the reader is told through `state` that what it has may be old. It keeps it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.adapters.etcd_stream import EtcdStream
from headrace.control.errors import Failure
from headrace.control.watch_cursor import Change, Doubt, News, Relist, WatchCursor
from headrace.runtime.ports import STALE_S, Compacted, Listing, WatchState
from headrace.runtime.telemetry import get_logger

if TYPE_CHECKING:
    from headrace.adapters.etcd import EtcdStore

PROGRESS_S = 1.5
"""How often a quiet watch is asked for a sign of life, seconds: three answers may be lost before STALE_S."""

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
"""Bounds of the wait between sessions, seconds; a herd of readers relists within about two seconds."""

RELIST_S = 600.0
"""A new listing as a safety net against a server that loses an event, seconds; jittered by half."""

_DELETE = 1


class PrefixWatch:
    """One list-and-watch.

    Args:
        store: where.
        prefix: what; "" is everything of the installation.
        on_reset: called with a whole listing: replace everything. Called first, and whenever the thread is lost.
        on_changes: called with the changes of one response, oldest first, never empty.
        clock: monotonic seconds.
        stale_s: silence after which the connection is given up, seconds.
        progress_s: how often a sign of life is asked for, seconds.
        relist_s: period of the safety net, seconds.
        jitter: random numbers in [0, 1).

    Both callbacks are plain functions that must not block; one that raises is logged and gets a new listing.
    """

    def __init__(
        self,
        store: EtcdStore,
        prefix: str,
        on_reset: Callable[[Listing], None],
        on_changes: Callable[[tuple[Change, ...]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        stale_s: float = STALE_S,
        progress_s: float = PROGRESS_S,
        relist_s: float = RELIST_S,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._on_reset = on_reset
        self._on_changes = on_changes
        self._clock = clock
        self._stale_s = stale_s
        self._progress_s = progress_s
        self._relist_s = relist_s
        self._jitter = jitter
        self._cursor = WatchCursor()
        self._relist_at = 0.0
        self._listings = 0
        self._last_relist = ""
        self._heard_at: float | None = None

    @property
    def state(self) -> WatchState:
        """How current the reader is now."""
        return WatchState(
            heard_at=self._heard_at,
            revision=self._cursor.applied,
            incarnation=self._cursor.incarnation,
            relists=max(0, self._listings - 1),
            last_relist=self._last_relist,
            duplicates=self._cursor.duplicates,
        )

    async def run(self) -> None:
        """Follow until cancelled; outages are waited out."""
        delay_s = BACKOFF_FIRST_S
        while True:
            opened_at = self._clock()
            try:
                await self._session()
            except Failure as failure:
                get_logger().info("store_watch_interrupted", prefix=self._prefix, why=failure.message)
            except Compacted:
                self._note(self._cursor.restart("compacted"))
            except Exception as error:
                get_logger().error("store_watch_failed", prefix=self._prefix, exc_info=error)
                self._note(self._cursor.restart("handler_failed"))
            if self._clock() - opened_at > 2 * BACKOFF_MAX_S:
                delay_s = BACKOFF_FIRST_S
            await asyncio.sleep(delay_s * (0.5 + self._jitter()))
            delay_s = min(2 * delay_s, BACKOFF_MAX_S)

    async def _session(self) -> None:
        """List if needed, then watch until the thread is lost. Returns when a new listing is due."""
        if self._cursor.needs_list:
            await self._list()
        loop = asyncio.get_running_loop()
        async with self._store.watch_stream(loop.time() + self._stale_s) as stream:
            deadline = loop.time() + self._stale_s
            await stream.write(self._store.watch_request(self._prefix, self._cursor.start_revision), deadline)
            created = await stream.read(deadline)
            if created.canceled:
                self._decide(created)
                return
            # Read after the watch exists: a store that was wiped before this cannot be the one it watches.
            if not await self._is_same_store():
                return
            self._heard_at = self._clock()
            failed: Failure | None = None
            try:
                async with asyncio.TaskGroup() as group:
                    asking = group.create_task(self._ask_for_progress(stream))
                    try:
                        await self._read(stream)
                    finally:
                        asking.cancel()
            except* Failure as failures:
                failed = _first(failures)
            if failed is not None:  # not inside `except*`: before Python 3.11.4 that wraps it in a group again
                _raise_if_cancelled()
                raise failed

    async def _read(self, stream: EtcdStream) -> None:
        loop = asyncio.get_running_loop()
        while self._clock() < self._relist_at:
            response = await stream.read(loop.time() + self._stale_s)
            decision = self._decide(response)
            if isinstance(decision, Relist):
                return
            if isinstance(decision, Doubt) and not await self._is_same_store():
                return
            self._heard_at = self._clock()
        self._note(self._cursor.restart("periodic"))

    def _decide(self, response: Any) -> News | Relist | Doubt:
        decision = self._cursor.delivered(
            response.header.revision,
            tuple(self._change(event) for event in response.events),
            cancelled=response.canceled,
            compact_revision=response.compact_revision,
        )
        if isinstance(decision, News) and decision.changes:
            self._on_changes(decision.changes)
        if isinstance(decision, Relist):
            self._note(decision)
            if response.canceled and not response.compact_revision:
                self._store.forget_token()  # the usual cause: it was old, or its role has changed
                get_logger().warning("store_watch_cancelled", prefix=self._prefix, why=response.cancel_reason)
        return decision

    def _change(self, event: Any) -> Change:
        kv = self._store.item(event.kv)
        if event.type == _DELETE:
            return Change(kv.key, kv.mod_revision, None)
        return Change(kv.key, kv.mod_revision, kv.value, kv.create_revision, kv.version)

    async def _list(self) -> None:
        listing = await self._store.range(self._prefix, timeout_s=self._stale_s)
        self._on_reset(listing)
        self._cursor.listed(listing.incarnation, listing.revision, listing.items)
        self._listings += 1
        self._heard_at = self._clock()
        self._relist_at = self._clock() + self._relist_s * (0.75 + 0.5 * self._jitter())

    async def _is_same_store(self) -> bool:
        head = await self._store.head(timeout_s=self._stale_s)
        relist = self._cursor.checked(head.incarnation, head.revision)
        if relist is not None:
            self._note(relist)
        return relist is None

    async def _ask_for_progress(self, stream: EtcdStream) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._progress_s)
            await stream.write(self._store.progress_request(), loop.time() + self._stale_s)

    def _note(self, relist: Relist) -> None:
        self._last_relist = relist.reason
        get_logger().info("store_relist", prefix=self._prefix, reason=relist.reason)


def _raise_if_cancelled() -> None:
    """A TaskGroup whose task fails forgets that it was cancelled in the same moment (before Python 3.13)."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _first(failures: BaseExceptionGroup[Failure]) -> Failure:
    """Any failure of the group: they are the same outage, seen by the reader and by the writer."""
    found = failures.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
