"""Where a session was last, and where it belongs when nobody remembers: a hint, never more.

A key's home is the replica that served it last. A Router that has not seen the key takes the owner of the key on a ring
of hashes instead, which is the same on every Router, and moves few keys when a replica comes or goes.

Sans-io; instants are monotonic seconds.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict

from headrace.control.resources import Replica

KEYS_MAX = 50_000
TTL_S = 900.0
"""A session that was silent for longer has lost its KV in any case."""


def affinity_hash(tenant: str, revision: str, key: str) -> int:
    """What stands for a session's key; 0 for none. Keys of two tenants never meet."""
    if not key:
        return 0
    text = "\0".join((tenant, revision, key)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") or 1


class Affinity:
    """Homes of sessions, the latest `keys_max` of them."""

    def __init__(self, keys_max: int = KEYS_MAX, ttl_s: float = TTL_S) -> None:
        self._keys_max = keys_max
        self._ttl_s = ttl_s
        self._homes: OrderedDict[int, tuple[str, float]] = OrderedDict()
        self._rings: dict[str, _Ring] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, key: int, revision: str, ready: tuple[Replica, ...], now: float) -> str:
        """Name of the key's home; "" for no key, or where nobody is ready."""
        if not key or not ready:
            return ""
        found = self._homes.get(key)
        if found is not None and now - found[1] <= self._ttl_s:
            return found[0]
        ring = self._rings.get(revision)
        if ring is None or ring.ready is not ready:
            ring = self._rings[revision] = _Ring(ready, ring)
        return ring.owner(key)

    def serve(self, key: int, replica: str, now: float) -> None:
        """A replica was given a request of the session."""
        if not key:
            return
        self._homes[key] = (replica, now)
        self._homes.move_to_end(key)
        if len(self._homes) > self._keys_max:
            self._homes.popitem(last=False)

    def keep(self, revisions: frozenset[str]) -> None:
        """Forget the rings of other revisions."""
        for name in self._rings.keys() - revisions:
            del self._rings[name]


class _Ring:
    """Replicas ordered by the hash of their names.

    It is made anew when a snapshot has come, on a request's path and of thousands: what was on the ring before is
    neither hashed nor sorted again.
    """

    def __init__(self, ready: tuple[Replica, ...], before: _Ring | None) -> None:
        self.ready = ready
        self._names = names = {replica.name for replica in ready}
        ordered = []
        if before is not None:
            ordered = [place for place in before._ordered if place[1] in names]
            names = names - before._names
        ordered += [(_hash(name), name) for name in names]
        ordered.sort()  # in no time where most of it is in order
        self._ordered: list[tuple[int, str]] = ordered
        self._points = [point for point, _ in ordered]

    def owner(self, key: int) -> str:
        """The first replica behind the key."""
        at = bisect_right(self._points, key)
        return self._ordered[at if at < len(self._ordered) else 0][1]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
