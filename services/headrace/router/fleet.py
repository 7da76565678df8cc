"""The other Routers, as the store lists them; while it is away, as it did last.

services/routers/ ──watch──> Directory ──> find(tag): who has the requests whose names have it
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from headrace.api.registry.v1 import resources_pb2
from headrace.control.idempotency import Origin
from headrace.control.origins import Directory, Peer, tag_of
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import Listing, Store, Watch
from headrace.runtime.telemetry import get_logger

PREFIX = "services/routers/"


class Fleet:
    """What one Router knows of the others. Belongs to the event loop.

    Args:
        here: this Router.
    """

    def __init__(self, here: Origin) -> None:
        self.here = here
        self.tag = tag_of(here)
        """In the names of this Router's requests."""
        self._directory = Directory()
        self._watch: Watch | None = None
        self._changed = asyncio.Event()

    async def run(self, store: Store) -> None:
        """Follow the store until cancelled; outages are waited out."""
        self._watch = store.watch(PREFIX, self._on_reset, self._on_changes)
        await self._watch.run()

    @property
    def is_fresh(self) -> bool:
        """Whether a Router that is not listed can be said to have no record."""
        return self._watch is not None and self._watch.state.is_fresh(time.monotonic())

    def registered(self, router: str) -> str | None:
        """Incarnation in a Router's service record; "": there is none; None: the store does not say."""
        return self._directory.incarnation(router) if self.is_fresh else None

    async def find(self, tag: str, wait_s: float) -> Peer | None:
        """The Router whose requests have `tag`; None if it is not heard of within `wait_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (found := self._directory.find(tag)) is None:
                    await self._changed.wait()
                return found
        return None

    def _on_reset(self, listing: Listing) -> None:
        self._directory.replace(_peers((item.key, item.value) for item in listing.items))
        self._tell()

    def _on_changes(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            if change.value is None:
                self._directory.remove(change.key.removeprefix("services/"))
            else:
                for peer in _peers([(change.key, change.value)]):
                    self._directory.put(peer)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _peers(items: Iterable[tuple[str, bytes]]) -> list[Peer]:
    """Those that can be asked; a record that cannot be read is passed over."""
    found = []
    for key, value in items:
        try:
            record = resources_pb2.ServiceRecord.FromString(value)
        except DecodeError:
            get_logger().error("service_record_unreadable", key=key)
            continue
        if record.incarnation and record.admin_endpoint:
            found.append(Peer(Origin(record.name, record.incarnation), record.admin_endpoint))
    return found
