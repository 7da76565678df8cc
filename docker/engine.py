"""What builds and runs images here: a Docker engine if one answers, else buildah in chroot isolation. Or nothing.

buildah's files stay below HEADRACE_IMAGES (default: headrace/images in the user's cache). vfs copies whole layers, so a
build takes some GB there while it runs, and nothing is kept for the next one but the base and the images. Public bases
that cannot be pulled are replaced by one that debootstrap makes from the same Debian release.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
DEBOOTSTRAPPED = "localhost/headrace-base:bookworm"
SUITE = "bookworm"
_CLEANED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "var/cache/apt",
    "var/lib/apt/lists",
)
_TRUST = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")


class Engine(Protocol):
    """Builds images."""

    name: str

    def build(self, target: str, tag: str, arguments: Mapping[str, str]) -> None:
        """Build one target of docker/Dockerfile.

        Raises:
            CalledProcessError: it failed; its output is the reason.
        """

    def size_bytes(self, tag: str) -> int:
        """Of an image's files, with those of its base."""


def find_engine() -> Engine | None:
    """The engine of this machine; None: there is none."""
    if _answers("docker", "version", "--format", "{{.Server.Version}}"):
        return Docker()
    if shutil.which("buildah") and os.geteuid() == 0:
        return Buildah()
    return None


