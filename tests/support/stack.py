"""The real stack for tests: `headrace up` as a person starts it, on free ports, with a model and the synthetic engine.

    def test_something(stack: RunningStack) -> None:
        with Client(stack.router) as client: ...

One stack serves the whole session. It starts a part again when it ends (`--restart`), so a test may kill one; it then
says so with `stack.expect_restart()`, and any other restart fails the session.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-P", "-m", "headrace.cli.main"]
START_S = 300.0
STOP_S = 90.0
MODEL = "gemma-3-270m"
SYNTHETIC = "synthetic"


@dataclass
class RunningStack:
    """A `headrace up` that is up."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    log: Path
    restarts: int = field(default=0)

    @property
    def up(self) -> Mapping[str, object]:
        """What up.json says now: addresses and process ids."""
        document: Mapping[str, object] = json.loads((self.state_dir / "up.json").read_text(encoding="utf-8"))
        return document

    @property
    def router(self) -> str:
        """host:port."""
        return str(self.up["router"])

    @property
    def registry(self) -> str:
        """host:port."""
        return str(self.up["registry"])

    @property
    def scheduler(self) -> str:
        """host:port."""
        return str(self.up["scheduler"])

    @property
    def etcd(self) -> str:
        """host:port."""
        return str(self.up["etcd"])

    def pid(self, part: str) -> int:
        """Process id of "router", "registry", "scheduler" or "etcd"."""
        pids = self.up["pids"]
        assert isinstance(pids, dict)
        return int(pids[part])

    def environ(self) -> dict[str, str]:
        """Environment in which the command line finds this stack."""
        return {
            **os.environ,
            "HEADRACE_ROUTER": self.router,
            "HEADRACE_REGISTRY": self.registry,
            "HEADRACE_MODEL": MODEL,
        }

    def run(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a headrace command against this stack."""
        return subprocess.run(
            [*COMMAND, *arguments], env=self.environ(), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def metrics(self) -> dict[str, str]:
        """Where each service has its metrics, by the collection in its name: "routers", "schedulers", "registries"."""
        services = json.loads(self.run("status", "--json").stdout)["services"]
        return {service["name"].split("/")[0]: service["metrics"] for service in services}

    def expect_restart(self, count: int = 1) -> None:
        """A test has ended a part on purpose."""
        self.restarts += count

    def output(self) -> str:
        """What `up` has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def start(state_dir: Path, *options: str, environ: Mapping[str, str] | None = None) -> RunningStack:
    """Run `headrace up` and wait until it says that it is up."""
    state_dir.mkdir(parents=True, exist_ok=True)
    log = state_dir / "up.log"
    command = [*COMMAND, "up", "--port-base", "0", "--state-dir", str(state_dir), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True
        )
    stack = RunningStack(process, state_dir, log)
    deadline = time.monotonic() + START_S
    while "Headrace is up" not in stack.output():
        if process.poll() is not None or time.monotonic() > deadline:
            kill(stack)
            raise AssertionError(f"the stack did not come up:\n{stack.output()}\n{tails(state_dir)}")
        time.sleep(0.1)
    return stack


def stop(stack: RunningStack) -> int:
    """Ctrl-C, and wait for the drain; returns the exit code."""
    stack.process.send_signal(signal.SIGINT)
    try:
        return stack.process.wait(STOP_S)
    finally:
        kill(stack)


def kill(stack: RunningStack) -> None:
    """End what is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(stack.process.pid, signal.SIGKILL)
    stack.process.wait(10)


def tails(state_dir: Path) -> str:
    """The last lines of every log."""
    found = []
    for path in sorted(state_dir.rglob("*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        found.append("\n".join([f"--- {path}", *lines]))
    return "\n".join(found)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The session's stack, with the default model and the synthetic engine."""
    state_dir = tmp_path_factory.mktemp("stack")
    running = start(state_dir, "--engine", "llamacpp", "--engine", "synthetic", "--restart")
    yield running
    code = stop(running)
    assert code == 0, f"the stack did not stop cleanly ({code}):\n{running.output()}\n{tails(state_dir)}"
    assert running.output().count("starting it again") == running.restarts, running.output()
