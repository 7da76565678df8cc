"""Reads the frames of a streaming call one by one, while its handler does other things.

A read of grpc.aio that is cancelled, by a timeout for one, is lost: a further read says that there are no more frames
at once, the next frame goes nowhere, and buffers are never freed (0.35 kB a read, measured). At a client a timeout
around a read even ends the call. So a read here is a task of its own that nobody cancels; it ends with its frame or
with its call.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from headrace.rpc.requests import Refused


class FrameReader:
    """Reads a call's frames; made for one reader at a time.

    Args:
        call: a server's context, or a client's call: what has `read`.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._reading: asyncio.Task[Any] | None = None

    async def next(self, timeout_s: float | None = None) -> Any:
        """The next frame; None when there is no more: the other side has closed, or the call is over.

        To cancel this, or its timeout, leaves the call and the frame as they are: the next `next` gets it.

        Raises:
            TimeoutError: nothing came within `timeout_s` seconds.
            Failure: the frame could not be read; see headrace.rpc.requests.
            grpc.aio.AioRpcError: at a client: the call ended with a status that is not OK.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._reading.add_done_callback(_retrieve)
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        reading, self._reading = self._reading, None
        try:
            frame = reading.result()
        except asyncio.CancelledError:  # the call was cancelled here; were it this task, it had not come so far
            frame = grpc.aio.EOF
        except grpc.aio.BaseError:  # the call is over
            frame = grpc.aio.EOF
        if frame is grpc.aio.EOF:
            return None
        if isinstance(frame, Refused):
            raise frame.failure
        return frame


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the error of a read, also when nobody waits for it any more."""
    if not task.cancelled():
        task.exception()
