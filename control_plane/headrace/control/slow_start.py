"""A replica that is new, or has just recovered, takes load step by step: caches are cold and the fault may be back.

Sans-io; instants are monotonic seconds.
"""

from __future__ import annotations

RAMP_S = 20.0
"""How long it takes to full weight."""

FLOOR = 0.1
"""Weight at the start."""


class SlowStart:
    """Who is in its ramp. Weight grows evenly from `floor` to 1.

    Args:
        ramp_s: length of a ramp, seconds; 0: there is none.
        floor: weight at its start, above 0.
    """

    def __init__(self, ramp_s: float = RAMP_S, floor: float = FLOOR) -> None:
        assert 0.0 < floor <= 1.0
        self._ramp_s = ramp_s
        self._floor = floor
        self.since_by_name: dict[str, float] = {}
        """Who is in its ramp, since when; to be read only."""

    def begin(self, replica: str, now: float) -> None:
        """Start a replica's ramp."""
        if self._ramp_s > 0.0:
            self.since_by_name[replica] = now

    def forget(self, replica: str) -> None:
        """It is gone."""
        self.since_by_name.pop(replica, None)

    def weight(self, replica: str, now: float) -> float:
        """How much of its load it takes now, from the floor to 1."""
        since = self.since_by_name.get(replica)
        if since is None:
            return 1.0
        done = (now - since) / self._ramp_s
        if done >= 1.0:
            del self.since_by_name[replica]
            return 1.0
        return self._floor + (1.0 - self._floor) * max(0.0, done)
