"""Requests of other Routers, by name: a caller may ask any Router for them.

    Router B ── LookUpRequest, ResumeRequest ──> Router A, whose tag the name has; A answers for its own requests only
         A is silent: ask again, look for its service record; gone: IDEMPOTENCY_ORIGIN_LOST

B answers nothing by itself, and A asks nobody else: there is one hop at most. A caller's deadline and cancel end its
call at A too; A sends no faster than B's caller reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.router.v1 import router_service_pb2 as router_pb
from headrace.control import idempotency
from headrace.control.errors import Failure, Reason
from headrace.control.idempotency import Answer, Verdict
from headrace.control.origins import Peer, tag_in
from headrace.control.request import CONFIRM_S
from headrace.router.fleet import Fleet
from headrace.router.following import Writer
from headrace.router.metrics import RouterMetrics
from headrace.router.peers import ANSWER_S, PAUSE_S, RELAYED, Peers, heard
from headrace.router.relaying import Sharing
from headrace.router.session_parts import SessionReader
from headrace.rpc import status
from headrace.rpc.calls import Context

PATIENCE_S = 5.0
"""How long a Router may be silent to a question that is no stream, seconds."""
T = TypeVar("T")


class Elsewhere:
    """Of one Router.

    Args:
        fleet: the other Routers.
        sharing: connections to them, and the bound on calls that follow them.
        metrics: what is counted.
        limit: calls that may be answered from elsewhere at a time.
    """

    def __init__(self, fleet: Fleet, sharing: Sharing, metrics: RouterMetrics, limit: int) -> None:
        self.fleet = fleet
        self._sharing = sharing
        self._metrics = metrics
        self._limit = limit
        self._calls = 0

    def has(self, name: str) -> bool:
        """Whether another Router has given this name."""
        return tag_in(name) not in ("", self.fleet.tag)

    async def record(self, name: str, tenant: str, context: Context, *, cancel: bool) -> pb.Request:
        """What its Router knows of a request; `cancel`: and end it.

        Raises:
            Failure: NOT_FOUND; IDEMPOTENCY_ORIGIN_LOST, _UNREACHABLE: its Router is gone, or does not answer.
        """
        with self._counted("cancel" if cancel else "get"):
            peer = await self._origin(name)
            message = router_pb.LookUpRequestRequest(
                request=name, tenant=tenant, incarnation=peer.origin.incarnation, cancel=cancel
            )
            return await self.answer(peer, name, functools.partial(self._look_up, peer, message, context), PATIENCE_S)

    async def resume(
        self, asked: pb.ResumeGenerateRequest, tenant: str, context: Context, *, interactive: bool
    ) -> None:
        """Write the events of a request of another Router, as ResumeGenerate does.

        Raises:
            Failure: how the request ended, unless well; why it cannot be resumed; or as `record`.
        """
        with self._counted("resume"):
            peer = await self._origin(asked.request)
            frame = router_pb.Resumption(
                request=asked.request,
                tenant=tenant,
                incarnation=peer.origin.incarnation,
                after_sequence=asked.after_sequence,
                interactive=interactive,
            )
            resuming = Resuming(self, self._sharing.peers, peer, frame, self._sharing.writer(Writer, context))
            await self._sharing.carry(resuming, interactive=interactive)

    @contextlib.contextmanager
    def _counted(self, call: str) -> Iterator[None]:
        if self._calls >= self._limit:
            raise Failure(
                Reason.OVERLOADED,
                f"{self._calls} calls here wait for other Routers, its limit; try again shortly.",
                metadata={
                    "stage": "router", "bound": "elsewhere", "limit": str(self._limit), "current": str(self._calls),
                },
            )  # fmt: skip
        self._calls += 1
        outcome = Reason.CLIENT_CANCELLED.value
        try:
            yield
            outcome = "OK"
        except Failure as failure:
            outcome = failure.reason.value
            raise
        finally:
            self._calls -= 1
            self._metrics.elsewhere(call, outcome)

    async def _origin(self, name: str) -> Peer:
        # One that has just begun to serve may not be listed yet.
        peer = await self.fleet.find(tag_in(name), idempotency.SURE_S)
        if peer is not None:
            return peer
        if self.fleet.is_fresh:
            raise Failure(
                Reason.IDEMPOTENCY_ORIGIN_LOST,
                "No Router that runs has given this name; if one did, it is gone, and what became of the request cannot"
                " be told.",
                metadata={"request": name},
            )
        raise _unreachable(name, "This Router does not hear the store, and knows none that has given this name")

    async def answer(self, peer: Peer, name: str, ask: Callable[[], Awaitable[T | Answer]], patience_s: float) -> T:
        """Ask until there is an answer, or it is clear that there will be none."""
        silent_since: float | None = None
        while isinstance(answer := await ask(), Answer):
            now = time.monotonic()
            silent_since = silent_since or now
            registered = self.fleet.registered(peer.origin.router)
            verdict = idempotency.judge(
                peer.origin, answer, registered, silent_s=now - silent_since, patience_s=patience_s
            )
            if verdict is Verdict.LOST:
                raise Failure(
                    Reason.IDEMPOTENCY_ORIGIN_LOST,
                    "The Router that has this request is gone, and what became of the request cannot be told.",
                    metadata={"request": name},
                )
            if verdict is Verdict.UNREACHABLE:
                raise _unreachable(name, "The Router that has this request does not answer")
            await asyncio.sleep(PAUSE_S)
        return answer

    async def _look_up(
        self, peer: Peer, message: router_pb.LookUpRequestRequest, context: Context
    ) -> pb.Request | Answer:
        limits_s = [ANSWER_S + CONFIRM_S * message.cancel, context.time_remaining()]
        async with self._sharing.peers.connected(peer.admin_endpoint) as stub:
            timeout_s = min(s for s in limits_s if s is not None)
            call = stub.LookUpRequest(message, timeout=timeout_s, metadata=self._sharing.peers.proof("LookUpRequest"))
            with _understood(call, peer) as told:
                answer: router_pb.LookUpRequestResponse = await call
                return answer.request
        return told.answer


class _Told:
    answer = Answer.SILENT
    is_begun = False
    """Whether what it says is the request's own story."""


