"""Who may take one of the last places: a tenant that floods leaves some for others, and is refused at once for it.

    a tenant has some, others ask, too    what it has + what it asks for <= FACTOR x weight x what is free
    it has none                           whatever is free
    it is alone                           whatever is free

So the more a tenant has, the more has to be free for it (dynamic thresholds: Choudhury and Hahne, "Dynamic queue length
thresholds for shared-memory packet switches"). One that floods stops at FACTOR / (FACTOR + 1) of all places, several at
even parts, and whoever comes with little finds room. Nobody who was taken in has to go for it.

Fair turns alone do not do that: they are for those who wait, and a flood keeps the others from waiting.

Sans-io; instants are monotonic seconds. O(1), and nothing is kept of a tenant but the names of the last two.
"""

from __future__ import annotations

import math

FACTOR = 4.0
"""At 4 one tenant may have four fifths of the places."""
MEMORY_S = 10.0
"""A tenant is alone when nobody else has asked for so long."""


class FairRoom:
    """Of one set of places that tenants share. Tell it of each one who asks, then ask for its share."""

    __slots__ = ("_at", "_before", "_before_at", "_last")

    def __init__(self) -> None:
        self._last = ""
        self._at = -math.inf
        self._before = ""
        self._before_at = -math.inf

    def asks(self, tenant: str, now: float) -> bool:
        """A tenant wants a place. Returns whether others did of late."""
        if tenant != self._last:
            self._before, self._before_at = self._last, self._at
            self._last = tenant
        self._at = now
        return now - self._before_at <= MEMORY_S

    def others(self, tenant: str, now: float) -> bool:
        """Whether others than this tenant want places, as far as was told of late."""
        return now - (self._before_at if tenant == self._last else self._at) <= MEMORY_S


def has_share(own: float, more: float, free: float, weight: float = 1.0) -> bool:
    """Whether a tenant that has `own` may have `more` where so much is `free`, others wanting some, too."""
    return own <= 0 or own + more <= FACTOR * weight * free
