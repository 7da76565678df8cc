"""Where a client connects, with which channel options, and as whom."""

from __future__ import annotations

import ipaddress
import string
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import grpc

from headrace.rpc.channels import BOUNDED_WINDOW, CLIENT_OPTIONS

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 300.0

# A reader that stops then holds back the service after kilobytes, not megabytes; and gRPC's own retries are off, so
# that the one policy counts every call.
OPTIONS = [*CLIENT_OPTIONS, *BOUNDED_WINDOW]

Metadata = tuple[tuple[str, str], ...]
C = TypeVar("C")
_KEY_CHARACTERS = frozenset(string.ascii_letters + string.digits + string.punctuation)


class Channels(Generic[C]):
    """One channel for each Router of a fleet, opened when they are first needed.

    Args:
        target: host:port; several as a sequence, or with commas between them.
        open_channel: makes a channel to one of them.

    Raises:
        ValueError: there is no target.
    """

    def __init__(self, target: str | Sequence[str], open_channel: Callable[[str], C]) -> None:
        self.names = parse_targets(target)
        self._open_channel = open_channel
        self._channels: list[C] | None = None

    def open(self) -> list[C]:
        """Return the channels, in the order of `names`."""
        if self._channels is None:
            self._channels = [self._open_channel(name) for name in self.names]
        return self._channels

    @property
    def opened(self) -> list[C]:
        """Those that are to be closed."""
        return self._channels or []


def parse_targets(target: str | Sequence[str]) -> list[str]:
    """Split a list of addresses.

    Raises:
        ValueError: there is none.
    """
    parts = target.split(",") if isinstance(target, str) else target
    names = [name.strip() for name in parts if name.strip()]
    if not names:
        raise ValueError("a client needs at least one target")
    return names


def is_loopback(target: str) -> bool:
    """Whether what is sent to a target stays on this machine, as far as its name tells."""
    scheme, _, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("ipv4", "ipv6", "dns"):
        target = rest.rpartition("/")[2]
    host = target.rpartition(":")[0] if not target.endswith("]") else target
    host = host.strip("[]").partition("%")[0]
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_metadata(
    api_key: str | None, targets: Sequence[str], credentials: grpc.ChannelCredentials | None, *, allow_plaintext: bool
) -> Metadata:
    """Build the metadata that says who calls.

    Raises:
        ValueError: the key cannot be sent, or everybody on the way could read it.
    """
    if api_key is None:
        return ()
    if not api_key or not _KEY_CHARACTERS.issuperset(api_key):
        raise ValueError("api_key must be printable ASCII without spaces; is a line end left from a file?")
    if credentials is None and not allow_plaintext:
        far = next((target for target in targets if not is_loopback(target)), None)
        if far is not None:
            raise ValueError(
                f"an API key is not sent to {far} in plain text: give credentials for TLS, or, in a network that you "
                "trust, allow_plaintext_key=True"
            )
    return (("authorization", f"Bearer {api_key}"),)
