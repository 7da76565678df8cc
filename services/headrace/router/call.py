"""One call that reads a request: writes its events, and hears what its caller says meanwhile.

The handler's task is the only one that writes. It may be held up in a write by a reader that has stopped; `break_off`
then cancels the task, and the call ends with a status of ours instead of its last events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.credit import Reader
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.event_log import EventsExpired, UnknownSequence
from headrace.router.metrics import RouterMetrics
from headrace.router.session import Session
from headrace.rpc.requests import Refused
from headrace.rpc.server import Context
from headrace.runtime.tasks import cancel_and_wait

Frames = AsyncIterator["pb.ClientFrame | Refused"]


class Call:
    """The reading end of one call; made in the handler's task."""

    def __init__(self, context: Context, metrics: RouterMetrics) -> None:
        self._context = context
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._task = asyncio.current_task()
        self._broken: Failure | None = None

    def wake(self) -> None:
        """See SessionReader."""
        self._wake.set()

    def break_off(self, failure: Failure) -> None:
        """See SessionReader."""
        if self._broken is None and self._task is not None:
            self._broken = failure
            self._task.cancel()

    async def serve(self, session: Session, *, after_sequence: int = 0, frames: Frames | None = None) -> None:
        """Write events, those behind `after_sequence` first, until the last one.

        Raises:
            Failure: how the request ended, unless well; or why this call does.
        """
        kind = Reader.IMPLICIT if frames is None else Reader.EXPLICIT
        try:
            missed = session.attach(self, kind, after_sequence)
        except EventsExpired as error:
            raise Failure(
                Reason.EVENTS_EXPIRED,
                f"Events behind {after_sequence} are no longer kept; the oldest one is {error.first}.",
                field="after_sequence",
                metadata={"firstSequence": str(error.first)},
            ) from None
        except UnknownSequence as error:
            violation = Violation("after_sequence", f"is behind the newest event, {error.last}")
            raise InvalidRequest((violation,)) from None
        hearing: asyncio.Task[None] | None = None
        try:
            if frames is not None:
                hearing = asyncio.create_task(self._hear(session, frames), name="frames")
            for event in missed:
                await self._context.write(event.data)
                session.wrote(event.sequence, event.tokens)
            await self._write_on(session)
        except asyncio.CancelledError:
            if self._broken is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._broken from None
        finally:
            session.detach(self)
            if hearing is not None:
                await cancel_and_wait(hearing)
        failure = session.failure()
        if failure is not None:
            raise failure

    async def _write_on(self, session: Session) -> None:
        """As the module says; on the hot path."""
        write, take, wrote, metrics, wake = self._context.write, session.take, session.wrote, self._metrics, self._wake
        while True:
            while (event := take()) is not None:
                await write(event.data)
                metrics.writes += 1
                wrote(event.sequence, event.tokens)
            if session.machine.is_told:
                return
            await wake.wait()
            wake.clear()
            metrics.wakeups += 1

    async def _hear(self, session: Session, frames: Frames) -> None:
        """Act on the caller's frames until it has no more to say."""
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):  # the call is over: its writer knows better
            async for frame in frames:
                if isinstance(frame, Refused):
                    self.break_off(frame.failure)
                    return
                kind = frame.WhichOneof("frame")
                if kind == "acknowledge":
                    self._metrics.acknowledgements += 1
                    session.acknowledge(frame.acknowledge.sequence)
                elif kind == "cancel":
                    session.cancel()
                else:
                    self.break_off(InvalidRequest((_unexpected(kind),)))
                    return


async def first_frame(frames: Frames, timeout_s: float) -> pb.ClientFrame:
    """The frame that opens an interactive call.

    Raises:
        Failure: it did not come in time, or is none that opens one.
    """
    try:
        async with asyncio.timeout(timeout_s):
            frame: Any = await anext(frames, None)
    except TimeoutError:
        raise Failure(Reason.INVALID_REQUEST, f"No frame came within {timeout_s:g} s.", field="frame") from None
    if isinstance(frame, Refused):
        raise frame.failure
    if frame is None or frame.WhichOneof("frame") not in ("start", "resume"):
        raise InvalidRequest((Violation("frame", "the first one must be start or resume"),))
    assert isinstance(frame, pb.ClientFrame)
    return frame


def _unexpected(kind: str | None) -> Violation:
    return Violation(kind or "frame", "only acknowledge and cancel may follow the first frame")
