"""Where a client connects, and with which channel options."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from headrace.rpc.channels import BOUNDED_WINDOW, CLIENT_OPTIONS

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 300.0

# A reader that stops then holds back the service after kilobytes, not megabytes; and gRPC's own retries are off, so
# that the one policy counts every call.
OPTIONS = [*CLIENT_OPTIONS, *BOUNDED_WINDOW]

C = TypeVar("C")


class Ring(Generic[C]):
    """One channel for each target; requests start at one after the other, and further calls move on.

    Args:
        targets: host:port, one or several Routers of the same fleet.
        open_channel: makes a channel to one of them.

    Raises:
        ValueError: there is no target.
    """

    def __init__(self, targets: str | Sequence[str], open_channel: Callable[[str], C]) -> None:
        names = [targets] if isinstance(targets, str) else list(targets)
        if not names:
            raise ValueError("a client needs at least one target")
        self.channels = [open_channel(name) for name in names]
        # Chance, so that many clients that start together do not all begin at the first.
        self._starts = itertools.count(random.randrange(len(names)))  # noqa: S311

    def turn(self) -> Callable[[], C]:
        """Begin a request: each call of the result is the channel for its next gRPC call."""
        start = next(self._starts)
        positions = itertools.count(start)
        return lambda: self.channels[next(positions) % len(self.channels)]
