"""Processes of a stack: each has a bounded log, a state, and an end that is noticed.

A part leads a session of its own, so ctrl-C in the terminal reaches `headrace up` alone, which then ends the
parts in order.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
LOG_BYTES_MAX = 8 * 1024 * 1024
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


class Log:
    """A file that never outgrows twice LOG_BYTES_MAX, and its last lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.tail: collections.deque[str] = collections.deque(maxlen=20)
        self._file = path.open("wb")
        self._size = 0

    def write(self, line: bytes) -> None:
        """Add a line; the full file becomes `<name>.1`."""
        if self._size + len(line) > LOG_BYTES_MAX:
            self._file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = self.path.open("wb")
            self._size = 0
        self._file.write(line)
        self._file.flush()
        self._size += len(line)
        self.tail.append(line.decode("utf-8", "replace").rstrip())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Part:
    """One process. Made by `start`; belongs to one event loop."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Log) -> None:
        self.name = name
        self.pid = process.pid
        self.log = log
        self._process = process
        self.ended = asyncio.create_task(self._follow())
        """Done, with the exit code, once the process has ended and its log is complete."""

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Part:
        """Start the process; returns at once."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            limit=1024 * 1024,
        )
        return cls(name, process, Log(log))

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
        said = next((line for line in reversed(self.log.tail) if line.startswith("headrace ")), "")
        return f"the {self.name} {end}{f': {said}' if said else ''}"

    async def _follow(self) -> int:
        assert self._process.stdout is not None
        try:
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:  # one line longer than the limit: the rest of it comes next
                    continue
                if not line:
                    break
                self.log.write(line)
            return await self._process.wait()
        finally:
            self.log.close()
