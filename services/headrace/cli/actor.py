"""Who makes a change: the name of the user at the operating system goes with every call to the Registry.

It is what the audit record shows. It is the caller's own claim, and no authentication.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc

from headrace.registry.audit import ACTOR


def user_name() -> str:
    """The user that runs this command; with sudo, who did so."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    caller = os.environ.get("SUDO_USER", "")
    return f"{caller} as {name}" if caller and caller != name else name


def with_actor(channel: grpc.Channel) -> grpc.Channel:
    """The same channel; its calls say who makes them."""
    return grpc.intercept_channel(channel, _Actor())


class _Details(NamedTuple):
    """What gRPC wants of grpc.ClientCallDetails."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Actor(grpc.UnaryUnaryClientInterceptor):
    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        old = client_call_details
        metadata = [*(old.metadata or ()), (ACTOR, quote(user_name()))]
        new = _Details(old.method, old.timeout, metadata, old.credentials, old.wait_for_ready, old.compression)
        return continuation(new, request)
