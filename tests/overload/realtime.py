"""Who goes before ordinary threads here: Routers and Schedulers by their setting, and who measures them.

Callers, engines and etcd share the cores with them, so a time to refuse would mostly be a wait for a core.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from headrace.runtime import priority
from headrace.runtime.settings import SettingsError

ENVIRON = {"HEADRACE_ROUTER_REALTIME": "true", "HEADRACE_SCHEDULER_REALTIME": "true"}


def go_first() -> bool:
    """Go before ordinary threads with all that this one will start; returns whether that is allowed."""
    with contextlib.suppress(SettingsError):
        priority.take("overload")
        return True
    return False


def is_allowed() -> bool:
    """Whether that is allowed; asked in a thread that ends with it."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(go_first()))
    thread.start()
    thread.join()
    return found == [True]


def put(processes: Iterable[int], *, first: bool) -> None:
    """Let processes that run go first, or be ordinary ones, with all threads that they have."""
    policy, level = (os.SCHED_RR, priority.LOWEST) if first else (os.SCHED_OTHER, 0)
    for process in processes:
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(level))