@contextlib.contextmanager
def _understood(call: Any, peer: Peer) -> Iterator[_Told]:
    """Raise what another Router says of the request; what it says of itself is the `answer`."""
    told = _Told()
    try:
        yield told
    except TimeoutError:
        return
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # gRPC's way to say that the channel was closed: it is this Router that goes.
        raise Failure(Reason.DRAINING, "This Router is shutting down; use another one.") from None
    except grpc.aio.AioRpcError as error:
        found = (status.from_rpc_error(error) or Answer.SILENT) if told.is_begun else heard(error, peer.origin)
        if isinstance(found, Failure):
            raise found from None
        told.answer = found
    finally:
        call.cancel()


class Resuming:
    """One call here that reads a request of another Router; `writer` is its end here."""

    def __init__(
        self, elsewhere: Elsewhere, peers: Peers, peer: Peer, resume: router_pb.Resumption, writer: Writer
    ) -> None:
        self.writer = writer
        self._elsewhere = elsewhere
        self._peers = peers
        self._peer = peer
        self._resume = resume
        self._acknowledged = 0
        self._is_cancelled = False
        self._wake = asyncio.Event()

    def acknowledge(self, reader: SessionReader, sequence: int) -> None:
        """The caller has read up to `sequence`."""
        self._acknowledged = sequence
        self._wake.set()

    def cancel(self) -> None:
        """The caller asks for the end."""
        self._is_cancelled = True
        self._wake.set()

    async def run(self) -> None:
        """Write all events, as they come.

        Raises:
            Failure: how the request ended, unless well; or what is known of it.
        """
        name = self._resume.request
        # Only until it has begun: were a broken stream begun again from here, it could take a newer reader's place.
        await self._elsewhere.answer(self._peer, name, self._ask, idempotency.PATIENCE_S)

    async def _ask(self) -> Answer | None:
        async with self._peers.connected(self._peer.admin_endpoint) as stub:
            return await self._read(stub)

    async def _read(self, stub: Any) -> Answer | None:
        ended = asyncio.Event()
        call = stub.ResumeRequest(self._frames(ended), metadata=self._peers.proof("ResumeRequest"))
        try:
            with _understood(call, self._peer) as told:
                async with asyncio.timeout(ANSWER_S):
                    told.is_begun = any(key == RELAYED for key, _ in await call.initial_metadata() or ())
                while (message := await call.read()) is not grpc.aio.EOF:
                    await self.writer.write(message.event)
                return None
        finally:
            ended.set()
            self._wake.set()
        if told.is_begun:
            raise _unreachable(
                self._resume.request, "The connection to the Router that has this request broke; resume the request"
            )
        return told.answer

    async def _frames(self, ended: asyncio.Event) -> AsyncIterator[router_pb.ResumeRequestRequest]:
        """What the caller says, the latest of it: never more than one frame waits."""
        yield router_pb.ResumeRequestRequest(resume=self._resume)
        acknowledged = 0
        while self._resume.interactive and not ended.is_set():
            if self._acknowledged != acknowledged:
                acknowledged = self._acknowledged
                yield router_pb.ResumeRequestRequest(acknowledge=pb.Acknowledge(sequence=acknowledged))
            elif self._is_cancelled:
                yield router_pb.ResumeRequestRequest(cancel=pb.CancelFrame())
                return
            else:
                self._wake.clear()
                await self._wake.wait()


def _unreachable(name: str, why: str) -> Failure:
    return Failure(Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE, f"{why}; try again.", metadata={"request": name})
