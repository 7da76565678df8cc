"""As whom a command calls the Router, and how: the key, TLS, and the client that is made of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc

from headrace.cli.problems import EXIT_USAGE, Problem
from headrace.client import Client

KEY = "HEADRACE_API_KEY"
_NAMES = ("api_key_file", "allow_plaintext_key", "tls", "tls_ca", "tls_cert", "tls_key")
_FILE = click.Path(path_type=Path, dir_okay=False)
F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--api-key-file", type=_FILE, metavar="FILE", envvar="HEADRACE_API_KEY_FILE",
                 help=f"Holds the API key that says who calls. Default: {KEY} holds the key itself."),
    click.option("--allow-plaintext-key", is_flag=True, help="Send the key to another machine without TLS."),
    click.option("--tls", is_flag=True, envvar="HEADRACE_TLS",
                 help="Connect with TLS, trusting the public CAs that gRPC knows."),
    click.option("--tls-ca", type=_FILE, metavar="FILE", envvar="HEADRACE_TLS_CA",
                 help="Connect with TLS, trusting these CAs (PEM)."),
    click.option("--tls-cert", type=_FILE, metavar="FILE", envvar="HEADRACE_TLS_CERT",
                 help="Connect with TLS, as this certificate (PEM); needs --tls-key."),
    click.option("--tls-key", type=_FILE, metavar="FILE", envvar="HEADRACE_TLS_KEY", help="Its private key (PEM)."),
)  # fmt: skip


def caller_options(command: F) -> F:
    """Add the options; `take_caller` takes their values out of the command's."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_caller(options: dict[str, Any]) -> dict[str, Any]:
    """Take the values of `caller_options` out of those of a command."""
    return {name: options.pop(name) for name in _NAMES}


def connect(router: str, caller: Mapping[str, Any]) -> Client:
    """Make the client.

    Args:
        router: its address, or several with commas between them.
        caller: of `take_caller`.

    Raises:
        Problem: a file cannot be read, or the key cannot be sent there.
    """
    key = os.environ.get(KEY, "")  # there is no option for it: everybody on the machine can read a command line
    if caller["api_key_file"] is not None:
        key = _read("--api-key-file", caller["api_key_file"]).decode("utf-8", "replace").strip()
    try:
        return Client(
            router,
            credentials=_credentials(caller),
            api_key=key or None,
            allow_plaintext_key=caller["allow_plaintext_key"],
        )
    except ValueError as error:
        hint = "connect with --tls or --tls-ca FILE; in a network that you trust: --allow-plaintext-key"
        sentence, is_plaintext, _ = str(error).partition(" in plain text")
        raise Problem(f"{sentence}{is_plaintext}", hint=hint if is_plaintext else "", code=EXIT_USAGE) from None


def _credentials(caller: Mapping[str, Any]) -> grpc.ChannelCredentials | None:
    ca, certificate, key = (caller[name] for name in ("tls_ca", "tls_cert", "tls_key"))
    if (certificate is None) != (key is None):
        raise Problem("--tls-cert and --tls-key need each other", code=EXIT_USAGE)
    if not (caller["tls"] or ca or certificate):
        return None
    made: grpc.ChannelCredentials = grpc.ssl_channel_credentials(
        root_certificates=_read("--tls-ca", ca) if ca else None,
        private_key=_read("--tls-key", key) if key else None,
        certificate_chain=_read("--tls-cert", certificate) if certificate else None,
    )
    return made


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Problem(f"{option}: cannot read {path}: {error.strerror}", code=EXIT_USAGE) from None