class Docker:
    """A Docker engine."""

    name = "docker"

    def build(self, target: str, tag: str, arguments: Mapping[str, str]) -> None:
        """Build one target."""
        with build_secrets() as secrets:
            flags = _build_flags(target, tag, arguments, secrets.flags())
            environ = {**os.environ, "DOCKER_BUILDKIT": "1"}
            subprocess.run(["docker", "build", *flags, str(ROOT)], check=True, env=environ)

    def size_bytes(self, tag: str) -> int:
        """Of an image."""
        command = ["docker", "image", "inspect", "--format", "{{.Size}}", tag]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class Buildah:
    """Debian's buildah without any privilege of namespaces: chroot isolation, the host's network, the vfs driver."""

    name = "buildah"

    def __init__(self, folder: Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = folder or Path(os.environ.get("HEADRACE_IMAGES") or cache / "headrace" / "images")

    def command(self, *arguments: str) -> list[str]:
        """A command line of buildah with its storage."""
        storage = [
            "--root",
            str(self.folder / "root"),
            "--runroot",
            str(self.folder / "run"),
            "--storage-driver",
            "vfs",
        ]
        return ["nice", "-n", "15", "buildah", *storage, *arguments]

    def build(self, target: str, tag: str, arguments: Mapping[str, str]) -> None:
        """Build one target, on the public base where it can be pulled, else on one from debootstrap."""
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = {**arguments, "BASE": arguments.get("BASE") or self._base()}
        with build_secrets() as secrets:
            flags = _build_flags(target, tag, arguments, secrets.flags())
            # A layer for each step would be a copy of everything below it, for each step: 8 GB written for one image.
            engine = ["--isolation", "chroot", "--network", "host", "--layers=false", "--format", "docker"]
            # Its own temporary copies stay beside its storage.
            environ = {**os.environ, "TMPDIR": str(self.folder)}
            subprocess.run(self.command("bud", *engine, *flags, str(ROOT)), check=True, env=environ)

    def size_bytes(self, tag: str) -> int:
        """Of an image: what its root file system holds, hard links once."""
        images = json.loads((self.folder / "root" / "vfs-images" / "images.json").read_text(encoding="utf-8"))
        layer = next(image["layer"] for image in images if f"localhost/{tag}" in image.get("names", ()))
        whole = self.folder / "root" / "vfs" / "dir" / layer  # vfs keeps each layer with all that is below it
        sizes = subprocess.run(["du", "-sxb", str(whole)], capture_output=True, text=True, check=True).stdout
        return int(sizes.split()[0])

    def prune(self) -> None:
        """Remove what is left of a build's stages."""
        subprocess.run(self.command("rmi", "--prune"), stdout=subprocess.DEVNULL, check=True)

    def has(self, tag: str) -> bool:
        """Whether an image is there."""
        command = self.command("inspect", "--type", "image", tag)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _base(self) -> str:
        pinned = pinned_base()
        if self.has(pinned) or _answers(*self.command("pull", "--quiet", pinned), timeout_s=120):
            return pinned
        if not self.has(DEBOOTSTRAPPED):
            print(f"{pinned} cannot be pulled: making a base of Debian {SUITE} with debootstrap", flush=True)
            self._debootstrap()
        return DEBOOTSTRAPPED

    def _debootstrap(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            root = Path(scratch) / "root"
            subprocess.run(["nice", "-n", "15", "debootstrap", "--variant=minbase", SUITE, str(root)], check=True)
            for name in _CLEANED:
                shutil.rmtree(root / name, ignore_errors=True)
            (root / "var/lib/apt/lists/partial").mkdir(parents=True)
            sources = Path("/etc/apt/sources.list.d/debian.sources")
            if sources.is_file():  # this machine's: with the security updates
                shutil.copy(sources, root / "etc/apt/sources.list.d/debian.sources")
                (root / "etc/apt/sources.list").write_text("")
            container = self._output("from", "scratch")
            self._output("add", container, str(root), "/")
            self._output("config", "--cmd", "/bin/bash", container)
            self._output("commit", "--quiet", "--rm", container, DEBOOTSTRAPPED)

    def _output(self, *arguments: str) -> str:
        found = subprocess.run(self.command(*arguments), stdout=subprocess.PIPE, text=True, check=True)
        return found.stdout.strip()


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a build needs of this machine and an image must not keep: how pip and apt reach their sources."""

    files: Mapping[str, Path]

    def flags(self) -> list[str]:
        """For docker build and buildah bud."""
        return [word for name, path in self.files.items() for word in ("--secret", f"id={name},src={path}")]


class build_secrets:  # noqa: N801  used as a function
    """Writes them to a private folder while the block runs."""

    def __enter__(self) -> Secrets:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "apt.conf").write_text(_apt_conf())
        (folder / "pip.conf").write_text(_pip_conf())
        files = {"apt": folder / "apt.conf", "pip": folder / "pip.conf"}
        authorities = next((Path(os.environ[name]) for name in _TRUST if os.environ.get(name)), None)
        if authorities is not None and authorities.is_file():
            files["ca"] = authorities
        else:
            (folder / "pip.conf").write_text(_pip_conf(has_ca=False))
        return Secrets(files)

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def pinned_base() -> str:
    """The base that docker/Dockerfile names."""
    line = next(line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if line.startswith("ARG BASE="))
    return line.partition("=")[2]


def _build_flags(target: str, tag: str, arguments: Mapping[str, str], secrets: Sequence[str]) -> list[str]:
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    return ["--target", target, "--tag", tag, "--file", str(DOCKERFILE), *secrets, *given]


def _apt_conf() -> str:
    """The settings of apt here that decide whether its sources are believed and how they are reached."""
    found = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False) if _has_apt() else None
    wanted = ("Acquire::Check-", "Acquire::http::Proxy", "Acquire::https::Proxy")
    return "".join(f"{line}\n" for line in (found.stdout if found else "").splitlines() if line.startswith(wanted))


def _has_apt() -> bool:
    return shutil.which("apt-config") is not None


def _pip_conf(*, has_ca: bool = True) -> str:
    """Pip's index as it is set here, if it is."""
    lines = ["[global]", "timeout = 120", *(["cert = /run/ca.pem"] if has_ca else [])]
    found = subprocess.run(["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    for line in found.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.rpartition(".")[2] in ("index-url", "extra-index-url") and "file:" not in value:
            lines.append(f"{name.rpartition('.')[2]} = {value.strip().strip(chr(39))}")
    return "\n".join(lines) + "\n"


def _answers(*command: str, timeout_s: float = 20) -> bool:
    if not shutil.which(command[0]):
        return False
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def image_config(engine: Buildah, tag: str) -> dict[str, object]:
    """User, health check, labels and so on of an image that buildah has built."""
    text = subprocess.run(
        engine.command("inspect", "--type", "image", tag), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    found: dict[str, object] = json.loads(text)["Docker"]["config"]
    return found
