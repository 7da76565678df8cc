"""Which replicas that vanished from the store are kept in the routing snapshot, as suspects.

One worker that disappears is believed at once. Many at once are a fault of the control plane: an etcd that pauses
for longer than a lease's life ends every lease together, while the workers run on. Then the last good set is held
for a while, and the data plane's own signals decide (the panic threshold of Envoy, for membership).

Replicas that said that they drain or have failed were announced; their going is no news.

Sans-io: `observe` takes what is stored and the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.control.resources import Replica, ReplicaState

WINDOW_S = 10.0
"""Disappearances within this time count together, seconds; less than a lease's life."""

HOLD_S = 45.0
"""How long suspects are kept, seconds: three lives of a lease, so that all can register again."""

SHARE = 0.5
"""More than this share of the fleet, and at least two, is a fault of the control plane."""

SUSPECT = "suspect: its record vanished together with most others; kept until it is registered again"

_ANNOUNCED = (ReplicaState.DRAINING, ReplicaState.FAILED)


@dataclass(frozen=True, slots=True)
class Held:
    """What to route on."""

    replicas: tuple[Replica, ...]
    """What is stored, and the suspects."""
    suspects: int


class ReplicaHold:
    """Remembers who was there. Replicas found in the last published snapshot may be given to begin with."""

    def __init__(self, known: Iterable[Replica] = ()) -> None:
        self._known = {r.name: r for r in known}
        self._vanished: dict[str, tuple[Replica, float]] = {}
        self._holding = False

    def observe(self, present: Iterable[Replica], now: float) -> Held:
        """Take in what is stored at `now` (monotonic seconds)."""
        here = {r.name: r for r in present}
        for name, known in self._known.items():
            if name not in here and known.state not in _ANNOUNCED:
                self._vanished[name] = (replace(known, detail=""), now)
        self._known = here
        self._vanished = {
            name: (gone, at)
            for name, (gone, at) in self._vanished.items()
            if name not in here and now - at < (HOLD_S if self._holding else WINDOW_S)
        }
        recent = sum(now - at < WINDOW_S for _, at in self._vanished.values())
        if recent >= 2 and recent > SHARE * (len(here) + len(self._vanished)):
            self._holding = True
        if not self._vanished:
            self._holding = False
        suspects = [replace(gone, detail=SUSPECT) for gone, _ in self._vanished.values()] if self._holding else []
        return Held((*here.values(), *suspects), len(suspects))

    def lose_store(self, now: float) -> None:
        """The store came back empty: it says nothing of the workers, so all of them are suspects, be it one."""
        for name, known in self._known.items():
            if known.state not in _ANNOUNCED:
                self._vanished[name] = (replace(known, detail=""), now)
        self._known = {}
        self._holding = bool(self._vanished)

    def next_deadline(self) -> float | None:
        """When `observe` may answer differently though nothing has changed; None: never."""
        if not self._holding or not self._vanished:
            return None
        return min(at for _, at in self._vanished.values()) + HOLD_S
