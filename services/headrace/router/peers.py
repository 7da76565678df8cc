"""Other Routers: asked for a request that runs there, and what is to be thought of them when they do not answer.

    Router B ── RelayRequest ──> Router A: a follower there; B writes the same bytes to its own caller
         A is silent: ask again, look for its service record; gone: IDEMPOTENCY_ORIGIN_LOST, and nothing is run again

Each step has a bound, so a caller is never left without an answer: it gets the transcript, or the truth about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.api.registry.v1 import resources_pb2
from headrace.api.router.v1 import router_service_pb2 as router_pb
from headrace.api.router.v1.router_service_pb2_grpc import RouterServiceStub
from headrace.control import idempotency
from headrace.control.errors import Failure, Reason
from headrace.control.idempotency import Answer, Ending, Origin, Record, Verdict
from headrace.router.following import Writer
from headrace.router.idempotency import Found, Keys
from headrace.router.session_parts import SessionReader
from headrace.rpc import status
from headrace.rpc.calls import Context
from headrace.rpc.channels import BOUNDED_WINDOW, CLIENT_OPTIONS
from headrace.rpc.proving import Secret
from headrace.runtime.telemetry import get_logger

REPLAY = "headrace-idempotent-replay"
REQUEST = "headrace-request"
RELAYED = "headrace-relayed"
"""Initial metadata between Routers: what follows is the request's own story."""
UNSTARTED = "neverStarted"

ANSWER_S = 3.0
"""How long another Router may take to say whether it has a request, seconds."""
IDLE_S = 300.0
"""After this long without a use a connection to another Router is closed."""
_LOOK_S = 2.0
PAUSE_S = 0.25
ROUTER = "router"
_SERVICE = f"/{router_pb.DESCRIPTOR.services_by_name['RouterService'].full_name}/"


class NotThere(Exception):
    """The Router that should have the request does not."""

    def __init__(self, *, unstarted: bool) -> None:
        super().__init__()
        self.unstarted = unstarted


@dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    users: int = 0
    used_at: float = 0.0


class Peers:
    """Connections to other Routers, and what the store knows of them."""

    def __init__(self, keys: Keys, secret: Secret | None = None) -> None:
        self.secret = secret
        """Proves calls to them; None: nothing does."""
        self._keys = keys
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    @contextlib.asynccontextmanager
    async def connected(self, endpoint: str) -> AsyncIterator[Any]:
        """The stub of the RouterService at host:port, while the block runs. Connections that were not used for long are
        closed.
        """
        peer = self._peers.get(endpoint)
        if peer is None:
            channel = grpc.aio.insecure_channel(endpoint, options=[*CLIENT_OPTIONS, *BOUNDED_WINDOW])
            peer = self._peers[endpoint] = _Peer(channel)
        peer.users += 1
        try:
            yield RouterServiceStub(peer.channel)
        finally:
            peer.users -= 1
            peer.used_at = time.monotonic()
            await self._sweep(peer.used_at)

    def proof(self, method: str) -> tuple[tuple[str, str], ...]:
        """Metadata that proves a call of a method of RouterService."""
        return self.secret.metadata(f"{_SERVICE}{method}") if self.secret is not None else ()

    async def _sweep(self, now: float) -> None:
        idle = [e for e, peer in self._peers.items() if not peer.users and now - peer.used_at >= IDLE_S]
        for peer in [self._peers.pop(endpoint) for endpoint in idle]:
            await peer.channel.close(None)

    async def registered(self, router: str) -> str | None:
        """Incarnation in a Router's service record; "": there is none; None: the store does not answer."""
        store = self._keys.store
        if store is None:
            return None
        try:
            item = await store.get(f"services/{router}", timeout_s=_LOOK_S)
        except Failure:
            return None
        return resources_pb2.ServiceRecord.FromString(item.value).incarnation if item is not None else ""

    async def gone(self, found: Found, written: int) -> Failure:
        """What a caller is told of a request whose Router is gone, by the newest record of it."""
        try:
            latest = await self._keys.latest(found)
        except Failure:
            latest = None
        return lost((latest or found).record, written)

    async def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            await peer.channel.close(None)


