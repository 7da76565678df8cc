"""Structured logs and metrics, the same way in every service.

Logs are events with ids (request, attempt, replica), JSON unless standard error is a terminal. Prompt and
output text never enter a log, a metric or a trace; there is no switch for it.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import prometheus_client
import structlog

from headrace.runtime.settings import SettingsError

_FRAMES_MAX = 20


def configure_logging(service: str, *, level: str = "info", json: bool | None = None) -> None:
    """Set up structlog for this process.

    Args:
        service: bound to every event.
        level: debug, info, warning or error.
        json: force JSON (True) or text (False); None chooses by whether stderr is a terminal.
    """
    as_json = (not sys.stderr.isatty()) if json is None else json
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _name_exception,
            structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def _name_exception(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace `exc_info` by the exception's class and where it was raised.

    Never its text or the frames' variables: either may hold a prompt.
    """
    error = event.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    if isinstance(error, BaseException):
        event["error_type"] = type(error).__qualname__
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_MAX:]
        event["stack"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return event


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
        raise SettingsError(f"setting 'metrics_listen': cannot listen on {address}: {error.strerror}") from None
    return f"{host}:{server.server_address[1]}"
