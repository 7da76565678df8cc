"""The asyncio client.

    async with AsyncClient("127.0.0.1:50051") as client:
        async for text in client.generate("The river", model="demo").text():
            print(text, end="", flush=True)
        answer = await client.generate(messages=[{"role": "user", "content": "Hi"}], model="demo").read()

Traps of grpc.aio that this module keeps away from its callers: a timeout around a read ends the call; a call that is
dropped is never cancelled, so every one is cancelled in a `finally`; a local cancel looks like the task's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from headrace.api.inference.v1.inference_service_pb2 import GenerateRequest
from headrace.client.connect import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, OPTIONS, Ring
from headrace.client.events import Answer, Delta, Event
from headrace.client.request import GenerateOptions, build_request
from headrace.client.session import METHOD, Session, check_timeout, read_event
from headrace.control.client_retry import RetryPolicy

_DEFAULT_RETRY = RetryPolicy()


class AsyncClient:
    """Generates text with a Headrace service. It belongs to the event loop that first uses it.

    Args:
        target: host:port of a Router, or several of one fleet: requests take turns, and a retry goes to the next.
        credentials: for TLS; None connects in plain text.
        default_timeout_s: for requests that name none, seconds; None for no deadline.
        retry: None switches retries off.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        default_timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = _DEFAULT_RETRY,
    ) -> None:
        check_timeout(default_timeout_s)
        self._target = target
        self._credentials = credentials
        self._default_timeout_s = default_timeout_s
        self._retry = retry
        self._ring: Ring[grpc.aio.Channel] | None = None
        self._closed = False

    def generate(self, prompt: str | None = None, *, model: str, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Ask for one answer. Nothing is sent before the stream is first read.

        Args:
            prompt: text given to the model as it is; or pass `messages` or `token_ids`.
            model: an alias or an exact revision.
            options: see GenerateOptions.

        Raises:
            InvalidRequest: a value cannot be sent; names the field.
            DeadlineExceeded: timeout_s is 0 or less.
            TypeError: not exactly one input, or an unknown option.
        """
        timeout_s = options.pop("timeout_s", None)
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        check_timeout(timeout_s)
        request = build_request(model, prompt, options)
        session = Session(timeout_s=timeout_s, retry=self._retry, clock=time.monotonic, draw=random.random)
        return AsyncStream(request, session, self._turn)

    async def close(self) -> None:
        """End what still runs (it raises Cancelled) and close the connections."""
        self._closed = True
        if self._ring is not None:
            for channel in self._ring.channels:
                await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _turn(self) -> Callable[[], grpc.aio.Channel]:
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._ring is None:  # here and not earlier: a channel takes the running loop
            self._ring = Ring(self._target, self._open)
        return self._ring.turn()

    def _open(self, target: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=OPTIONS)
        return grpc.aio.secure_channel(target, self._credentials, options=OPTIONS)


class AsyncStream:
    """One answer as it comes; read it once, in one of three ways: events (`async for`), `text()`, or `read()`.

    To leave an iteration early ends the request at the service, and so does `async with` when it is left.
    """

    def __init__(
        self, request: GenerateRequest, session: Session, begin: Callable[[], Callable[[], grpc.aio.Channel]]
    ) -> None:
        self._request = request
        self._session = session
        self._begin = begin
        self._call: Any = None
        self._is_read = False
        self._cancel = asyncio.Event()

    def __aiter__(self) -> AsyncGenerator[Event, None]:
        """Iterate over events; the terminal one is the last.

        Raises:
            HeadraceError: the request did not complete; after a terminal event that says so, that event comes first.
        """
        if self._is_read:
            raise RuntimeError("a stream is read once")
        self._is_read = True
        return self._events()

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

    def cancel(self) -> None:
        """End the request; whoever reads it gets Cancelled. Harmless once it has ended."""
        self._cancel.set()
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _events(self) -> AsyncGenerator[Event, None]:
        session, next_channel = self._session, self._begin()
        try:
            while True:
                if self._cancel.is_set():
                    raise session.cancelled()
                rpc_error = None
                generate = next_channel().unary_stream(METHOD, GenerateRequest.SerializeToString, read_event)
                self._call = generate(self._request, timeout=session.begin_call())
                try:
                    async for message in self._call:
                        event = session.take(message)
                        if event is not None:
                            yield event
                except grpc.aio.AioRpcError as error:
                    rpc_error = error
                outcome = session.end_call(rpc_error)
                if outcome.wait_s is None:
                    break
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
            raise session.cancelled() from None
        finally:
            if self._call is not None:
                self._call.cancel()

    async def _pause(self, wait_s: float) -> None:
        """Wait before another call; cancel() ends it early."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._cancel.wait()
