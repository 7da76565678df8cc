"""Which GPUs a worker gets: none has two holders, and who cannot have all that it needs gets none.

Sans-io. Devices are names as CUDA_VISIBLE_DEVICES has them: indices, or UUIDs.
"""

from __future__ import annotations

from collections.abc import Iterable


class DevicePool:
    """The GPUs of one Scheduler, in the order in which they are given out. Neighbours are given together."""

    def __init__(self, devices: Iterable[str]) -> None:
        self._free = list(dict.fromkeys(devices))
        self._order = {device: place for place, device in enumerate(self._free)}
        self._held: dict[str, tuple[str, ...]] = {}

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._order)

    def held_by(self, holder: str) -> tuple[str, ...]:
        """What a holder has."""
        return self._held.get(holder, ())

    def take(self, holder: str, count: int) -> tuple[str, ...] | None:
        """Give `count` devices to one that holds none; None, and nothing is given, where fewer are free."""
        assert holder not in self._held, "a holder gets its devices once"
        if count > len(self._free):
            return None
        taken = self._run_of(count)
        self._free = [device for device in self._free if device not in taken]
        if taken:
            self._held[holder] = taken
        return taken

    def give_back(self, holder: str) -> None:
        """It is over; one that holds nothing gives nothing back."""
        self._free = sorted([*self._free, *self._held.pop(holder, ())], key=self._order.__getitem__)

    def _run_of(self, count: int) -> tuple[str, ...]:
        """Neighbours where there are so many: they are the likeliest to have a fast link."""
        for start in range(len(self._free) - count + 1):
            run = self._free[start : start + count]
            if not run or self._order[run[-1]] - self._order[run[0]] == count - 1:
                return tuple(run)
        return tuple(self._free[:count])
