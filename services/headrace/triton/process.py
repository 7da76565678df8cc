"""One tritonserver process with one engine: start, watch, stop, and never an orphan.

    start_triton()  ->  TritonProcess.wait_exit()   resolves when it has ended, however it ended
                        TritonProcess.stop()        SIGTERM, grace, SIGKILL of the whole process group

The server leads a process group of its own, so a Ctrl-C at the Scheduler's terminal does not reach it and one
signal reaches its stubs. It dies with the Scheduler (headrace.triton.launch).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.triton import shared_memory
from headrace.triton.group import ExitWatch, members, memory_bytes
from headrace.triton.workspace import TritonFiles

MODEL = "llm"
LOG_BYTES_MAX = 4 * 1024 * 1024
_LOG_KEPT_BYTES = 1024 * 1024
_LOG_CHECK_S = 10.0
_KILL_WAIT_S = 5.0
_EXIT_TIMEOUT_S = 5  # the Scheduler has drained before it sends SIGTERM; nothing is in flight then
_MIB = 1024 * 1024

_LAUNCHER = Path(__file__).with_name("launch.py")
_RESTRICTED = "model-repository,shared-memory,trace,logging,statistics"
_LOAD_FAILURE = re.compile(r"failed to load '\w+' version \d+: (?P<text>.*)")


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What to start."""

    files: TritonFiles
    model_repository: Path
    engine_config: Mapping[str, Any]
    """The document that HEADRACE_ENGINE_CONFIG names; docs/engine-contract.md has its keys."""
    directory: Path
    """A directory of this worker's own: engine.json and triton.log."""
    threads: int
    """Compute threads of the engine; 0 lets it choose."""


class TritonProcess:
    """A running tritonserver. Made by `start_triton`; belongs to one event loop."""

    def __init__(self, child: subprocess.Popen[bytes], target: str, log: Path, shm_prefix: str) -> None:
        self.target = target
        """host:port of its gRPC endpoint."""
        self.pid = child.pid
        self._child = child
        self._log = log
        self._shm_prefix = shm_prefix
        self._exited = asyncio.Event()
        self._crippled = asyncio.Event()
        self._children: ExitWatch | None = None
        self._pidfd = os.pidfd_open(child.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended and been reaped."""
        return self._exited.is_set()

    @property
    def returncode(self) -> int | None:
        """As subprocess has it: negative for a signal, None while it runs."""
        return self._child.returncode

    async def wait_exit(self) -> int:
        """Return the exit code once it has ended. Keeps the log within its bound meanwhile."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOG_CHECK_S):
                    await self._exited.wait()
                    assert self._child.returncode is not None
                    return self._child.returncode
            bound_log(self._log)

    def watch_children(self) -> None:
        """From now on `wait_crippled` tells when a child ends: Triton itself does not notice that its stub is dead."""
        if self._children is None and not self._exited.is_set():
            children = tuple(pid for pid in members(self.pid) if pid != self.pid)
            self._children = ExitWatch(children, lambda pid: self._crippled.set())

    async def wait_crippled(self) -> None:
        """Return once one of its children has ended; `watch_children` comes first."""
        await self._crippled.wait()

    def memory_bytes(self) -> int:
        """Memory that it and its children hold and the kernel cannot take back; 0 once it has ended."""
        return 0 if self._exited.is_set() else memory_bytes(self.pid)

    async def stop(self, grace_s: float) -> None:
        """End the process: SIGTERM, then SIGKILL for its whole group after `grace_s`. Safe to call again."""
        if not self._exited.is_set():
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._exited.wait()
        if not self._exited.is_set():
            self.kill()
            with contextlib.suppress(TimeoutError):  # a process stuck in the kernel is left to the next start
                async with asyncio.timeout(_KILL_WAIT_S):
                    await self._exited.wait()

    def kill(self) -> None:
        """SIGKILL the whole group at once; `wait_exit` tells when it is gone."""
        if not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def failure(self) -> str:
        """Say in one sentence why it ended or did not load, from its exit code and its log."""
        reason = load_failure(self._log)
        if reason:
            return f"the engine did not load: {reason}"
        code = self._child.returncode
        if code is None:
            return f"tritonserver did not become ready; its log is {self._log}"
        if code < 0:
            return f"tritonserver was ended by {signal.Signals(-code).name}; its log is {self._log}"
        return f"tritonserver ended with code {code}; its log is {self._log}"

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # Before the pid is reaped it cannot name another group: what is left of ours goes now.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._pidfd)
        if self._children is not None:
            self._children.close()
        self._child.wait()
        shared_memory.sweep(self._shm_prefix)
        self._exited.set()


def start_triton(plan: TritonPlan) -> TritonProcess:
    """Start tritonserver; returns at once, long before it is ready. Blocks for the fork only (milliseconds).

    Must run in the event loop's thread: the kernel's parent-death signal is tied to the starting thread.

    Raises:
        OSError: the directory cannot be written or the program cannot be started.
    """
    plan.directory.mkdir(parents=True, exist_ok=True)
    config = plan.directory / "engine.json"
    config.write_text(json.dumps(plan.engine_config, indent=1, sort_keys=True), encoding="utf-8")
    log = plan.directory / "triton.log"
    log.unlink(missing_ok=True)
    port = _free_port()
    prefix = shared_memory.new_prefix()
    command = [
        sys.executable,
        "-I",
        "-S",
        str(_LAUNCHER),
        str(os.getpid()),
        str(plan.files.server),
        *_flags(plan, port, prefix),
    ]
    with log.open("ab") as output:  # append mode: bound_log() may cut the file below the writer's offset
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(plan, config),
            start_new_session=True,
        )
    return TritonProcess(child, f"127.0.0.1:{port}", log, prefix)


