"""TLS of a server from files: checked before it starts, and read again when they change.

Certificates are renewed while a service runs: each handshake looks whether a file has changed. Files that do not fit
together (one is written before the other) leave what was there in use until they do.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from headrace.runtime.settings import SettingsError
from headrace.runtime.telemetry import get_logger


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca`, only clients with a certificate of it are let in."""

    certificate: str
    key: str
    client_ca: str = ""


def server_credentials(files: TlsFiles, service: str) -> grpc.ServerCredentials | None:
    """Credentials of a server; None where no file is named: no TLS.

    Raises:
        SettingsError: a file is missing, cannot be read, or does not fit; names the setting of `service`.
    """
    if not (files.certificate or files.key or files.client_ca):
        return None
    for setting, value in (("tls_certificate", files.certificate), ("tls_key", files.key)):
        if not value:
            raise SettingsError(f"{service} setting '{setting}': TLS needs it, since another tls_ setting is given")
    configuration = _read(files, service)
    reloading = _Reloading(files, service)
    made: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        configuration, reloading.fetch, require_client_authentication=bool(files.client_ca)
    )
    return made


def _read(files: TlsFiles, service: str) -> Any:
    certificate = _bytes(files.certificate, "tls_certificate", service)
    key = _bytes(files.key, "tls_key", service)
    ca = _bytes(files.client_ca, "tls_client_ca", service) if files.client_ca else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a passphrase would make a service ask for it at the terminal.
        context.load_cert_chain(files.certificate, files.key, password="")
    except (ssl.SSLError, ValueError):
        text = f"{files.key} is no unencrypted PEM key of the certificate in {files.certificate}"
        raise SettingsError(f"{service} setting 'tls_key': {text}") from None
    if ca is not None:
        try:
            context.load_verify_locations(cafile=files.client_ca)
        except ssl.SSLError:
            text = f"{files.client_ca} holds no PEM certificates"
            raise SettingsError(f"{service} setting 'tls_client_ca': {text}") from None
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)


def _bytes(path: str, setting: str, service: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"{service} setting '{setting}': cannot read {path}: {error.strerror}") from None


class _Reloading:
    """Reads the files again once they have changed. `fetch` runs in a thread of gRPC's, one at a time."""

    def __init__(self, files: TlsFiles, service: str) -> None:
        self._files = files
        self._service = service
        self._seen = self._look()

    def fetch(self) -> Any:
        """The new configuration; None: as before."""
        found = self._look()
        if found == self._seen:
            return None
        self._seen = found
        try:
            configuration = _read(self._files, self._service)
        except SettingsError as error:
            get_logger().error("tls_files_not_reloaded", why=str(error), advice="the old ones stay in use")
            return None
        get_logger().info("tls_files_reloaded", certificate=self._files.certificate)
        return configuration

    def _look(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in (self._files.certificate, self._files.key, self._files.client_ca):
            try:
                stat = Path(path).stat() if path else None
            except OSError:
                stat = None
            found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size) if stat is not None else None)
        return found
