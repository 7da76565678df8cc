"""Structured logs and metrics, the same way in every service.

Logs are events with ids (request, attempt, replica), JSON unless standard error is a terminal. Prompt and
output text never enter a log, a metric or a trace; there is no switch for it.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import prometheus_client
import structlog

from headrace.runtime.settings import SettingsError


def configure_logging(service: str, *, level: str = "info", json: bool | None = None) -> None:
    """Set up structlog for this process.

    Args:
        service: bound to every event.
        level: debug, info, warning or error.
        json: force JSON (True) or text (False); None chooses by whether stderr is a terminal.
    """
    as_json = (not sys.stderr.isatty()) if json is None else json
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def get_logger() -> structlog.stdlib.BoundLogger:
    """Return the process's structured logger."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger()
    return logger


def serve_metrics(registry: prometheus_client.CollectorRegistry, address: str) -> str:
    """Serve `registry` over HTTP on host:port (port 0: any) from a daemon thread; returns the address bound.

    Raises:
        SettingsError: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    try:
        server, _thread = prometheus_client.start_http_server(int(port), addr=host, registry=registry)
    except OSError as error:
        raise SettingsError(
            f"setting 'metrics_listen': cannot listen on {address}: {error.strerror}"
        ) from None
    return f"{host}:{server.server_address[1]}"
