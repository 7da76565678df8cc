"""`headrace health`: what a container's health check is told, by a real health service over loopback."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.cli.health import local_address
from headrace.cli.main import run
from headrace.cli.problems import Problem

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def service() -> Iterator[tuple[health.HealthServicer, str]]:
    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_it_says_and_exits_as_the_service_is(
    service: tuple[health.HealthServicer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, address = service
    servicer.set("", SERVING)
    servicer.set("readiness", NOT_SERVING)
    assert run(["health", address]) == 0
    assert capsys.readouterr().out == "SERVING\n"
    assert run(["health", address, "--service", "readiness"]) == 1
    assert "NOT_SERVING" in capsys.readouterr().err
    assert run(["health", address, "--service", "nobody"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_nobody_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["health", "127.0.0.1:9", "--timeout-s", "0.3"]) == 1
    assert "127.0.0.1:9 does not answer" in capsys.readouterr().err


def test_a_service_is_asked_where_its_settings_say(
    service: tuple[health.HealthServicer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = service
    servicer.set("liveness", SERVING)
    monkeypatch.setenv("HEADRACE_SCHEDULER_LISTEN", f"0.0.0.0:{address.rpartition(':')[2]}")
    assert run(["health", "scheduler", "--service", "liveness"]) == 0


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "127.0.0.1:50051"),
        ({"LISTEN": "[::]:7"}, "127.0.0.1:7"),
        ({"LISTEN": "router:7"}, "router:7"),
        (
            {"TLS_CERTIFICATE": "/c.pem", "ADMIN_LISTEN": "10.0.0.3:8", "ADMIN_SECRET_FILE": "/s"},
            "10.0.0.3:8",
        ),
    ],
)
def test_addresses(environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(f"HEADRACE_ROUTER_{name}", value)
    assert local_address("router", None) == expected


def test_a_config_file_counts(tmp_path: Path) -> None:
    (tmp_path / "h.toml").write_text('[registry]\nlisten = "127.0.0.1:77"\n')
    assert local_address("registry", tmp_path / "h.toml") == "127.0.0.1:77"


@pytest.mark.parametrize(
    ("name", "environ", "said"),
    [("routers", {}, "is no service"), ("router", {"HEADRACE_ROUTER_TLS_CERTIFICATE": "/c.pem"}, "'admin_listen'")],
)
def test_what_cannot_be_asked_is_said(
    name: str, environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(Problem, match=said):
        local_address(name, None)
