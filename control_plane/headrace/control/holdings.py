"""What requests hold, and its release: once for each resource, in dependency order.

A request's end and the release of what it held are different facts. The end is decided once and at once; a resource
is released when its owner confirms that it is free. Until then it is counted as held, and nothing may reuse it.

    engine work -> KV -> prefix reference -> adapter -> slot -> send buffer -> trace

An earlier resource must be free before a later one is: KV that is still written to is not free. Sans-io.
"""

from __future__ import annotations

import enum
from collections import Counter


class Resource(enum.IntEnum):
    """In the order of their release."""

    ENGINE_WORK = 0
    """An engine computes for it, or may."""
    KV = 1
    PREFIX = 2
    """A reference to KV that it shares; the shared cells stay."""
    ADAPTER = 3
    SLOT = 4
    SEND_BUFFER = 5
    """Output that waits for the reader, and the events kept for resuming."""
    TRACE = 6
    """The request's own context: name, record, span."""


ENGINE_SIDE = (Resource.ENGINE_WORK, Resource.KV, Resource.PREFIX, Resource.ADAPTER, Resource.SLOT)
"""What one confirmation of the engine frees."""


class ReleaseError(AssertionError):
    """A resource was released twice, out of order, or without being held: a bug, never a caller's mistake."""


class ResourceLedger:
    """References of all requests of one process, by resource. All are zero when nothing runs."""

    def __init__(self) -> None:
        self.held: Counter[Resource] = Counter()
        self.released: Counter[Resource] = Counter()

    @property
    def references(self) -> int:
        """References in all."""
        return self.held.total()


class Holdings:
    """What one request holds."""

    __slots__ = ("_held", "_ledger")

    def __init__(self, ledger: ResourceLedger) -> None:
        self._ledger = ledger
        self._held: set[Resource] = set()

    def __contains__(self, resource: Resource) -> bool:
        return resource in self._held

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, *resources: Resource) -> None:
        """Take references.

        Raises:
            ReleaseError: one of them is held already.
        """
        for resource in resources:
            if resource in self._held:
                raise ReleaseError(f"{resource.name} is held already")
            self._held.add(resource)
            self._ledger.held[resource] += 1

    def release(self, resource: Resource) -> None:
        """Give one reference back.

        Raises:
            ReleaseError: it is not held, or something that depends on it still is.
        """
        if resource not in self._held:
            raise ReleaseError(f"{resource.name} is not held")
        first = min(self._held)
        if first < resource:
            raise ReleaseError(f"{resource.name} cannot be free while {first.name} is held")
        self._held.discard(resource)
        self._ledger.held[resource] -= 1
        self._ledger.released[resource] += 1

    def release_engine_side(self) -> None:
        """The engine confirms: all that it held for this request is free."""
        for resource in ENGINE_SIDE:
            if resource in self._held:
                self.release(resource)

    def trade_engine_side(self, other: Holdings) -> None:
        """Exchange what engines hold for both: another attempt of the same request counts from now on."""
        mine, theirs = self._held.intersection(ENGINE_SIDE), other._held.intersection(ENGINE_SIDE)
        self._held = (self._held - mine) | theirs
        other._held = (other._held - theirs) | mine
