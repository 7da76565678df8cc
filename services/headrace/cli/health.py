"""`headrace health`: one call of grpc.health.v1, for a container's health check."""

from __future__ import annotations

import os
from pathlib import Path

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.cli.problems import EXIT_USAGE, Problem
from headrace.cli.serve import service_settings
from headrace.runtime.settings import Settings, load_settings

SERVICES = ("router", "scheduler", "registry")
_TIMEOUT_S = 3.0
_WILDCARDS = ("0.0.0.0", "[::]", "::")  # noqa: S104  compared with, not bound


@click.command(short_help="Ask one service how it is, for a container's health check.")
@click.argument("target", metavar="SERVICE|HOST:PORT")
@click.option("--service", default="", metavar="NAME", help='Whose health: "readiness", a gRPC service; default: all.')
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="The service's own.")
@click.option("--timeout-s", type=float, default=_TIMEOUT_S, show_default=True, help="For an answer, seconds.")
def health(target: str, service: str, config: Path | None, timeout_s: float) -> None:
    """Ask a service of this machine, or the one at HOST:PORT, for its health by gRPC.

    SERVICE is router, scheduler or registry: the address is then the one that its settings say, from the same
    environment and config file. Exit code 0 when it is SERVING, 1 when it is not or does not answer.
    """
    address = target if ":" in target else local_address(target, config)
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise Problem(f"{address} does not answer: {error.code().name}") from None
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Problem(f"{address} is {word}")
    click.echo(word)


def local_address(service: str, config: Path | None) -> str:
    """Where a service of this machine answers health checks, host:port.

    Raises:
        Problem: there is no such service, or its port is any that is free.
    """
    if service not in SERVICES:
        raise Problem(f"{service!r} is no service and no host:port", hint=", ".join(SERVICES), code=EXIT_USAGE)
    settings = load_settings(service_settings(service), service, file=config, environ=os.environ)
    setting, address = _listens(settings)
    host, _, port = address.rpartition(":")
    if port == "0":
        raise Problem(f"{service} setting '{setting}' names no port: nothing to ask", code=EXIT_USAGE)
    return f"127.0.0.1:{port}" if host in _WILDCARDS else address


def _listens(settings: Settings) -> tuple[str, str]:
    """The setting that names a port without TLS, and its value: with TLS on a Router's, that of its operators."""
    setting = "admin_listen" if getattr(settings, "tls_certificate", "") else "listen"
    return setting, str(getattr(settings, setting))
