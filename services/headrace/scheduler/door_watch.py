"""Sees when a worker begins or ceases to refuse somebody, which Routers are told at once."""

from __future__ import annotations

import math

from headrace.control.attempts import AttemptLedger

_Door = tuple[int, bool, frozenset[tuple[str, int]]]


class DoorWatch:
    """Of all workers of one Scheduler."""

    def __init__(self) -> None:
        self._version = -1
        self._seen: dict[str, _Door] = {}

    def have_changed(self, ledger: AttemptLedger, now: float) -> bool:
        """Whether some worker refuses others than when this was last asked; quick where the ledger is as it was."""
        keepers = ledger.keepers.values()
        if ledger.version == self._version and all(now < keeper.next_due for keeper in keepers):
            return False
        found = {
            replica: (
                int(queue.admits_from),
                queue.room > 0,
                frozenset((one.tenant, one.priority) for one in ledger.keepers[replica].closed(now)),
            )
            for replica, queue in ledger.queues.items()
        }
        is_behind = any(keeper.next_due < math.inf for keeper in keepers)
        self._version = -1 if is_behind else ledger.version
        is_other = found != self._seen
        self._seen = found
        return is_other
