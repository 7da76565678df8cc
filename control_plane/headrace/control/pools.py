"""From what decisions draw: what is known of each ready replica of a revision, as one tuple that is made once.

A decision comes from a position in it to all that it reads of a replica, with no name looked up on the way.

Sans-io.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.control.load_view import LoadView, Standing
from headrace.control.resources import Replica

_POOLS_MAX = 64
"""Sets of zones, each with a kind of guide, of which a pool is kept, for each revision."""

_Zones = frozenset[str]


class Pools:
    """Of one Router. `apply` each snapshot behind the LoadView.

    Args:
        loads: what is known of replicas.
        zones_excluded: zones that are drawn from by nobody.
    """

    def __init__(self, loads: LoadView, zones_excluded: frozenset[str] = frozenset()) -> None:
        self._loads = loads
        self._zones_excluded = zones_excluded
        self._made: dict[str, tuple[tuple[Replica, ...], dict[tuple[_Zones, str], tuple[Standing, ...]]]] = {}
        """By revision: the ready replicas that it was made of, and its pools."""
        self._applied: Mapping[str, tuple[Replica, ...]] = {}

    def apply(self, ready_of: Mapping[str, tuple[Replica, ...]]) -> None:
        """Keep what is made of replicas that this snapshot and the one before share: their standings are the same."""
        before, self._applied = self._applied, ready_of
        self._made = {
            name: made for name, made in self._made.items() if made[0] is ready_of.get(name) is before.get(name)
        }

    def pool(self, revision: str, ready: tuple[Replica, ...], zones: _Zones, guided: str = "") -> tuple[Standing, ...]:
        """Those of the ready replicas of a revision that will do.

        Args:
            revision: its name.
            ready: all of them.
            zones: where they may be; empty: anywhere.
            guided: kind of guided decoding that they must be able to do; "": none.
        """
        made = self._made.get(revision)
        if made is None or made[0] is not ready:
            made = self._made[revision] = (ready, {})
        found = made[1].get((zones, guided))
        if found is None:
            found = self._pool(ready, zones, guided)
            if len(made[1]) >= _POOLS_MAX:
                made[1].clear()
            made[1][zones, guided] = found
        return found

    def _pool(self, ready: tuple[Replica, ...], zones: _Zones, guided: str) -> tuple[Standing, ...]:
        known, excluded = self._loads.known, self._zones_excluded
        if zones or excluded:
            ready = tuple(r for r in ready if self._is_in(r.failure_domain.zone, zones))
        if guided:
            ready = tuple(r for r in ready if guided in r.guided)
        return tuple(map(known, ready))

    def _is_in(self, zone: str, zones: _Zones) -> bool:
        return (not zones or zone in zones) and zone not in self._zones_excluded
