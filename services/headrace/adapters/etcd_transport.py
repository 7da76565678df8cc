"""Calls to etcd: one channel at a time, the next endpoint when it fails, a deadline on everything.

- A call starts only on a channel that is connected, so a refused one fails at once and was never sent. Reads then
  go on to the next endpoint; a write that may have arrived is never repeated here.
- A connection that has fallen silent is replaced as a whole (`abandon`): a black hole keeps its TCP connection
  alive for longer than anyone wants to wait.
- The token of an authenticated user is fetched when needed and again when etcd calls it old.

Only the wire messages come from the `aetcd` package; methods are called by path.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from aetcd.rpc import rpc_pb2

from headrace.adapters.etcd_settings import EtcdConfig
from headrace.control.errors import Failure, Reason
from headrace.rpc.channels import CLIENT_OPTIONS
from headrace.runtime.ports import Compacted, LeaseNotFound

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Largest answer read, bytes: a page of a listing of 1,000 values of etcd's largest size is still read."""

CONNECT_S = 1.0
"""How long one endpoint may take to connect before the next one is tried, seconds."""

# keepalive_time is 10 s there; etcd closes connections that ping more often than every 5 s.
_OPTIONS = [*(o for o in CLIENT_OPTIONS if o[0] != "grpc.max_receive_message_length")]
_OPTIONS.append(("grpc.max_receive_message_length", MESSAGE_BYTES_MAX))

R = TypeVar("R")
Metadata = tuple[tuple[str, str], ...]


class StoreUnavailable(Failure):
    """etcd did not answer, or did not take the call; a write may or may not have happened."""

    def __init__(self, why: str) -> None:
        super().__init__(Reason.STORE_UNAVAILABLE, f"etcd does not serve this call: {why}.")


class StoreFull(StoreUnavailable):
    """etcd's space quota is used up: it reads, deletes and keeps leases, and refuses writes."""


class AccessDenied(StoreUnavailable):
    """etcd refuses the credentials, or the user lacks a role."""


