"""Where things are on this machine: the state of a stack, its ports, and how clients of it find it.

<state dir>/up.json     addresses and process ids while `headrace up` runs
<state dir>/logs/       one log a process
<state dir>/etcd/       what the Registry has stored
<state dir>/workers/    Triton's own files
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from headrace.cli.problems import EXIT_USAGE, Problem

HOST = "127.0.0.1"
ROUTER_PORT = 50051
REGISTRY_PORT = 50052
SCHEDULER_PORT = 50053
ETCD_PORT = 23790
"""Not etcd's own 2379: a machine may have an etcd that is none of our business."""


def state_home(environ: Mapping[str, str] | None = None) -> Path:
    """Default of --state-dir."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "headrace"


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Models and builds, shared by all stacks and checkouts."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one stack."""

    router: int = ROUTER_PORT
    registry: int = REGISTRY_PORT
    scheduler: int = SCHEDULER_PORT
    etcd: int = ETCD_PORT

    @classmethod
    def choose(cls, base: int | None) -> Ports:
        """Fixed defaults; or four in a row from `base`; or, for base 0, any that are free."""
        if base is None:
            return cls()
        return cls(*(_free_ports(4) if base == 0 else range(base, base + 4)))

    def check_free(self, setting: str) -> None:
        """Refuse ports in use, before anything is started.

        Raises:
            Problem: naming the part, the port and `setting`.
        """
        for part, port in asdict(self).items():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except OverflowError:
                    raise Problem(f"{setting}: {port} is not a port number", code=EXIT_USAGE) from None
                except OSError as error:
                    raise Problem(
                        f"port {port}, for the {part}, cannot be used: {error.strerror}",
                        hint=f"stop what uses it (is a stack already up?), or choose other ports with {setting}",
                        code=EXIT_USAGE,
                    ) from None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the services of a running stack answer, host:port."""

    router: str
    registry: str
    scheduler: str = ""
    etcd: str = ""
    model: str = ""
    """The model that `generate` asks for when none is named."""
    pid: int = 0
    """Of `headrace up`."""
    pids: Mapping[str, int] = field(default_factory=dict)
    """Of its parts."""


def own(state_dir: Path) -> IO[bytes]:
    """Make the directory and take it for this process; whoever holds the result open has it.

    Raises:
        Problem: another stack has it, or it cannot be made.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("wb")
    except OSError as error:
        raise Problem(f"--state-dir: cannot write {state_dir}: {error.strerror}", code=EXIT_USAGE) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise Problem(
            f"a stack is already up in {state_dir}",
            hint="`headrace status` shows it; for a second one choose another --state-dir",
            code=EXIT_USAGE,
        ) from None
    return lock


def write_up(state_dir: Path, addresses: Addresses) -> None:
    """Say where the stack is, by one rename."""
    scratch = state_dir / "up.json.new"
    scratch.write_text(json.dumps(asdict(addresses), indent=1), encoding="utf-8")
    scratch.replace(state_dir / "up.json")


def remove_up(state_dir: Path) -> None:
    """The stack is going."""
    (state_dir / "up.json").unlink(missing_ok=True)


def find(state_dir: Path | None = None, environ: Mapping[str, str] | None = None) -> Addresses:
    """Find the stack: HEADRACE_ROUTER and HEADRACE_REGISTRY, else what `headrace up` wrote, else the defaults."""
    environ = os.environ if environ is None else environ
    written: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(((state_dir or state_home(environ)) / "up.json").read_text(encoding="utf-8"))
        if isinstance(read, dict) and _alive(read.get("pid")):
            written = read
    return Addresses(
        router=environ.get("HEADRACE_ROUTER") or str(written.get("router") or f"{HOST}:{ROUTER_PORT}"),
        registry=environ.get("HEADRACE_REGISTRY") or str(written.get("registry") or f"{HOST}:{REGISTRY_PORT}"),
        scheduler=str(written.get("scheduler") or ""),
        model=environ.get("HEADRACE_MODEL") or str(written.get("model") or ""),
        pid=int(str(written.get("pid") or 0)),
    )


def _alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True
