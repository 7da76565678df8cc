"""The event loop of the services: uvloop, with grpc.aio's wake-ups taken in one go.

grpc.aio's completion thread writes one byte to a socket for each completed operation, and its reader takes *one* byte
each time before it handles *all* completions. Sixty-four writes that complete together therefore cost sixty-three
turns of the loop that find nothing to do: about one for each token that a Router sends. The reader is wrapped here, so
that all bytes but the one it expects are gone before it runs.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any

import uvloop

_POLLER = "PollerCompletionQueue"
_BYTES_MAX = 65_536


class ServiceLoop(uvloop.Loop):
    """uvloop, with `add_reader` as told above; every other reader is left alone."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """See asyncio.loop.add_reader."""
        function = callback.func if isinstance(callback, functools.partial) else callback
        owner = type(getattr(function, "__self__", None)).__name__
        if owner == _POLLER and isinstance(fd, socket.socket):
            super().add_reader(fd, _all_but_one_byte, fd, callback, args)
        else:
            super().add_reader(fd, callback, *args)


def _all_but_one_byte(source: socket.socket, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        waiting = len(source.recv(_BYTES_MAX, socket.MSG_PEEK))
        if waiting > 1:
            source.recv(waiting - 1)
    except BlockingIOError:
        pass  # another thread's loop took it; the callback copes as it always did
    callback(*args)
