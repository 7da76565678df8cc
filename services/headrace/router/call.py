"""One call that reads a request: writes its events, and hears what its caller says meanwhile.

The handler's task is the only one that writes. It may be held up in a write by a reader that has stopped; `break_off`
then cancels the task, and the call ends with a status of ours instead of its last events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.credit import Reader
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.event_log import EventsExpired, LoggedEvent, UnknownSequence
from headrace.router.metrics import RouterMetrics
from headrace.router.session import Session
from headrace.router.session_parts import SessionReader
from headrace.rpc import status
from headrace.rpc.calls import Context, is_call_over
from headrace.rpc.reading import FrameReader
from headrace.rpc.requests import Refused

_HEARING: set[asyncio.Task[None]] = set()
"""Tasks that read frames; each ends with its call."""


class Heard(Protocol):
    """What frames are about: a request, here or elsewhere."""

    def acknowledge(self, reader: SessionReader, sequence: int) -> None:
        """The caller has read up to `sequence`."""

    def cancel(self) -> None:
        """The caller asks for the end."""


class Call:
    """The reading end of one call; made in the handler's task."""

    def __init__(self, context: Context, metrics: RouterMetrics) -> None:
        self._context = context
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._task = asyncio.current_task()
        self._broken: Failure | None = None
        self.is_over = False
        """Set at the call's end: nothing of its caller counts any more."""

    def wake(self) -> None:
        """See SessionReader."""
        self._wake.set()

    def break_off(self, failure: Failure) -> None:
        """See SessionReader."""
        if self._broken is None and self._task is not None:
            self._broken = failure
            self._task.cancel()

    async def serve(self, session: Session, *, after_sequence: int = 0, interactive: bool = False) -> None:
        """Write events, those behind `after_sequence` first, until the last one; `interactive`: and hear frames.

        Raises:
            Failure: how the request ended, unless well; or why this call does.
        """
        kind = Reader.EXPLICIT if interactive else Reader.IMPLICIT
        missed = missing(lambda sequence: session.attach(self, kind, sequence), after_sequence)
        try:
            if interactive:
                self.begin_to_hear(session)
            for event in missed:
                session.writing()
                await self._context.write(event.data)
                session.wrote(event.sequence, event.tokens)
            await self._write_on(session)
        except asyncio.CancelledError:
            if self._broken is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._broken from None
        finally:
            self.is_over = True
            session.detach(self)
        failure = session.failure()
        if failure is not None:
            raise failure

    async def _write_on(self, session: Session) -> None:
        """As the module says; on the hot path."""
        context, take, wrote, metrics, wake = self._context, session.take, session.wrote, self._metrics, self._wake
        machine = session.machine
        while True:
            while (event := take()) is not None:
                await context.write(event.data)
                metrics.writes += 1
                wrote(event.sequence, event.tokens)
                if machine.is_quiet:
                    break
            if machine.is_told:
                return
            await wake.wait()
            wake.clear()
            metrics.wakeups += 1

    def begin_to_hear(self, heard: Heard) -> None:
        """Have the caller's frames acted upon, until `is_over`."""
        hearing = asyncio.create_task(self._hear(heard), name="frames")
        _HEARING.add(hearing)
        hearing.add_done_callback(_HEARING.discard)

    async def _hear(self, heard: Heard) -> None:
        """Act on the caller's frames until it has no more to say.

        Never cancelled: a read that is cut short leaks. It ends with the call.
        """
        try:
            while not self.is_over:
                frame = await self._context.read()
                if frame is grpc.aio.EOF or self.is_over:
                    return
                self._take(heard, frame)
        except (grpc.aio.UsageError, asyncio.CancelledError):
            return
        except Exception as error:
            if not is_call_over(error):
                self.break_off(status.unmapped(error, where="frames"))

    def _take(self, heard: Heard, frame: pb.ClientFrame | Refused) -> None:
        kind = None if isinstance(frame, Refused) else frame.WhichOneof("frame")
        if isinstance(frame, Refused):
            self.break_off(frame.failure)
        elif kind == "acknowledge":
            self._metrics.acknowledgements += 1
            heard.acknowledge(self, frame.acknowledge.sequence)
        elif kind == "cancel":
            heard.cancel()
        else:
            self.break_off(InvalidRequest((_unexpected(kind),)))


def missing(read: Callable[[int], list[LoggedEvent]], after_sequence: int) -> list[LoggedEvent]:
    """The events behind `after_sequence`, as `read` has them.

    Raises:
        Failure: EVENTS_EXPIRED, or INVALID_REQUEST where that event was never written.
    """
    try:
        return read(after_sequence)
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


async def first_frame(context: Context, timeout_s: float) -> pb.ClientFrame:
    """The frame that opens an interactive call.

    Raises:
        Failure: it did not come in time, or is none that opens one.
    """
    try:
        frame: pb.ClientFrame | None = await FrameReader(context).next(timeout_s)
    except TimeoutError:
        raise Failure(Reason.INVALID_REQUEST, f"No frame came within {timeout_s:g} s.", field="frame") from None
    if frame is None or frame.WhichOneof("frame") not in ("start", "resume"):
        raise InvalidRequest((Violation("frame", "the first one must be start or resume"),))
    return frame


def _unexpected(kind: str | None) -> Violation:
    return Violation(kind or "frame", "only acknowledge and cancel may follow the first frame")
