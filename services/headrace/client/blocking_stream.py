"""One answer as the blocking client reads it: the same as the asyncio one, on gRPC's own threads."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.acknowledging import ACK_DELAY_S
from headrace.client.calls import (
    CANCEL_FRAME,
    CANCEL_REQUEST,
    END_S,
    Opening,
    acknowledgement,
    read_event,
    serialize,
)
from headrace.client.connect import Metadata
from headrace.client.errors import HeadraceError
from headrace.client.events import Answer, Delta, Event, ResumePoint
from headrace.client.session import Session


class _Outbox:
    """Frames on their way to the service. gRPC takes them in a thread of its own, which waits here.

    After an acknowledgement that thread lingers for ACK_DELAY_S, so that a stream that is read without a break wakes
    it once for each acknowledgement, and not also for the first token of the next.
    """

    def __init__(self, first: pb.ClientFrame, session: Session) -> None:
        self._first: pb.ClientFrame | None = first
        self._session = session
        self._changed = threading.Condition(threading.Lock())
        self._acknowledged = 0
        self._is_cancelled = False
        self._is_closed = False
        self._lingers_until: float | None = None

    def consumed(self, event: Event) -> None:
        """The caller has asked for the event after this one."""
        with self._changed:
            sequence = self._session.consumed(event)
            if sequence is not None:
                self._acknowledged = sequence
                self._changed.notify()
            elif self._lingers_until is None and self._session.look_at is not None:
                self._changed.notify()

    def cancel(self) -> None:
        """Ask for the end of the request."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Nothing follows, not even what waits: the stream is over."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def __iter__(self) -> _Outbox:
        return self

    def __next__(self) -> pb.ClientFrame:
        with self._changed:
            while True:
                frame = self._take()
                if frame is not None:
                    return frame
                now = time.monotonic()
                wakes_at = self._lingers_until if self._lingers_until is not None else self._session.look_at
                if wakes_at is not None and wakes_at <= now:
                    self._lingers_until = None
                    continue
                self._lingers_until = wakes_at
                self._changed.wait(None if wakes_at is None else wakes_at - now)

    def _take(self) -> pb.ClientFrame | None:
        """Return the next frame, if there is one; raises StopIteration at the end."""
        if self._is_closed:
            raise StopIteration
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._is_cancelled:
            self._is_cancelled = False
            return CANCEL_FRAME
        sequence = self._acknowledged or self._session.look()
        if not sequence:
            return None
        self._acknowledged = 0
        self._lingers_until = time.monotonic() + ACK_DELAY_S
        return acknowledgement(sequence)


