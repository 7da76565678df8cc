"""Containers for the containerized test: `buildah run` in chroot isolation, with the host's network and users.

Chroot isolation has no read-only root file system, no limits, and no namespaces of network and processes. So the test
looks at what a container wrote instead, and stops a service by a signal to its process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docker"))

from engine import Buildah, image_config  # noqa: E402

STOP_S = 90.0


class Box:
    """One container made from an image; processes run in it."""

    def __init__(self, engine: Buildah, tag: str, log: Path, volumes: Mapping[Path, str]) -> None:
        self.config: Mapping[str, Any] = image_config(engine, tag)
        self.tag = tag
        self._engine = engine
        self._log = log
        self._volumes = volumes
        self._process: subprocess.Popen[bytes] | None = None
        self.name = self._buildah("from", "--pull-never", tag)
        self._began = time.time()

    def start(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        """Run the image's entry point in the background, with arguments."""
        command = self._run([*self.config["Entrypoint"], *arguments], environ or {})
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def run(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it to its end."""
        return subprocess.run(
            self._run(command, environ or {}), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def check_health(self, environ: Mapping[str, str]) -> bool:
        """Run the image's own HEALTHCHECK, as an engine would."""
        test = self.config["Healthcheck"]["Test"]
        assert test[0] == "CMD"
        return self.run(test[1:], environ).returncode == 0

    def inner(self) -> psutil.Process:
        """The service's own process."""
        assert self._process is not None
        deadline = time.monotonic() + 30
        wanted = Path(self.config["Entrypoint"][0]).name
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.tail()
            for process in psutil.Process(self._process.pid).children(recursive=True):
                line = process.cmdline()
                if any(Path(word).name == wanted for word in line[:2]) and "buildah" not in Path(line[0]).name:
                    return process
            time.sleep(0.1)
        raise AssertionError(f"{self.tag}: its process is not found\n{self.tail()}")

    @property
    def has_ended(self) -> bool:
        """Whether the service's process is gone."""
        return self._process is None or self._process.poll() is not None

    def stop(self) -> int:
        """SIGTERM to the service, and wait; returns its exit code."""
        if self._process is None or self._process.poll() is not None:
            return 0 if self._process is None else int(self._process.returncode)
        self.inner().send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)

    def written(self) -> list[str]:
        """Files of its root file system that were written since it was made, but for those in /tmp and its own home."""
        mounted = Path(self._buildah("mount", self.name))
        found = []
        for folder, folders, files in os.walk(mounted):
            inside = "/" + os.path.relpath(folder, mounted).removeprefix(".")
            if inside.startswith(("/tmp", "/var/lib/headrace", "/proc", "/sys", "/dev", "/run", "/data")):
                folders.clear()
                continue
            for name in files:
                path = Path(folder, name)
                if not path.is_symlink() and path.stat().st_mtime > self._began + 1:
                    found.append(str(Path(inside, name)))
        return found

    def remove(self) -> None:
        """End what runs in it, and delete it."""
        if self._process is not None and self._process.poll() is None:
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.kill()
            self._process.wait(10)
        subprocess.run(self._engine.command("rm", self.name), capture_output=True, check=False)

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _run(self, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        flags = ["run", "--isolation", "chroot", "--network", "host"]
        flags += [word for path, inside in self._volumes.items() for word in ("--volume", f"{path}:{inside}")]
        flags += [word for name, value in environ.items() for word in ("--env", f"{name}={value}")]
        return self._engine.command(*flags, self.name, "--", *command)

    def _buildah(self, *arguments: str) -> str:
        command = self._engine.command(*arguments)
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
