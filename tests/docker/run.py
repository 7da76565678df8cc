"""The containerized test: the images that `make images` built, as a stack, answer a client from a real model.

    make test-containers         or: python tests/docker/run.py [--keep]

With a Docker engine: docker/compose.yaml, CPU profile (not tried by us: no Docker engine was at hand). Else, as root
with buildah: the same images in chroot isolation on this machine's loopback. With neither it says so and tests nothing.
etcd's authentication is on in both. Its last line counts what passed; exit code 1: something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in ("docker", "tests/docker", "services", "control_plane", "protos"):
    sys.path.insert(0, str(ROOT / folder))

from boxes import Box  # noqa: E402
from engine import Buildah, find_engine  # noqa: E402

from headrace.cli.weights import DEFAULT_SHA256, default_model  # noqa: E402

MODEL = "gemma"
PROMPT = "The water left the river"
START_S = 60.0
WORKER_S = 240.0
UID = 10001
IMAGES = ("etcd-test", "registry", "worker-cpu", "router")


class Checks:
    """Runs checks one after the other, and counts."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def that(self, title: str, check: Callable[[], str | None]) -> None:
        """Run one; it returns what is worth telling, and raises what is wrong."""
        began = time.monotonic()
        try:
            told = check() or ""
        except Exception as error:
            self.failed += 1
            print(f"FAILED {title}: {error}", flush=True)
            raise
        self.passed += 1
        print(f"ok     {title} ({time.monotonic() - began:.1f} s){': ' if told else ''}{told}", flush=True)


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what()}")
        time.sleep(0.5)