class Stream:
    """One answer as it comes; read it once, in one of three ways: events (`for`), `text()`, or `read()`.

    To leave an iteration early ends the request at the service, and so does `with` when it is left; `detach()`
    leaves it running. For a request with on_disconnect="continue" the end is an exchange with the service: of
    milliseconds, or 4 s at most where it does not answer.
    """

    def __init__(
        self, session: Session, channels: Callable[[], Sequence[grpc.Channel]], metadata: Metadata = ()
    ) -> None:
        self._session = session
        self._channels = channels
        self._metadata = metadata
        self._channel: grpc.Channel | None = None
        self._open_channels: Sequence[grpc.Channel] = ()
        self._call: Any = None
        self._outbox: _Outbox | None = None
        self._is_read = False
        self._is_detached = False
        self._is_end_asked = False
        self._cancel = threading.Event()
        self._kill: threading.Timer | None = None
        self._asking: list[grpc.Future[pb.Request]] = []
        self._ask_once = threading.Lock()
        self._events_ref: weakref.ref[Generator[Event, None, None]] | None = None

    def __iter__(self) -> Generator[Event, None, None]:
        """Iterate over events; the terminal one is the last.

        Raises:
            HeadraceError: the request did not complete; after a terminal event that says so, that event comes first.
        """
        if self._is_read:
            raise RuntimeError("a stream is read once")
        self._is_read = True
        events = self._events()
        # Weak: an iteration that is left ends the request at once, though the stream is still held.
        self._events_ref = weakref.ref(events)
        return events

    def text(self) -> Iterator[str]:
        """Iterate over pieces of text.

        Raises:
            HeadraceError: as iteration.
        """
        with closing(iter(self)) as events:
            for event in events:
                if isinstance(event, Delta) and event.text:
                    yield event.text

    def read(self) -> Answer:
        """Read to the end.

        Raises:
            HeadraceError: as iteration; its `answer` holds what arrived.
        """
        with closing(iter(self)) as events:
            for _ in events:
                pass
        return self._session.answer()

    @property
    def answer(self) -> Answer:
        """What has arrived so far."""
        return self._session.answer()

    @property
    def is_replay(self) -> bool:
        """Whether the service repeats, or reads along with, what another call with the same idempotency key began.

        Known from the first event on.
        """
        return self._session.is_replay

    @property
    def resume_point(self) -> ResumePoint | None:
        """Where `client.resume` would go on; None before `accepted`, and if the request cannot be resumed."""
        return self._session.resume_point

    def cancel(self) -> None:
        """End the request; whoever reads it gets what was on its way, and then Cancelled. Harmless once it has ended.

        The service is given 2 s to confirm the end, so that the answer has its usage; in the plain form it is given
        none, unless the request would outlive its call.
        """
        self._cancel.set()
        self._ask_end()

    def detach(self) -> ResumePoint:
        """Leave the request running, and stop reading; whoever still reads gets Detached.

        Raises:
            RuntimeError: it cannot be resumed, by its options or because it was not accepted yet.
        """
        point = self._session.resume_point
        if point is None:
            raise RuntimeError('only an accepted request with on_disconnect="continue" can be detached')
        self._is_detached = True
        self._cancel.set()
        if self._call is not None:
            self._call.cancel()
        return point

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel.set()
        events = self._events_ref() if self._events_ref is not None else None
        if events is None:
            return
        try:
            events.close()
        except ValueError:  # read by another thread
            self._ask_end()

    def _events(self) -> Generator[Event, None, None]:
        session = self._session
        self._open_channels = channels = self._channels()
        try:
            while True:
                if self._cancel.is_set():
                    raise self._left()
                opening = session.begin_call()
                self._channel = channels[opening.target]
                call = self._open(self._channel, opening)
                is_first = True
                if self._cancel.is_set():  # it came between the last look and the call
                    self._ask_end()
                rpc_error = None
                try:
                    for message in call:
                        if is_first:
                            session.opened(call.initial_metadata())
                            is_first = False
                        event = session.take(message)
                        if event is not None:
                            yield event
                            if self._outbox is not None:
                                self._outbox.consumed(event)
                        elif session.has_terminal and self._outbox is not None:
                            self._outbox.close()
                        if self._is_end_asked:
                            self._ask_end()
                except grpc.RpcError as error:
                    rpc_error = error
                if self._cancel.is_set() and not session.has_terminal:
                    raise self._left()
                outcome = session.end_call(rpc_error)
                if outcome.wait_s is None:
                    break
                self._close_call()
                self._cancel.wait(outcome.wait_s)
            if outcome.terminal is not None:
                yield outcome.terminal
            if outcome.error is not None:
                raise outcome.error
        finally:
            self._leave()

    def _open(self, channel: grpc.Channel, opening: Opening) -> Any:
        try:
            if opening.is_interactive:
                self._outbox = _Outbox(opening.frame, self._session)
                interactive = channel.stream_stream(opening.method, serialize, read_event)
                self._call = interactive(self._outbox, timeout=opening.timeout_s, metadata=self._metadata)
            else:
                plain = channel.unary_stream(opening.method, serialize, read_event)
                self._call = plain(opening.message, timeout=opening.timeout_s, metadata=self._metadata)
        except ValueError:  # the channel is closed
            if not self._cancel.is_set():
                raise
            raise self._left() from None
        return self._call

    def _left(self) -> HeadraceError:
        return self._session.detached() if self._is_detached else self._session.cancelled()

    # The end

    def _ask_end(self) -> None:
        """Ask for the end, in the way that this call and what is known of the request allow; the reader reads on."""
        session, call = self._session, self._call
        self._is_end_asked = False
        if call is None or session.has_terminal:
            return
        if self._is_detached or (self._outbox is None and not session.outlives_calls):
            call.cancel()
            return
        if self._outbox is not None:
            if self._kill is None:
                self._outbox.cancel()
        elif not session.request_name:
            self._is_end_asked = True  # by name, once that is known
        else:
            self.end_by_call()
        self._start_kill()

    def _start_kill(self) -> None:
        if self._kill is None:
            self._kill = kill = threading.Timer(END_S, self._call.cancel)
            kill.daemon = True
            kill.start()

    def end_by_call(self) -> list[grpc.Future[pb.Request]]:
        """Begin to end the request by a call of its own, once, if it might outlive its reader's."""
        session = self._session
        with self._ask_once, contextlib.suppress(ValueError):  # the channel is closed
            if not self._asking and session.outlives_calls and session.request_name and not self._is_detached:
                assert self._channel is not None
                # Where it failed over, the Router that was lost may still have it, and the other one may not know it
                # by name.
                message = pb.CancelRequestRequest(request=session.request_name)
                for channel in self._open_channels if session.has_failed_over else [self._channel]:
                    ask = channel.unary_unary(CANCEL_REQUEST, serialize, pb.Request.FromString)
                    self._asking.append(ask.future(message, timeout=END_S, metadata=self._metadata))
        return self._asking

    def client_closes(self) -> list[grpc.Future[pb.Request]]:
        """End waits, and begin to end the request at the service, before its channel is closed."""
        self._cancel.set()
        return self.end_by_call()

    def _close_call(self) -> None:
        kill, self._kill = self._kill, None
        if kill is not None:
            kill.cancel()
        if self._outbox is not None:
            self._outbox.close()
        if self._call is not None:
            self._call.cancel()

    def _leave(self) -> None:
        try:
            if not self._asking and self._session.outlives_calls and not self._is_detached:
                if self._end_by_frame():
                    return
                self.end_by_call()
            confirmed(self._asking)
        finally:
            self._session.is_over = True
            self._close_call()

    def _end_by_frame(self) -> bool:
        """End the request over the call that reads it; returns whether the service said that it has ended."""
        if self._outbox is None or not self._call.is_active():
            return False
        if self._kill is None:
            self._outbox.cancel()
            self._start_kill()
        with contextlib.suppress(grpc.RpcError):
            for message in self._call:
                if isinstance(message, pb.GenerateEvent) and message.HasField("terminal"):
                    return True
        return False


def confirmed(asked: list[grpc.Future[pb.Request]]) -> None:
    """Wait for the answers; errors are of no interest."""
    for asking in asked:
        with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
            asking.result()
