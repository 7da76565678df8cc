"""The fleet's secret in a file, and what it is for: to prove calls, and to let only proven ones in."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from headrace.control import proof
from headrace.control.errors import Failure, Reason
from headrace.rpc.calls import Context
from headrace.rpc.guard import Check
from headrace.runtime.settings import SettingsError
from headrace.runtime.telemetry import get_logger

_OPEN = "/grpc.health."
"""Probes have no secret, and health tells none."""

Refused = Callable[[str, str], None]
"""Called with (method's name, outcome) of a call that is not let in."""


class Secret:
    """A secret's file; it is read again when it has changed. What cannot be used leaves the old one in use.

    Args:
        path: the file.
        setting: who named it, for the error text.

    Raises:
        SettingsError: it cannot be read, or holds no secret.
    """

    def __init__(self, path: str, setting: str) -> None:
        self._path = Path(path)
        self._setting = setting
        self._seen = self._look()
        self._secrets = self._read()

    def metadata(self, method: str) -> tuple[tuple[str, str], ...]:
        """What proves a call of `method`, "/package.Service/Method"."""
        return ((proof.HEADER, proof.prove(self._current()[0], method, _now_ms())),)

    def checks(self, refused: Refused) -> Callable[[str], Check | None]:
        """For Guard: lets in only calls that are proven, and those of health; `refused` is told of others."""

        def check_of(method: str) -> Check | None:
            if method.startswith(_OPEN):
                return None

            def check(context: Context) -> None:
                sent = [value for name, value in context.invocation_metadata() or () if name == proof.HEADER]
                fault = proof.fault(sent, self._current(), method, _now_ms())
                if fault:
                    refused(method.rpartition("/")[2], Reason.UNAUTHENTICATED.value)
                    raise Failure(Reason.UNAUTHENTICATED, fault)

            return check

        return check_of

    def _current(self) -> tuple[str, ...]:
        found = self._look()
        if found != self._seen:
            self._seen = found
            try:
                self._secrets = self._read()
            except SettingsError as error:
                get_logger().error("secret_not_reloaded", why=str(error), advice="the old one stays in use")
            else:
                get_logger().info("secret_reloaded", file=str(self._path), count=len(self._secrets))
        return self._secrets

    def _look(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def _read(self) -> tuple[str, ...]:
        try:
            return proof.secrets_in(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"{self._setting}: cannot read {self._path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"{self._setting}: {self._path} is not UTF-8 text") from None
        except proof.BadSecret as error:
            raise SettingsError(f"{self._setting}: {self._path} holds no secret: {error}") from None


def _now_ms() -> int:
    return round(time.time() * 1000)
