"""How the asyncio client's frames reach the service, without spoiling what the service says last.

A frame that is written when the call has just ended must not hide how it ended: see headrace.rpc.writing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.calls import acknowledgement
from headrace.rpc.writing import half_close, keep_status


class AsyncOutbox:
    """Frames on their way to the service; one task a call writes them, so that no reader waits for a write."""

    def __init__(self, first: pb.ClientFrame, call: Any) -> None:
        self._frames = deque([first])
        self._acknowledged = 0
        self._is_closed = False
        self._wake: asyncio.Future[None] | None = None
        self._task = asyncio.ensure_future(self._write(keep_status(call)))

    def acknowledge(self, sequence: int) -> None:
        """Confirm all events up to `sequence`; replaces a confirmation that still waits."""
        self._acknowledged = sequence
        self._changed()

    def send(self, frame: pb.ClientFrame) -> None:
        """Send a frame before any acknowledgement that waits."""
        self._frames.append(frame)
        self._changed()

    def close(self) -> None:
        """The stream is over: half-close; nothing follows, not even what waits."""
        self._is_closed = True
        self._changed()

    def stop(self) -> None:
        """The call is over."""
        self._task.cancel()

    def _changed(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _write(self, call: Any) -> None:
        # UsageError and InvalidStateError: grpc.aio's ways to say that the call has ended meanwhile.
        with contextlib.suppress(grpc.RpcError, grpc.aio.InternalError, grpc.aio.UsageError, asyncio.InvalidStateError):
            while (frame := await self._next()) is not None:
                await call.write(frame)  # if the call is over, its reader hears how
            await half_close(call)

    async def _next(self) -> pb.ClientFrame | None:
        while not self._is_closed:
            if self._frames:
                return self._frames.popleft()
            if self._acknowledged:
                sequence, self._acknowledged = self._acknowledged, 0
                return acknowledgement(sequence)
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return None
