"""One bidirectional stream to etcd, always cancelled at its end, every read and write under a deadline."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import grpc

from headrace.adapters.etcd_transport import (
    EtcdTransport,
    StoreUnavailable,
    is_old_token,
    raise_if_cancelled,
    translated,
)


class EtcdStream:
    """Use it as `async with`; a dropped grpc.aio call would otherwise hold the server's side for ever.

    Args:
        transport: the connection.
        method: service and method in package etcdserverpb.
        reply: class of what is read.
        deadline: loop time until which it must have connected.
        metadata: sent with the call, beside the user's token.
    """

    def __init__(
        self,
        transport: EtcdTransport,
        method: str,
        reply: Any,
        deadline: float,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._transport = transport
        self._method = method
        self._reply = reply
        self._deadline = deadline
        self._metadata = metadata
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None

    async def __aenter__(self) -> EtcdStream:
        self._channel = await self._transport.connected(self._deadline)
        token = await self._transport.metadata(self._deadline)
        try:
            self._call = self._transport.open(self._channel, self._method, self._reply, (*token, *self._metadata))
        except grpc.aio.UsageError:
            raise StoreUnavailable("the connection was closed") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()

    async def write(self, message: Any, deadline: float) -> None:
        """Send one message.

        Args:
            message: what to send.
            deadline: loop time.

        Raises:
            as `read`.
        """
        await self._guarded(self._call.write(message), deadline)

    async def read(self, deadline: float) -> Any:
        """Return the next message.

        Args:
            deadline: loop time; silence until then gives the whole connection up.

        Raises:
            StoreUnavailable: silence, or the stream ended.
            AccessDenied, LeaseNotFound, Compacted: as etcd says.
        """
        message = await self._guarded(self._call.read(), deadline)
        if message is grpc.aio.EOF:
            raise await self._ended()
        return message

    async def _guarded(self, awaitable: Any, deadline: float) -> Any:
        try:
            async with asyncio.timeout_at(deadline):
                return await awaitable
        except TimeoutError:
            assert self._channel is not None
            await self._transport.abandon(self._channel)
            raise StoreUnavailable("it has fallen silent") from None
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from None
        except (asyncio.CancelledError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise_if_cancelled(error)  # InvalidStateError: written to after it ended
            raise StoreUnavailable("the stream was closed") from None

    async def _ended(self) -> Exception:
        code = await self._call.code()
        return StoreUnavailable(f"the stream ended with {code.name}")

    def _translated(self, error: grpc.aio.AioRpcError) -> Exception:
        if is_old_token(error.details() or ""):
            self._transport.forget_token()
        return translated(error)
