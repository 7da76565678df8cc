"""Settings of the Router."""

from __future__ import annotations

import socket

from pydantic import Field

from headrace.adapters.etcd_settings import EtcdSettings


class RouterSettings(EtcdSettings):
    """The [router] table of a config file."""

    listen: str = Field("127.0.0.1:50051", description="host:port for clients; port 0 takes any.")
    name: str = Field(
        default_factory=lambda: socket.gethostname().lower().split(".")[0],
        description="Id of this Router, unique in the fleet.",
    )
    metrics_listen: str = Field("127.0.0.1:0", description="host:port for Prometheus metrics; port 0 takes any.")
    log_level: str = Field("info", description="debug, info, warning or error.", pattern="^(debug|info|warning|error)$")
    requests_max: int = Field(1024, description="Requests that may run at a time; more are refused.", ge=1)
    request_bytes_max: int = Field(
        2 * 1024 * 1024, description="Largest request in bytes; checked before it is parsed.", ge=1024, le=64 * 2**20
    )
    prompt_bytes_max: int = Field(1024 * 1024, description="Largest prompt in bytes of UTF-8.", ge=1)
    output_tokens_max: int = Field(8192, description="Most output tokens that one request may ask for.", ge=1)
    deadline_s_default: float = Field(600.0, description="Deadline of requests that set none, seconds.", gt=0)
    attempts_max: int = Field(3, description="Attempts for one request, all before its first token.", ge=1, le=5)
    credit_window_tokens: int = Field(
        256, description="Tokens the engine may run ahead of what the client's transport has taken.", ge=8
    )
    drain_grace_s: float = Field(30.0, description="Time that running requests get when the Router stops.", ge=0)
