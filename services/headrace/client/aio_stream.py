"""One answer as the asyncio client reads it.

Traps of grpc.aio that this module keeps away from its callers: a timeout around a read ends the call; a call that is
dropped is never cancelled, so every one is cancelled in a `finally`; a local cancel looks like the task's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from types import AsyncGeneratorType, TracebackType
from typing import Any, Self

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.aio_outbox import AsyncOutbox
from headrace.client.calls import (
    CANCEL_FRAME,
    CANCEL_REQUEST,
    END_S,
    Opening,
    read_event,
    serialize,
)
from headrace.client.connect import Metadata
from headrace.client.errors import HeadraceError
from headrace.client.events import Answer, Delta, Event, ResumePoint
from headrace.client.session import Session


class AsyncStream:
    """One answer as it comes; read it once, in one of three ways: events (`async for`), `text()`, or `read()`.

    To leave an iteration early ends the request at the service, and so does `async with` when it is left; `detach()`
    leaves it running. For a request with on_disconnect="continue" the end is an exchange with the service: of
    milliseconds, or 4 s at most where it does not answer.
    """

    def __init__(
        self, session: Session, channels: Callable[[], Sequence[grpc.aio.Channel]], metadata: Metadata = ()
    ) -> None:
        self._session = session
        self._channels = channels
        self._metadata = metadata
        self._channel: grpc.aio.Channel | None = None
        self._open_channels: Sequence[grpc.aio.Channel] = ()
        self._call: Any = None
        self._outbox: AsyncOutbox | None = None
        self._is_read = False
        self._is_detached = False
        self._is_end_asked = False
        self._cancel = asyncio.Event()
        self._kill: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._events_ref: weakref.ref[AsyncGenerator[Event, None]] | None = None

    def __aiter__(self) -> AsyncGenerator[Event, None]:
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

    async def text(self) -> AsyncIterator[str]:
        """Iterate over pieces of text.

        Raises:
            HeadraceError: as iteration.
        """
        async with aclosing(aiter(self)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    yield event.text

    async def read(self) -> Answer:
        """Read to the end.

        Raises:
            HeadraceError: as iteration; its `answer` holds what arrived.
        """
        async with aclosing(aiter(self)) as events:
            async for _ in events:
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel.set()
        events = self._events_ref() if self._events_ref is not None else None
        if events is None:
            return
        assert isinstance(events, AsyncGeneratorType)
        if events.ag_running:  # read by another task
            self._ask_end()
        else:
            await events.aclose()

    async def _events(self) -> AsyncGenerator[Event, None]:
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
                rpc_error = None
                try:
                    async for message in call:
                        if is_first:
                            session.opened(await call.initial_metadata())
                            is_first = False
                        event = session.take(message)
                        if event is not None:
                            yield event
                            if self._outbox is not None:
                                self._consumed(event)
                        elif session.has_terminal and self._outbox is not None:
                            self._outbox.close()
                        if self._is_end_asked:
                            self._ask_end()
                except grpc.aio.AioRpcError as error:
                    rpc_error = error
                if self._cancel.is_set() and not session.has_terminal:
                    raise self._left()
                outcome = session.end_call(rpc_error)
                if outcome.wait_s is None:
                    break
                self._close_call()
                await self._pause(outcome.wait_s)
            if outcome.terminal is not None:
                yield outcome.terminal
            if outcome.error is not None:
                raise outcome.error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled the task, so the call was: by cancel(), or because the client was closed.
            raise self._left() from None
        finally:
            await self._leave()

    def _open(self, channel: grpc.aio.Channel, opening: Opening) -> Any:
        if opening.is_interactive:
            interactive = channel.stream_stream(opening.method, serialize, read_event)
            self._call = interactive(timeout=opening.timeout_s, metadata=self._metadata)
            self._outbox = AsyncOutbox(opening.frame, self._call)
        else:
            plain = channel.unary_stream(opening.method, serialize, read_event)
            self._call = plain(opening.message, timeout=opening.timeout_s, metadata=self._metadata)
        return self._call

    def _left(self) -> HeadraceError:
        return self._session.detached() if self._is_detached else self._session.cancelled()

    async def _pause(self, wait_s: float) -> None:
        """Wait before another call; cancel() ends it early."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._cancel.wait()

    # Acknowledgements: no task for any of them, and at most one timer. It is not stopped when a window fills before
    # it: it looks, finds nothing due, and waits on.

    def _consumed(self, event: Event) -> None:
        assert self._outbox is not None
        sequence = self._session.consumed(event)
        if sequence is not None:
            self._outbox.acknowledge(sequence)
        elif self._timer is None:
            self._set_timer()

    def _set_timer(self) -> None:
        look_at = self._session.look_at
        if look_at is not None:
            self._timer = asyncio.get_running_loop().call_at(look_at, self._look)

    def _look(self) -> None:
        self._timer = None
        sequence = self._session.look()
        if sequence is not None and self._outbox is not None:
            self._outbox.acknowledge(sequence)
        else:
            self._set_timer()

    # The end

    def _ask_end(self) -> None:
        """Ask for the end, in the way that this call and what is known of the request allow; the reader reads on."""
        session, call = self._session, self._call
        self._is_end_asked = False
        if call is None or session.has_terminal:
            return
        if self._outbox is None and not session.outlives_calls:
            call.cancel()
            return
        if self._outbox is not None:
            if self._kill is None:
                self._outbox.send(CANCEL_FRAME)
        elif not session.request_name:
            self._is_end_asked = True  # by name, once that is known
        elif self._asking is None:
            self._asking = asyncio.ensure_future(self.end_by_call())
        if self._kill is None:
            self._kill = asyncio.get_running_loop().call_later(END_S, call.cancel)

    async def end_by_call(self) -> None:
        """End the request by a call of its own, if it might outlive its reader's; errors are of no interest."""
        if not self._session.outlives_calls or not self._session.request_name or self._is_detached:
            return
        assert self._channel is not None
        if not self._session.has_failed_over:
            await self._end_at(self._channel)
            return
        # The Router that was lost may still have it, and the other one may not know it by name.
        await asyncio.gather(*(self._end_at(channel) for channel in self._open_channels))

    async def _end_at(self, channel: grpc.aio.Channel) -> None:
        with _local_cancels_ignored(), contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
            ask = channel.unary_unary(CANCEL_REQUEST, serialize, pb.Request.FromString)
            name = self._session.request_name
            await ask(pb.CancelRequestRequest(request=name), timeout=END_S, metadata=self._metadata)

    def client_closes(self) -> Awaitable[None]:
        """End waits, and the request at the service, before its channel is closed."""
        self._cancel.set()
        return self.end_by_call()

    def _close_call(self) -> None:
        for timer in (self._timer, self._kill):
            if timer is not None:
                timer.cancel()
        self._timer = self._kill = None
        if self._outbox is not None:
            self._outbox.stop()
        if self._call is not None:
            self._call.cancel()

    async def _leave(self) -> None:
        try:
            if self._asking is not None:
                await self._asking
            elif self._session.outlives_calls and not self._is_detached and not await self._end_by_frame():
                await self.end_by_call()
        finally:
            self._session.is_over = True
            self._close_call()

    async def _end_by_frame(self) -> bool:
        """End the request over the call that reads it; returns whether the service said that it has ended."""
        if self._outbox is None or self._call.done():
            return False
        if self._kill is None:
            self._outbox.send(CANCEL_FRAME)
            self._kill = asyncio.get_running_loop().call_later(END_S, self._call.cancel)
        with _local_cancels_ignored(), contextlib.suppress(grpc.RpcError):
            async for message in self._call:
                if isinstance(message, pb.GenerateEvent) and message.HasField("terminal"):
                    return True
        return False


@contextlib.contextmanager
def _local_cancels_ignored() -> Iterator[None]:
    """Let pass only the CancelledError of a task that is cancelled, and not that of a call that we or close() ended."""
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    try:
        yield
    except asyncio.CancelledError:
        if task is not None and task.cancelling() > cancels:
            raise
