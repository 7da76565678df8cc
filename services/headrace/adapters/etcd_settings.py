"""How to reach etcd: the settings that every service shares, and the secrets they point to.

Secrets are named by file, never given as a value: a setting's value may be shown in an error or in --help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import pydantic

from headrace.runtime.settings import Settings, SettingsError

DEFAULT_PREFIX = "/headrace"


def _split(value: Any) -> Any:
    """Accept "a:1,b:2" beside ["a:1", "b:2"], for the environment and the command line."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _check_endpoint(value: str) -> str:
    host, _, port = value.rpartition(":")
    if "/" in value or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("must be host:port, without a scheme; TLS is switched on by 'etcd_ca_file'")
    return value


Endpoint = Annotated[str, pydantic.AfterValidator(_check_endpoint)]


class EtcdSettings(Settings):
    """Settings of a service that uses etcd; subclass it."""

    etcd: Annotated[tuple[Endpoint, ...], pydantic.BeforeValidator(_split)] = pydantic.Field(
        default=("127.0.0.1:2379",), min_length=1, description="Client endpoints of etcd, host:port, of one cluster."
    )
    etcd_prefix: str = pydantic.Field(
        default=DEFAULT_PREFIX,
        pattern=r"^(/[A-Za-z0-9._-]+)+$",
        description="First part of every key; installations that share an etcd have different ones.",
    )
    etcd_ca_file: Path | None = pydantic.Field(
        default=None, description="PEM file of the authority that signed etcd's certificate; switches TLS on."
    )
    etcd_cert_file: Path | None = pydantic.Field(
        default=None, description="PEM file of this client's certificate, where etcd asks for one."
    )
    etcd_key_file: Path | None = pydantic.Field(
        default=None, description="PEM file of the key to 'etcd_cert_file'; keep it private."
    )
    etcd_username: str = pydantic.Field(default="", description="User of etcd, where authentication is enabled.")
    etcd_password_file: Path | None = pydantic.Field(
        default=None, description="File that holds that user's password; keep it private."
    )


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """What a connection needs; secrets are kept out of its repr."""

    endpoints: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)
    """None means no TLS."""
    username: str = ""
    password: str = field(default="", repr=False)


def read_config(settings: EtcdSettings, service: str) -> EtcdConfig:
    """Read the files that the settings name.

    Raises:
        SettingsError: a file cannot be read, or one setting needs another.
    """
    if bool(settings.etcd_cert_file) != bool(settings.etcd_key_file):
        raise SettingsError(f"{service} settings 'etcd_cert_file' and 'etcd_key_file': set both or neither")
    if settings.etcd_cert_file and not settings.etcd_ca_file:
        raise SettingsError(f"{service} setting 'etcd_cert_file': needs 'etcd_ca_file' too")
    if bool(settings.etcd_username) != bool(settings.etcd_password_file):
        raise SettingsError(f"{service} settings 'etcd_username' and 'etcd_password_file': set both or neither")
    credentials = None
    if settings.etcd_ca_file:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(settings.etcd_ca_file, service, "etcd_ca_file"),
            private_key=_read(settings.etcd_key_file, service, "etcd_key_file"),
            certificate_chain=_read(settings.etcd_cert_file, service, "etcd_cert_file"),
        )
    password = _read(settings.etcd_password_file, service, "etcd_password_file")
    return EtcdConfig(
        endpoints=settings.etcd,
        prefix=settings.etcd_prefix,
        credentials=credentials,
        username=settings.etcd_username,
        password=(password or b"").decode("utf-8", errors="replace").rstrip("\r\n"),
    )


def _read(path: Path | None, service: str, setting: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{service} setting '{setting}': cannot read {path}: {error.strerror}") from None
