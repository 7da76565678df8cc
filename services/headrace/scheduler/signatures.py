"""From whom an artifact's files are: a signature over them, checked with the `model-signing` package.

    model_signing sign key DIR --private_key KEY --signature DIR/model.sig

Only signatures by an elliptic-curve key that the operator trusts: no certificate authority and no network is asked.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.runtime.settings import SettingsError
from headrace.scheduler.settings import SchedulerSettings

_SIGNATURE_BYTES_MAX = 64 * 1024 * 1024


class BadSignature(Exception):
    """An artifact is not signed as policy asks; the message says why."""


class Signatures:
    """Checks signatures by one key.

    Args:
        key: PEM file of the public key.

    Raises:
        SettingsError: the package is not installed, or the key cannot be used.
    """

    def __init__(self, key: Path) -> None:
        try:
            verifying: Any = importlib.import_module("model_signing.verifying")
        except ImportError:
            raise SettingsError(
                "scheduler setting 'signature_policy': model-signing is not installed: pip install 'headrace[signing]'"
            ) from None
        self._new = verifying.Config
        try:
            self._new().use_elliptic_key_verifier(public_key=key)
            self._key_digest = hashlib.sha256(key.read_bytes()).hexdigest()
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise SettingsError(f"scheduler setting 'signature_key': cannot use {key}: {error}") from None
        self._key = key

    def mark(self, location: str, signature: str) -> tuple[str, str]:
        """Digests of the signature and of the key: the same again, over the same files, is good or bad again.

        Raises:
            BadSignature: the artifact has none, or it cannot be read.
        """
        return hashlib.sha256(_read(location, signature)).hexdigest(), self._key_digest

    def check(self, location: str, signature: str, files: Iterable[str]) -> None:
        """Check that the signature is good and over all of `files`, paths below `location`. Hashes them.

        Raises:
            BadSignature: it is not.
        """
        content = _read(location, signature)
        signed = _signed(content)
        # A verifier learns how to hash from the first signature that it sees: each gets its own.
        verifier = self._new().use_elliptic_key_verifier(public_key=self._key).set_ignore_unsigned_files(True)
        try:
            verifier.verify(Path(location), Path(location, signature))
        except Exception as error:
            said = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            raise BadSignature(f"its signature {signature} is not good: {said}") from None
        if _read(location, signature) != content:
            raise BadSignature(f"its signature {signature} changed while it was checked")
        unsigned = [path for path in files if path not in signed]
        if unsigned:
            raise BadSignature(f"its signature {signature} is not over {', '.join(unsigned[:5])}")


def required_signatures(settings: SchedulerSettings) -> Signatures | None:
    """What the settings ask for.

    Raises:
        SettingsError: they ask for what cannot be done.
    """
    if settings.signature_policy == "off":
        return None
    if settings.signature_key is None:
        raise SettingsError("scheduler setting 'signature_key': must be set when signature_policy is required")
    return Signatures(settings.signature_key.expanduser())


def _read(location: str, signature: str) -> bytes:
    relative = PurePosixPath(signature)
    if not signature:
        raise BadSignature("it has no signature, and signature_policy is required")
    if relative.is_absolute() or ".." in relative.parts:
        raise BadSignature(f"its signature is outside its location: {signature}")
    try:
        with Path(location, *relative.parts).open("rb") as file:
            return file.read(_SIGNATURE_BYTES_MAX)
    except OSError as error:
        raise BadSignature(f"its signature {signature} cannot be read: {error.strerror}") from None


def _signed(content: bytes) -> set[str]:
    """Paths that a signature is over, if it is good."""
    try:
        payload = json.loads(base64.b64decode(json.loads(content)["dsseEnvelope"]["payload"]))
        predicate = payload["predicate"]
        resources = {str(resource["name"]) for resource in predicate["resources"]}
        method = predicate["serialization"]["method"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BadSignature("its signature is of a form that is not known") from None
    if method != "files":  # the package cannot check others while it overlooks files that nobody signed
        raise BadSignature(f"its signature is over {method}, and only whole files are checked: sign it without shards")
    return resources