class Stack:
    """etcd, Registry, Scheduler and Router, each in a container of its own."""

    def __init__(self, engine: Buildah, folder: Path, version: str) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("etcd", "peer", "registry", "scheduler", "router")}
        self.boxes: dict[str, Box] = {}
        model = folder / "models" / "gemma.gguf"
        model.parent.mkdir(mode=0o755)
        shutil.copy(default_model(print), model)
        model.chmod(0o644)
        self._make = lambda image, volumes: Box(engine, f"headrace/{image}:{version}", folder / f"{image}.log", volumes)
        secrets = folder / "secrets"
        secrets.mkdir(mode=0o755)
        for name in ("etcd-root-password", "etcd-password", "admin-secret"):
            (secrets / name).write_text(os.urandom(16).hex())
            (secrets / name).chmod(0o444)
        self._volumes = {secrets: "/run/secrets:ro", folder / "models": "/models:ro"}

    def environ(self, service: str) -> dict[str, str]:
        """What compose.yaml gives a service, on ports of this test."""
        prefix = f"HEADRACE_{service.upper()}_"
        values = {
            "ETCD": f"127.0.0.1:{self.ports['etcd']}", "ETCD_USERNAME": "headrace",
            "ETCD_PASSWORD_FILE": "/run/secrets/etcd-password",
            "LISTEN": f"127.0.0.1:{self.ports[service]}", "METRICS_LISTEN": "127.0.0.1:0", "NAME": "boxed",
        }  # fmt: skip
        if service == "router":
            values["ADMIN_SECRET_FILE"] = "/run/secrets/admin-secret"
        return {prefix + name: value for name, value in values.items()}

    def box(self, image: str) -> Box:
        """The container of an image; made when it is first asked for."""
        if image not in self.boxes:
            self.boxes[image] = self._make(image, self._volumes)
        return self.boxes[image]

    def start_etcd(self) -> str:
        """Start etcd and switch its authentication on, with what ships in the Registry's image."""
        client, peer = (f"http://127.0.0.1:{self.ports[name]}" for name in ("etcd", "peer"))
        self.box("etcd-test").start(
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        )  # fmt: skip
        done = self.box("registry").run(
            ["python", "/opt/headrace/etcd_auth.py", f"127.0.0.1:{self.ports['etcd']}",
             "--root-password-file", "/run/secrets/etcd-root-password",
             "--password-file", "/run/secrets/etcd-password"]
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + self.box("etcd-test").tail()
        return done.stdout.strip()

    def start(self, image: str, service: str) -> str:
        """Start a service and wait until its image's health check says that it is well."""
        box, environ = self.box(image), self.environ(service)
        box.start(environ=environ)

        def healthy() -> bool:
            assert not box.has_ended, box.tail()
            return box.check_health(environ)

        until(healthy, START_S, box.tail)
        process = box.inner()
        assert set(process.uids()) == {UID}, f"it runs as {process.uids()}"
        return f"healthy by `{' '.join(box.config['Healthcheck']['Test'][1:])}`, user {process.uids().real}"

    def register(self) -> str:
        """`headrace model add` from the Registry's image; waits until a worker serves it."""
        command = ["headrace", "model", "add", "/models/gemma.gguf", "--name", MODEL, "--slots", "4"]
        command += ["--context", "1024", "--sha256", DEFAULT_SHA256, "--timeout", str(WORKER_S)]
        environ = {"HEADRACE_REGISTRY": f"127.0.0.1:{self.ports['registry']}"}
        done = self.box("registry").run(command, environ, WORKER_S + 30)
        assert done.returncode == 0, done.stdout + done.stderr + self.box("worker-cpu").tail()
        return done.stdout.strip().splitlines()[-1]

    def stream(self) -> str:
        """A client in the Router's image; checks the numbered events and their one end."""
        command = [
            "headrace",
            "generate",
            PROMPT,
            "--model",
            MODEL,
            "--max-tokens",
            "32",
            "--temperature",
            "0",
            "--json",
        ]
        done = self.box("router").run(command, {"HEADRACE_ROUTER": f"127.0.0.1:{self.ports['router']}"})
        assert done.returncode == 0, done.stdout + done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return check_events(events)

    def ready(self) -> str:
        """The Scheduler's three signals."""
        told = []
        for signal in ("startup", "liveness", "readiness"):
            command = ["headrace", "health", "scheduler", "--service", signal]
            done = self.box("worker-cpu").run(command, self.environ("scheduler"))
            assert done.returncode == 0, f"{signal}: {done.stderr}"
            told.append(f"{signal} {done.stdout.strip()}")
        return ", ".join(told)

    def drain(self) -> str:
        """SIGTERM to each service in order; all end with 0."""
        codes = {image: self.box(image).stop() for image in ("router", "worker-cpu", "registry")}
        assert set(codes.values()) == {0}, codes
        return str(codes)

    def unwritten(self) -> str:
        """A read-only root file system would have done: nothing was written but in /tmp and in a service's own home."""
        for image in ("router", "worker-cpu", "registry"):
            found = self.box(image).written()
            assert not found, f"{image} wrote {found[:5]}"
        return "router, worker-cpu, registry"


def check_events(events: list[dict[str, Any]]) -> str:
    """What `headrace generate --json` prints: numbered without a gap, from `accepted` to the one end, text between."""
    kinds = [event["event"] for event in events]
    assert kinds[0] == "accepted", kinds
    assert kinds[-1] == "terminal", kinds
    assert kinds.count("terminal") == 1, kinds
    end = events[-1]
    assert (end["finish_reason"], end["failure"]) == ("length", None), end
    assert end["usage"]["generated_tokens"] == 32, end
    numbers = [int(event["sequence"]) for event in events]
    assert numbers == list(range(1, len(events) + 1)), numbers
    text = "".join(event["text"] for event in events if event["event"] == "delta")
    assert text.strip(), "no text"
    told = f"{end['finish_reason']}, {end['usage']['generated_tokens']} tokens"
    return f"{len(events)} events, 1 to {numbers[-1]}, the last one terminal ({told}): {text[:70]!r}"


@contextmanager
def scratch(keep: bool) -> Iterator[Path]:
    """A folder that other users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-containers-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def with_buildah(engine: Buildah, checks: Checks, version: str, keep: bool) -> None:
    """The test without a Docker engine."""
    with scratch(keep) as folder, ExitStack() as stack:
        running = Stack(engine, folder, version)
        stack.callback(lambda: [box.remove() for box in running.boxes.values()])
        checks.that("etcd starts and authentication is switched on", running.start_etcd)
        checks.that("registry", lambda: running.start("registry", "registry"))
        checks.that("worker-cpu", lambda: running.start("worker-cpu", "scheduler"))
        checks.that("router", lambda: running.start("router", "router"))
        checks.that("a model file becomes a revision that a worker serves", running.register)
        checks.that("the three signals of the Scheduler", running.ready)
        checks.that("a client streams an answer from the real model", running.stream)
        checks.that("each drains on SIGTERM and ends with 0", running.drain)
        checks.that("nothing was written outside of /tmp and the home", running.unwritten)


def with_compose(checks: Checks, version: str, keep: bool) -> None:
    """The test with a Docker engine."""
    with scratch(keep) as folder:
        (folder / "models").mkdir(mode=0o755)
        model = folder / "models" / "gemma.gguf"
        shutil.copy(default_model(print), model)
        model.chmod(0o644)
        for name in ("etcd-root-password", "etcd-password"):
            (folder / name).write_text(os.urandom(12).hex())
            (folder / name).chmod(0o444)
        environ = {
            **os.environ, "MODELS": str(model.parent), "HEADRACE_SECRETS": str(folder), "HEADRACE_VERSION": version,
        }  # fmt: skip
        compose = [
            "docker",
            "compose",
            "-p",
            "headrace-test",
            "-f",
            str(ROOT / "docker/compose.yaml"),
            "--profile",
            "cpu",
        ]

        def run(*arguments: str) -> str:
            done = subprocess.run([*compose, *arguments], env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            return done.stdout.strip()

        def stream() -> str:
            command = ["generate", PROMPT, "--model", MODEL, "--max-tokens", "32", "--temperature", "0", "--json"]
            text = run("exec", "-T", "-e", "HEADRACE_ROUTER=127.0.0.1:50051", "router", "headrace", *command)
            return check_events([json.loads(line) for line in text.splitlines() if line.startswith("{")])

        add = ["headrace", "model", "add", str(model), "--name", MODEL, "--slots", "4", "--sha256", DEFAULT_SHA256]
        volume = ["--volume", f"{model.parent}:{model.parent}:ro", "-e", "HEADRACE_REGISTRY=registry:50052"]
        try:
            checks.that("all containers are healthy", lambda: run("up", "--detach", "--wait")[-200:])
            checks.that(
                "a model file becomes a revision that a worker serves",
                lambda: run("run", "--rm", "-T", *volume, "--entrypoint", add[0], "registry", *add[1:]),
            )
            checks.that("a client streams an answer from the real model", stream)
            checks.that("each drains on SIGTERM", lambda: run("stop", "router", "worker-cpu", "registry")[-200:])
        finally:
            if not keep:
                run("down", "--volumes")


def main() -> int:
    """Build what is missing, then test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep logs and data, and say where they are")
    given = parser.parse_args()
    engine = find_engine()
    if engine is None:
        print("test-containers: nothing was tested: no Docker engine answers, and there is no buildah for root")
        print("0 passed, 0 failed, 1 skipped")
        return 0
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    wanted = IMAGES if isinstance(engine, Buildah) else IMAGES[1:]
    missing = [
        name for name in wanted if not isinstance(engine, Buildah) or not engine.has(f"headrace/{name}:{version}")
    ]
    if missing:
        subprocess.run([sys.executable, str(ROOT / "docker/build.py"), *missing], check=True)
    checks = Checks()
    print(f"test-containers: with {engine.name}", flush=True)
    try:
        if isinstance(engine, Buildah):
            with_buildah(engine, checks, version, given.keep)
        else:
            with_compose(checks, version, given.keep)
    except Exception as error:
        print(f"test-containers: ended by {type(error).__name__}", flush=True)
    print(f"{checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed or not checks.passed else 0


if __name__ == "__main__":
    sys.exit(main())
