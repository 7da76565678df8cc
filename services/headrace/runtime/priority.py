"""Runs a service before everything else on its machine, where its operator asks for that.

On a machine whose cores engines or callers share, a time to refuse, or from token to token, is mostly a wait for a
core: whoever is woken waits for the slices of those that run, and each message wakes several threads. A niceness
changes shares, hardly that wait. So it is the lowest priority of SCHED_RR, which runs before all ordinary threads. The
kernel keeps 5 % for the others (`sched_rt_runtime_us`), and a service takes no more than a core or two.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from headrace.runtime.settings import SettingsError

CORES_MIN = 2
"""On one core nobody else would run while there is much to do."""
LOWEST = 1


def take(service: str) -> None:
    """Put this thread, and all that it will start, before ordinary ones.

    Args:
        service: whose setting `realtime` asks for it.

    Raises:
        SettingsError: that is not allowed, or not wise, here; says what to do.
    """
    setting = f"{service} setting 'realtime'"
    if not hasattr(os, "sched_setscheduler"):
        raise SettingsError(f"{setting}: this system has no SCHED_RR; leave it out")
    cores = len(os.sched_getaffinity(0))
    if cores < CORES_MIN:
        raise SettingsError(
            f"{setting}: {cores} core would be left to nobody else; it takes {CORES_MIN}, or leave it out"
        )
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(LOWEST))
    except OSError as error:
        raise SettingsError(
            f"{setting}: {error.strerror}; give the process CAP_SYS_NICE, or an RLIMIT_RTPRIO of {LOWEST}"
        ) from None


def step_back() -> None:
    """Make this thread an ordinary one again, which is always allowed; one that has no such priority stays as it is."""
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def helpers() -> ThreadPoolExecutor:
    """Threads for what takes long (hashing an artifact, reading a file): they go before nobody."""
    return ThreadPoolExecutor(thread_name_prefix="helper", initializer=step_back)