class EtcdTransport:
    """The connection of one process to one etcd cluster."""

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._index = 0
        self._channel: grpc.aio.Channel | None = None
        self._retired: grpc.aio.Channel | None = None
        self._token = ""
        self._token_lock = asyncio.Lock()
        self.reconnects = 0
        """Channels given up so far."""

    @property
    def endpoint(self) -> str:
        """host:port in use."""
        return self._config.endpoints[self._index % len(self._config.endpoints)]

    async def aclose(self) -> None:
        """Close the connections; calls that run end as StoreUnavailable."""
        for channel in (self._retired, self._channel):
            if channel is not None:
                await channel.close(None)
        self._channel = self._retired = None

    async def abandon(self, channel: grpc.aio.Channel) -> None:
        """Give `channel` up: later calls open another one, at the next endpoint.

        Calls that still run on it may end by themselves; it is closed when the next one is given up.
        """
        if channel is not self._channel:
            return  # another caller noticed first
        self.reconnects += 1
        self._index += 1
        closing, self._retired, self._channel = self._retired, channel, None
        if closing is not None:
            await closing.close(None)

    async def connected(self, deadline: float) -> grpc.aio.Channel:
        """Return a connected channel.

        Args:
            deadline: loop time until which to wait.

        Raises:
            StoreUnavailable: no endpoint accepts a connection.
        """
        for _ in self._config.endpoints:
            channel = self._current()
            until = deadline
            if len(self._config.endpoints) > 1:
                until = min(deadline, asyncio.get_running_loop().time() + CONNECT_S)
            if await _is_ready(channel, until):
                return channel
            if len(self._config.endpoints) > 1:
                await self.abandon(channel)
        raise StoreUnavailable(f"no connection to {', '.join(self._config.endpoints)}")

    async def unary(
        self, method: str, request: Any, reply: type[R], *, timeout_s: float, repeatable: bool = False
    ) -> R:
        """Call `method` ("KV/Range").

        Args:
            method: service and method in package etcdserverpb.
            request: its message.
            reply: class of the answer.
            timeout_s: deadline of the whole call, seconds.
            repeatable: whether it changes nothing, so that another endpoint may be asked.

        Raises:
            StoreUnavailable, StoreFull, AccessDenied, LeaseNotFound, Compacted, or Failure(REQUEST_TOO_LARGE).
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        refreshed = False
        tries_left = len(self._config.endpoints) if repeatable else 1
        while True:
            channel = await self.connected(deadline)
            metadata = await self.metadata(deadline)
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                return await self._call(channel, method, request, reply, max(left_s / tries_left, 0.001), metadata)
            except grpc.aio.AioRpcError as error:
                if is_old_token(error.details() or "") and self._config.username and not refreshed:
                    refreshed = True  # refused before anything was applied: once more with a new token
                    self.forget_token()
                    continue
                tries_left -= 1
                silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                lost = error.code() is grpc.StatusCode.UNAVAILABLE
                if silent or (lost and len(self._config.endpoints) > 1):
                    await self.abandon(channel)
                if tries_left <= 0 or not (silent or lost):
                    raise translated(error) from None

    def open(self, channel: grpc.aio.Channel, method: str, reply: type[R], metadata: Metadata) -> Any:
        """Open a bidirectional stream; the caller cancels it in a `finally`, always."""
        call = channel.stream_stream(
            f"/etcdserverpb.{method}", request_serializer=_serialize, response_deserializer=_from_string(reply)
        )
        return call(metadata=metadata)

    async def metadata(self, deadline: float) -> Metadata:
        """The metadata of a call: the user's token, if there is a user."""
        if not self._config.username:
            return ()
        async with self._token_lock:
            if not self._token:
                request = rpc_pb2.AuthenticateRequest(name=self._config.username, password=self._config.password)
                channel = await self.connected(deadline)
                left_s = max(deadline - asyncio.get_running_loop().time(), 0.001)
                try:
                    reply: Any = await self._call(
                        channel, "Auth/Authenticate", request, rpc_pb2.AuthenticateResponse, left_s, ()
                    )
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                        raise AccessDenied("it refuses the user name or the password") from None
                    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                        raise AccessDenied("a user is set here, but authentication is off in etcd") from None
                    raise translated(error) from None
                self._token = reply.token
            return (("token", self._token),)

    def forget_token(self) -> None:
        """Authenticate again before the next call."""
        self._token = ""

    def _current(self) -> grpc.aio.Channel:
        if self._channel is None:
            if self._config.credentials is None:
                self._channel = grpc.aio.insecure_channel(self.endpoint, options=_OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self.endpoint, self._config.credentials, options=_OPTIONS)
        return self._channel

    async def _call(
        self,
        channel: grpc.aio.Channel,
        method: str,
        request: Any,
        reply: type[R],
        timeout_s: float,
        metadata: Metadata,
    ) -> R:
        stub = channel.unary_unary(
            f"/etcdserverpb.{method}", request_serializer=_serialize, response_deserializer=_from_string(reply)
        )
        call: Any = None
        try:
            call = stub(request, timeout=timeout_s, metadata=metadata)
            result: R = await call
            return result
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            raise_if_cancelled(error)
            raise StoreUnavailable("the connection was closed") from None
        finally:
            if call is not None:
                call.cancel()


def raise_if_cancelled(error: BaseException) -> None:
    """Raise `error` again if it is a cancellation that is meant for this task.

    grpc raises the same exception in whoever awaits a call of a channel that was closed; that one is an outage.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
        raise error


def translated(error: grpc.aio.AioRpcError) -> Exception:
    """Turn etcd's status into the exception that callers tell apart."""
    code, details = error.code(), error.details() or ""
    if "requested lease not found" in details:
        return LeaseNotFound()
    if "has been compacted" in details:
        return Compacted()
    if "database space exceeded" in details:
        return StoreFull("its space quota is used up; compact, defragment and disarm the alarm")
    if "request is too large" in details or "too many operations" in details:
        return Failure(Reason.REQUEST_TOO_LARGE, "The record is larger than etcd accepts.")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED) or is_old_token(details):
        return AccessDenied("the user lacks permission, or a user is needed")
    return StoreUnavailable(f"status {code.name}")


def is_old_token(details: str) -> bool:
    """Whether a call was refused only because its token is old or missing."""
    return any(
        text in details for text in ("invalid auth token", "revision of auth store is old", "user name is empty")
    )


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _from_string(message_class: Any) -> Callable[[bytes], Any]:
    parse: Callable[[bytes], Any] = message_class.FromString
    return parse


async def _is_ready(channel: grpc.aio.Channel, deadline: float) -> bool:
    """Wait for `channel` to connect; False when it was refused or `deadline` (loop time) has passed."""
    with contextlib.suppress(TimeoutError, grpc.aio.UsageError):  # UsageError: closed meanwhile
        state = channel.get_state(try_to_connect=True)
        async with asyncio.timeout_at(deadline):
            while state is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    return False
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
            return True
    return False
