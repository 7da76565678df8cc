"""The processes of one tritonserver, as the kernel shows them: which there are, what memory they hold, when one ends.

All of them are in the process group that the server leads. Reading /proc costs well under a millisecond for a machine
of a few hundred processes; it is done once a second at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

_PROC = Path("/proc")
_KEPT = ("RssAnon:", "RssShmem:")
"""What the kernel cannot drop under pressure; pages of a mapped file it can, and a model's weights are mostly those."""


def members(group: int) -> tuple[int, ...]:
    """Pids in the process group, zombies left out."""
    found = []
    for entry in os.listdir(_PROC):  # noqa: PTH208  a Path for each would cost more than the rest
        if entry.isdigit() and _group_of(entry) == group:
            found.append(int(entry))
    return tuple(sorted(found))


def memory_bytes(group: int) -> int:
    """Memory that the group's processes hold and the kernel cannot take back; shared pages count for each of them."""
    return sum(_kept_bytes(pid) for pid in members(group))


def _group_of(pid: str) -> int:
    try:
        text = (_PROC / pid / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    state, _, group = text.rpartition(")")[2].split()[:3]
    return 0 if state == "Z" else int(group)


def _kept_bytes(pid: int) -> int:
    try:
        text = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(_KEPT))


class ExitWatch:
    """Tells when any of some processes has ended, within milliseconds. Belongs to one event loop; close it."""

    def __init__(self, pids: tuple[int, ...], on_exit: Callable[[int], None]) -> None:
        self._open: dict[int, int] = {}
        self._on_exit = on_exit
        loop = asyncio.get_running_loop()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                self._open[pid] = descriptor
                loop.add_reader(descriptor, self._ended, pid)

    def close(self) -> None:
        """Watch no more."""
        for pid in tuple(self._open):
            self._forget(pid)

    def _ended(self, pid: int) -> None:
        self._forget(pid)
        self._on_exit(pid)

    def _forget(self, pid: int) -> None:
        descriptor = self._open.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
