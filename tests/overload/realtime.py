"""Puts this process and all below it before everything else on the machine, where that is allowed.

On a machine that is busy with other things a time to refuse is mostly a wait for a core. This is no way to run a
service; it is a way to see what the service itself takes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import psutil

EVERY_S = 0.5


def begin() -> bool:
    """Do so for all that run or will start; returns whether it is allowed."""
    try:
        _take({0}, set())
    except PermissionError:
        return False
    threading.Thread(target=_keep_on, daemon=True).start()
    return True


def _keep_on() -> None:
    done: set[int] = set()
    while True:
        with contextlib.suppress(OSError, psutil.Error):
            processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            for process in processes:
                with contextlib.suppress(OSError):
                    _take({int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()}, done)
        time.sleep(EVERY_S)


def _take(threads: set[int], done: set[int]) -> None:
    for thread in threads - done:
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
        done.add(thread)
