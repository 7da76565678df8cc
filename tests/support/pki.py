"""Certificates for tests, made in milliseconds: an authority, and what it has signed."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[str, str]:
        """Paths of both, written."""
        folder.mkdir(exist_ok=True)
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, data in zip(paths, (self.certificate, self.key), strict=True):
            path.write_bytes(data)
        return str(paths[0]), str(paths[1])


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._certificate = _build(self._name, self._name, self._key, self._key, (), is_authority=True)

    @property
    def certificate(self) -> bytes:
        """Its own, as PEM."""
        return self._certificate.public_bytes(_PEM)

    def sign(self, common_name: str, *, uris: tuple[str, ...] = (), dns: tuple[str, ...] = ()) -> Pair:
        """A new key and a certificate for it."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(name) for name in dns]
        if common_name == "localhost":
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        made = _build(_name(common_name), self._name, key, self._key, names)
        plain = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return Pair(made.public_bytes(_PEM), plain)

    def client(self, pair: Pair | None) -> grpc.ChannelCredentials:
        """Credentials of a client that trusts this authority, and shows `pair` if it has one."""
        if pair is None:
            return grpc.ssl_channel_credentials(self.certificate)
        return grpc.ssl_channel_credentials(self.certificate, pair.key, pair.certificate)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _build(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName] | tuple[()],
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
    return builder.sign(signer, hashes.SHA256())
