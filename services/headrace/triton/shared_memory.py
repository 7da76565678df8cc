"""Shared memory regions of Triton's Python backend, and those that dead servers left behind.

A tritonserver that ends by SIGKILL leaves its regions in /dev/shm. Ours carry a prefix that names the process
that started the server, so that a later start can tell which belong to nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from pathlib import Path

DIRECTORY = Path("/dev/shm")  # noqa: S108  the kernel's directory of shared memory, not a temporary file

_numbers = itertools.count(1)
_OURS = re.compile(r"headrace_(?P<namespace>\d+)_(?P<pid>\d+)_(?P<start>\d+)_")


def new_prefix() -> str:
    """Return a prefix for the regions of one server started by this process."""
    pid = os.getpid()
    return f"headrace_{_pid_namespace()}_{pid}_{_start_ticks(pid)}_{next(_numbers)}_"


def sweep(prefix: str) -> int:
    """Remove the regions of one server that is known to have ended; returns how many there were."""
    return sum(_remove(path) for path in DIRECTORY.glob(f"{prefix}*"))


def sweep_leaked() -> int:
    """Remove the regions whose starting process is gone; returns how many there were.

    Regions of another pid namespace or user are left alone: whether their owner lives cannot be told here.
    """
    namespace = _pid_namespace()
    removed = 0
    for path in DIRECTORY.glob("headrace_*"):
        match = _OURS.match(path.name)
        if match is None or int(match["namespace"]) != namespace:
            continue
        if _start_ticks(int(match["pid"])) != int(match["start"]):
            removed += _remove(path)
    return removed


def _remove(path: Path) -> int:
    with contextlib.suppress(OSError):
        path.unlink()
        return 1
    return 0


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot: tells a reused pid from the old one. 0: no such process."""
    try:
        # The command's name, in parentheses, may hold spaces; the fields after it do not.
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
