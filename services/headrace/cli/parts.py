"""Processes of a stack: each has a bounded log, a state, and an end that is noticed.

A part leads a session of its own, so ctrl-C in the terminal reaches `headrace up` alone, which then ends the
parts in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

from headrace.triton.process import bound_log

_PR_SET_CHILD_SUBREAPER = 36
_TAIL_BYTES = 16 * 1024
_TAIL_LINES = 5
_LOG_CHECK_S = 10.0
KILL_WAIT_S = 5.0


def adopt_orphans() -> None:
    """From now on processes whose parents die become children of this one, so that `end_orphans` finds them.

    The Python stub of a tritonserver that was killed would otherwise live on, with the model in its memory.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(known: Collection[int]) -> int:
    """Kill all children of this process but the `known` ones; returns how many there were."""
    orphans = [child for child in psutil.Process().children() if child.pid not in known]
    for orphan in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    psutil.wait_procs(orphans, timeout=KILL_WAIT_S)
    return len(orphans)


class Part:
    """One process. Made by `start`; belongs to one event loop."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.log = log
        self._process = process
        self.ended = asyncio.create_task(self._follow())
        """Done, with the exit code, once the process has ended."""

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Part:
        """Start the process; returns at once."""
        log.parent.mkdir(parents=True, exist_ok=True)
        # A file and not a pipe: a part must be able to drain, and to say so, when this process has died.
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environ),
                start_new_session=True,
            )
        return cls(name, process, log)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then SIGKILL for its whole group after `grace_s`; returns the exit code."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait([self.ended], timeout=grace_s)
        if not self.ended.done():
            self.kill()
            await asyncio.wait([self.ended], timeout=KILL_WAIT_S)
        return self.ended.result() if self.ended.done() else -signal.SIGKILL

    def kill(self) -> None:
        """SIGKILL its whole group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def why(self) -> str:
        """Say in one sentence how it ended, with its own last sentence if it had one."""
        code = self.ended.result() if self.ended.done() else None
        end = (
            f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        )
        said = self._last_sentence()
        return f"the {self.name} {end}{f': {said}' if said else ''}"

    def _last_sentence(self) -> str:
        """What the command said to a person; its log lines are JSON."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
            return next((line for line in reversed(lines) if line.startswith("headrace ")), "")
        return ""

    async def _follow(self) -> int:
        """Wait for the end, and keep the log within its bound meanwhile."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOG_CHECK_S):
                    return await self._process.wait()
            bound_log(self.log)