class Relaying:
    """One call here that follows a request of another Router; `writer` is its end here."""

    def __init__(self, peers: Peers, found: Found, tenant: str, writer: Writer, context: Context) -> None:
        self.writer = writer
        self._peers = peers
        self._found = found
        self._tenant = tenant
        self._context = context
        self._position = 0
        self._is_begun = False
        self._silent_since: float | None = None
        self._cancelling: asyncio.Task[None] | None = None

    def acknowledge(self, reader: SessionReader, sequence: int) -> None:
        """Nothing: what others read is not this caller's to pace."""

    def cancel(self) -> None:
        """The caller asks for the end."""
        if self._cancelling is None:
            self._cancelling = asyncio.create_task(self._cancel_there(), name="cancel-there")

    async def _cancel_there(self) -> None:
        async with self._peers.connected(self._found.record.admin_endpoint) as stub:
            call = self._call(stub, self._found.record, cancel=True)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await call.initial_metadata()
            except TimeoutError:
                self.writer.break_off(_unreachable(self._found.record))
            finally:
                call.cancel()

    def _call(self, stub: Any, record: Record, *, cancel: bool = False) -> Any:
        request = router_pb.RelayRequestRequest(
            request=record.request,
            tenant=self._tenant,
            after_sequence=self._position,
            incarnation=record.origin.incarnation,
            cancel=cancel,
        )
        return stub.RelayRequest(request, metadata=self._peers.proof("RelayRequest"))

    async def run(self) -> None:
        """Write all events, however often the other Router has to be asked.

        Raises:
            Failure: how the request ended, unless well; or what is known of it.
            NotThere: the other Router does not have it; nothing was written.
        """
        record = self._found.record
        while (answer := await self._ask(record)) is not None:
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            registered = await self._peers.registered(record.origin.router)
            verdict = idempotency.judge(record.origin, answer, registered, silent_s=now - self._silent_since)
            if verdict is Verdict.LOST:
                raise await self._peers.gone(self._found, self._position)
            if verdict is Verdict.UNREACHABLE:
                raise _unreachable(record)
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, record: Record) -> Answer | None:
        """Follow it as far as it goes; None: to its end."""
        async with self._peers.connected(record.admin_endpoint) as stub:
            return await self._follow(self._call(stub, record))

    async def _follow(self, call: Any) -> Answer | None:
        is_relayed = False
        try:
            async with asyncio.timeout(ANSWER_S):
                is_relayed = any(key == RELAYED for key, _ in await call.initial_metadata() or ())
            if is_relayed:
                self._silent_since = None
                await self._begin()
            while (message := await call.read()) is not grpc.aio.EOF:
                await self.writer.write(message.event)
                self._position += 1
            return None
        except TimeoutError:
            return Answer.SILENT
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC's way to say that the channel was closed: it is this Router that goes.
            raise Failure(Reason.DRAINING, "This Router is shutting down; use another one.") from None
        except grpc.aio.AioRpcError as error:
            return self._understood(error, is_relayed=is_relayed)
        finally:
            call.cancel()

    def _understood(self, error: grpc.aio.AioRpcError, *, is_relayed: bool) -> Answer:
        failure = (
            (status.from_rpc_error(error) or Answer.SILENT) if is_relayed else heard(error, self._found.record.origin)
        )
        if isinstance(failure, Answer):
            return failure
        if failure.reason is Reason.NOT_FOUND and not is_relayed:
            if self._is_begun:
                raise forgotten(self._found.record)
            raise NotThere(unstarted=failure.metadata.get(UNSTARTED) == "true")
        raise failure

    async def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            await self._context.send_initial_metadata(replayed(self._found.record))


def stale(here: Origin) -> Failure:
    """What a Router says when it is asked for a request of another process."""
    text = "This is another run of the Router's process, or another Router."
    return Failure(Reason.STALE_EPOCH, text, metadata={ROUTER: here.router})


def heard(error: grpc.aio.AioRpcError, origin: Origin) -> Answer | Failure:
    """What the end of a call to `origin` says: of that Router, or of the request."""
    failure = status.from_rpc_error(error)
    if failure is None:
        return Answer.SILENT
    if failure.reason is Reason.STALE_EPOCH:
        # Addresses are given again: another Router at this one says nothing of the one that was there.
        is_same = failure.metadata.get(ROUTER, origin.router) == origin.router
        return Answer.SUCCESSOR if is_same else Answer.SILENT
    if failure.reason is Reason.UNAUTHENTICATED:  # of this Router, not of its caller
        get_logger().error("not_trusted_by_router", router=origin.router, why=failure.message)
        return Failure(
            Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE, "The Router that has the request does not trust this one; try again."
        )
    return failure


def replayed(record: Record) -> tuple[tuple[str, str], ...]:
    """Initial metadata of a call that follows another one's request."""
    return ((REPLAY, "true"), (REQUEST, record.request))


def lost(record: Record, written: int) -> Failure:
    """The Router that ran it is gone; `written` events had reached this caller."""
    known = f"it had ended with {record.ending.finish}" if record.ending else "what became of it cannot be told"
    return Failure(
        Reason.IDEMPOTENCY_ORIGIN_LOST,
        f"The Router that ran the request with this key is gone: {known}, its transcript is lost, and it is not run"
        " again.",
        metadata={
            "request": record.request,
            "router": record.origin.router,
            "eventsWritten": str(written),
            **_ending(record.ending),
        },
    )


def forgotten(record: Record) -> Failure:
    """It ended, and its Router has forgotten it."""
    return expired(record.request, record.ending.finish if record.ending else "", record.ending)


def expired(name: str, finish: str, ending: Ending | None = None) -> Failure:
    """It ended, and its transcript is gone."""
    how = f" with {finish}" if finish else ""
    return Failure(
        Reason.EVENTS_EXPIRED,
        f"The request with this key has ended{how}; its events are no longer kept, and it is not run again.",
        metadata={"request": name, **({"finishReason": finish} if finish else {}), **_ending(ending)},
    )


def _unreachable(record: Record) -> Failure:
    return Failure(
        Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE,
        f"{record.origin.router} has the request with this key and does not answer; try again.",
        metadata={"request": record.request, "router": record.origin.router},
    )


def _ending(ending: Ending | None) -> dict[str, str]:
    if ending is None:
        return {}
    told = {
        "finishReason": ending.finish,
        "outputTokens": str(ending.output_tokens),
        "endTimeUnixMillis": str(ending.at_ms),
    }
    return told | ({"reason": ending.reason} if ending.reason else {})
