"""Each service on its own, as it runs in a fleet, and failed starts that name the setting at fault."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from overload.realtime import is_allowed

from headrace.cli.serve import setting_rows
from support.stack import COMMAND, RunningStack

SERVICES = ["router", "scheduler", "registry"]


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("service", SERVICES)
def test_help_explains_every_setting(service: str) -> None:
    result = command(service, "--help", COLUMNS="200")
    assert result.returncode == 0
    for field, env, _default, _text in setting_rows(service):
        assert f"--{field.replace('_', '-')} " in result.stdout
        assert env in result.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_a_wrong_value_is_named_with_its_source(service: str, tmp_path: Path) -> None:
    config = tmp_path / "h.toml"
    config.write_text(f"# a comment\n[{service}]\ndrain_grace_s = -1\n")
    for arguments, environ, source in (
        (["--drain-grace-s", "-1"], {}, "option --drain-grace-s"),
        ([], {f"HEADRACE_{service.upper()}_DRAIN_GRACE_S": "-1"}, "environment variable HEADRACE_"),
        (["--config", str(config)], {}, f"{config}, line 3"),
    ):
        result = command(service, *arguments, **environ)
        assert result.returncode == 2
        assert result.stderr.startswith(f"headrace {service} setting 'drain_grace_s' ({source}")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("service", ["router", "scheduler"])
def test_a_service_that_is_to_go_first_where_it_may_not_says_what_it_takes(service: str) -> None:
    on_one_core = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", on_one_core, *COMMAND, service, "--realtime", "true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith(f"headrace {service} setting 'realtime': 1 core would be left")


def test_a_setting_that_does_not_exist_is_refused_wherever_it_is(tmp_path: Path) -> None:
    config = tmp_path / "h.toml"
    config.write_text("[router]\nlistne = '127.0.0.1:1'\n")
    assert "listne" in command("router", "--config", str(config)).stderr
    assert "HEADRACE_ROUTER_LISTNE" in command("router", HEADRACE_ROUTER_LISTNE="x").stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--tls-certificate", "{here}", "--tls-key", "/none/tls.key"],
            "'tls_key': cannot read /none/tls.key: No such",
        ),
        (["--tls-client-ca", "{here}"], "'tls_certificate': TLS needs it"),
    ],
)
def test_a_file_of_tls_that_cannot_be_used_is_named(options: list[str], words: str) -> None:
    named = [option.format(here=__file__) for option in options]
    result = command("router", "--listen", "127.0.0.1:0", *named)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_kubernetes_puts_into_the_environment_is_no_setting() -> None:
    # It sets these in every pod for a Service named headrace-router.
    environ = {"HEADRACE_ROUTER_SERVICE_HOST": "10.0.0.1", "HEADRACE_ROUTER_PORT_50051_TCP": "tcp://10.0.0.1:50051"}
    result = command("router", "--log-level", "loud", **environ)
    assert "log_level" in result.stderr


def test_without_etcd_each_says_so() -> None:
    starts = {
        service: subprocess.Popen(
            [*COMMAND, service, "--etcd", "127.0.0.1:9", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
        )
        for service in SERVICES
    }
    for service, process in starts.items():
        with process:
            _, said = process.communicate(timeout=60)
        assert process.returncode == 2
        assert said.splitlines()[-1].startswith(f"headrace {service} setting 'etcd': cannot reach etcd at 127.0.0.1:9")


def test_what_a_service_starts_with_is_kept_from_the_collector() -> None:
    tell = (
        "import atexit, gc, sys; from headrace.cli.main import main;"
        "atexit.register(lambda: print(gc.get_freeze_count())); sys.argv[0] = 'headrace'; main()"
    )
    options = ["router", "--etcd", "127.0.0.1:9", "--listen", "127.0.0.1:0"]
    result = subprocess.run(
        [sys.executable, "-P", "-c", tell, *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert int(result.stdout) > 10_000


@contextmanager
def running(service: str, *arguments: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [*COMMAND, service, "--listen", address, *arguments],
        env={**os.environ, **environ}, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            yield process, address
        finally:
            process.kill()


def wait_serving(address: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            assert process.poll() is None, process.stderr and process.stderr.read()
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                answer = None
            if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.1)
    raise AssertionError("never SERVING")


@pytest.mark.stack
def test_the_services_of_a_fleet_start_one_by_one_and_drain(stack: RunningStack, tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(
        "".join(f'[{service}]\netcd = ["{stack.etcd}"]\netcd_prefix = "/wrong"\n' for service in SERVICES)
    )
    options = ["--config", str(config), "--etcd-prefix", "/fleet", "--name", "one"]
    first = is_allowed()
    with (
        running("registry", *options) as (registry, registry_address),
        running("scheduler", *options, HEADRACE_SCHEDULER_STATE_DIR=str(tmp_path)) as (scheduler, scheduler_address),
        running("router", *options, "--realtime", str(first).lower()) as (router, router_address),
    ):
        wait_serving(registry_address, registry)
        wait_serving(scheduler_address, scheduler)
        wait_serving(router_address, router)
        assert os.sched_getscheduler(router.pid) == (os.SCHED_RR if first else os.SCHED_OTHER)
        assert os.sched_getscheduler(scheduler.pid) == os.SCHED_OTHER, "by default"
        status = subprocess.run(
            [*COMMAND, "status"], env={**os.environ, "HEADRACE_REGISTRY": registry_address},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert status.returncode == 0, status.stdout + status.stderr
        for name in ("routers/one", "schedulers/one", "registries/one"):
            assert name in status.stdout
        for process in (router, scheduler, registry):
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


@pytest.mark.stack
@pytest.mark.parametrize("service", SERVICES)
def test_a_port_in_use_names_the_setting(service: str, stack: RunningStack, tmp_path: Path) -> None:
    options = ["--etcd", stack.etcd, "--etcd-prefix", f"/taken-{service}"]
    environ = {"HEADRACE_SCHEDULER_STATE_DIR": str(tmp_path)} if service == "scheduler" else {}
    result = command(service, "--listen", stack.router, *options, **environ)
    assert result.returncode == 2
    assert f"headrace {service}: setting 'listen': cannot listen on {stack.router}" in result.stderr