def bound_log(log: Path) -> None:
    """Cut a log that has outgrown LOG_BYTES_MAX; its newest part moves to `<name>.1`."""
    with contextlib.suppress(OSError):
        if log.stat().st_size <= LOG_BYTES_MAX:
            return
        with log.open("rb") as old:
            old.seek(-_LOG_KEPT_BYTES, os.SEEK_END)
            log.with_name(log.name + ".1").write_bytes(old.read())
        os.truncate(log, 0)


def load_failure(log: Path) -> str:
    """Return the engine's own sentence from the log of a failed load, or ""."""
    try:
        with log.open("rb") as file:
            text = file.read(LOG_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""
    found = _LOAD_FAILURE.search(text)
    if found is None:
        return ""
    # Triton wraps it: "Internal: ConfigError: the sentence" and, on the next lines, a traceback.
    line = found["text"].split("\\n")[0].strip().strip('"')
    return re.sub(r"^(?:[A-Z]\w*: )+", "", line)


def _free_port() -> int:
    # Another process may take it before Triton does; Triton then exits at once and the worker is restarted.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _flags(plan: TritonPlan, port: int, shm_prefix: str) -> list[str]:
    # Nobody holds the secret: those interfaces are closed (a model upload is code execution). It is visible in
    # the process list to users of this machine, who are not whom it keeps out.
    secret = secrets.token_urlsafe(32)
    return [
        f"--model-repository={plan.model_repository}",
        "--model-control-mode=explicit",
        f"--load-model={MODEL}",
        "--disable-auto-complete-config",  # the config is complete; else a second stub starts only to ask the model
        f"--backend-directory={plan.files.backends}",
        f"--cache-directory={plan.files.caches}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--backend-config=python,shm-default-byte-size={4 * _MIB}",
        f"--backend-config=python,shm-growth-byte-size={_MIB}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        f"--grpc-restricted-protocol={_RESTRICTED}:headrace={secret}",
        # Our client pings every 10 s; by default Triton drops a client that does.
        "--grpc-http2-min-recv-ping-interval-without-data=1000",
        "--grpc-http2-max-ping-strikes=0",
        "--grpc-keepalive-permit-without-calls=1",
        "--allow-http=false",
        "--allow-metrics=false",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        "--log-verbose=0",
    ]


def _environment(plan: TritonPlan, config: Path) -> dict[str, str]:
    # Our own settings stay out: they may name secrets, and the engine has its one file.
    env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    env.pop("PYTHONHOME", None)
    libraries = [str(path) for path in plan.files.library_path]
    libraries += filter(None, [env.get("LD_LIBRARY_PATH")])
    if libraries:  # an empty one would mean the working directory
        env["LD_LIBRARY_PATH"] = ":".join(libraries)
    # The stub embeds the first python3 on PATH: it must be the one that has the engine's packages.
    env["PATH"] = f"{plan.files.python or f'{sys.exec_prefix}/bin'}:{env.get('PATH', os.defpath)}"
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # a __pycache__ in the repository looks like a changed model
    env["HEADRACE_ENGINE_CONFIG"] = str(config)
    if plan.threads > 0:
        env.setdefault("OMP_NUM_THREADS", str(plan.threads))
    return env
