"""Started as a program: become tritonserver, and die with the Scheduler that asked for it.

    python launch.py PARENT_PID PROGRAM ARGUMENT...

A Scheduler that is killed with SIGKILL cannot stop its servers. So each server is started through this
program, which asks the kernel for a SIGKILL at the parent's death and then replaces itself with the server; a
hook between fork and exec in the Scheduler itself would run Python beside gRPC's threads. Standard library
only: it runs without site-packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to its parent and execute the rest of the command line."""
    parent, program = int(arguments[0]), arguments[1]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    if os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO):  # a Scheduler may run before all else, engines not
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.execv(program, arguments[1:])  # noqa: S606  no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
