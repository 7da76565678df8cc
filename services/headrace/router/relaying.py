"""Calls with a key that another call has used: they follow that request, here or at the Router that has it.

    Router B ── RelayRequest ──> Router A: a follower there; B writes the same bytes to its own caller
         A is silent: ask again, look for its service record; gone: IDEMPOTENCY_ORIGIN_LOST, and nothing is run again

Each step has a bound, so a caller is never left without an answer: it gets the transcript, or the truth about it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.api.router.v1 import router_service_pb2 as router_pb
from headrace.api.router.v1.router_service_pb2_grpc import RouterServiceStub
from headrace.control import idempotency
from headrace.control.errors import Failure, Reason
from headrace.control.idempotency import Answer, Decision, Ending, Record, Verdict
from headrace.router.call import Call
from headrace.router.following import FollowingCall, Writer
from headrace.router.idempotency import Found, Keys
from headrace.router.metrics import RouterMetrics
from headrace.router.plan import Plan
from headrace.router.session import Session
from headrace.router.sessions import Sessions
from headrace.router.settings import RouterSettings
from headrace.rpc import status
from headrace.rpc.calls import Context
from headrace.rpc.channels import BOUNDED_WINDOW, CLIENT_OPTIONS

REPLAY = "headrace-idempotent-replay"
REQUEST = "headrace-request"
_RELAYED = "headrace-relayed"
"""Initial metadata between Routers: what follows is the request's own story."""
_UNSTARTED = "neverStarted"

ANSWER_S = 3.0
"""How long another Router may take to say whether it has a request, seconds."""
_LOOK_S = 2.0
_PAUSE_S = 0.25
_ROUNDS = 4


class _NotThere(Exception):
    """The Router that should have the request does not."""

    def __init__(self, *, unstarted: bool) -> None:
        super().__init__()
        self.unstarted = unstarted


class Sharing:
    """Runs requests with keys, and serves RelayRequest to other Routers.

    Args:
        settings: bounds.
        keys: in the store.
        sessions: the requests here.
        metrics: what is counted.
    """

    def __init__(self, settings: RouterSettings, keys: Keys, sessions: Sessions, metrics: RouterMetrics) -> None:
        self.keys = keys
        self._settings = settings
        self._sessions = sessions
        self._metrics = metrics
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def run(
        self,
        generate: pb.GenerateRequest,
        plan: Plan,
        tenant: str,
        context: Context,
        start: Callable[[str], Session],
        *,
        interactive: bool,
    ) -> None:
        """Run a request with a key, or follow the one that has it.

        `start` opens it under the name that it is given.

        Raises:
            Failure: how the request ended, unless well; or why it was not run, or cannot be followed.
        """
        free: set[str] = set()
        for _ in range(_ROUNDS):
            left_s = plan.budget.remaining_s(time.monotonic())
            found = await self.keys.claim(generate, plan, tenant, left_s, free)
            if found.claim is not None:
                try:
                    session = start(found.record.request)
                except BaseException:
                    self.keys.release(found.claim)
                    raise
                self.keys.opened(found.claim)
                await Call(context, self._metrics).serve(session, interactive=interactive)
                return
            try:
                await self._attach(found, tenant, context, interactive=interactive)
                return
            except _NotThere as answer:
                if answer.unstarted:
                    free.add(found.record.request)
                    continue
            latest = await self.keys.latest(found)
            if latest is not None:
                raise _forgotten(latest.record)
        raise Failure(Reason.OVERLOADED, "Many calls use this key at once; try again shortly.")

    async def relay(self, request: router_pb.RelayRequestRequest, context: Context) -> None:
        """RouterService.RelayRequest; writes the bytes of GenerateEvents."""
        if request.incarnation != self.keys.here.incarnation:
            raise Failure(Reason.STALE_EPOCH, "This is another run of the Router's process.")
        try:
            session = await self._here(request.request, request.tenant)
        except _NotThere as answer:
            raise Failure(
                Reason.NOT_FOUND,
                "This Router knows no such request.",
                metadata={_UNSTARTED: str(answer.unstarted).lower()},
            ) from None
        call = self._writer(FollowingCall, context, self._sessions)
        await context.send_initial_metadata(((_RELAYED, session.name),))
        self._metrics.relays_out += 1
        await call.follow(session, after_sequence=request.after_sequence)

    async def close(self) -> None:
        """Close the connections to other Routers, and let records be written."""
        await self.keys.close()
        for channel in self._channels.values():
            await channel.close(None)

    async def _attach(self, found: Found, tenant: str, context: Context, *, interactive: bool) -> None:
        record = found.record
        if found.decision is Decision.ORIGIN_LOST:
            raise _lost(record, 0)
        if found.decision is Decision.ATTACH_HERE:
            session = await self._here(record.request, tenant)
            call = self._writer(FollowingCall, context, self._sessions)
            await context.send_initial_metadata(_replayed(record))
            await call.follow(session, interactive=interactive)
        else:
            relaying = Relaying(self, found, tenant, self._writer(Writer, context), context)
            self._sessions.followers.add(relaying.writer)
            try:
                await relaying.run()
            except asyncio.CancelledError:
                failure = relaying.writer.broken()
                if failure is None:
                    raise
                raise failure from None
            finally:
                self._sessions.followers.discard(relaying.writer)

    async def _here(self, name: str, tenant: str) -> Session:
        """A request of this Router.

        Raises:
            _NotThere: it is not known here.
            Failure: EVENTS_EXPIRED: it ended, and its events are gone.
        """
        await self.keys.unsettled(name)
        if self.keys.was_unstarted(name):
            raise _NotThere(unstarted=True)
        try:
            session = self._sessions.find(name, tenant)
        except Failure:
            raise _NotThere(unstarted=False) from None
        if not isinstance(session, Session):
            raise _expired(name, pb.FinishReason.Name(session.finish_reason).removeprefix("FINISH_REASON_"))
        return session

    def _writer(self, kind: type[Any], context: Context, *more: object) -> Any:
        running, limit = len(self._sessions.followers), self._settings.followers_max
        if running >= limit:
            raise Failure(
                Reason.OVERLOADED,
                f"{running} calls follow other calls' requests here, its limit; try again shortly.",
                metadata={"limitFollowers": str(limit)},
            )
        return kind(context, self._metrics, *more)

    # For Relaying

    def stub(self, endpoint: str) -> RouterServiceStub:
        """The RouterService at host:port."""
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = grpc.aio.insecure_channel(endpoint, options=[*CLIENT_OPTIONS, *BOUNDED_WINDOW])
            self._channels[endpoint] = channel
        return RouterServiceStub(channel)

    async def registered(self, router: str) -> str | None:
        """Incarnation in a Router's service record; "": there is none; None: the store does not answer."""
        store = self.keys.store
        if store is None:
            return None
        try:
            item = await store.get(f"services/{router}", timeout_s=_LOOK_S)
        except Failure:
            return None
        return resources_pb2.ServiceRecord.FromString(item.value).incarnation if item is not None else ""

    async def lost(self, found: Found, written: int) -> Failure:
        """What a caller is told of a request whose Router is gone, by the newest record of it."""
        try:
            latest = await self.keys.latest(found)
        except Failure:
            latest = None
        return _lost((latest or found).record, written)


class Relaying:
    """One call here that follows a request of another Router."""

    def __init__(self, sharing: Sharing, found: Found, tenant: str, writer: Writer, context: Context) -> None:
        self.writer = writer
        self._sharing = sharing
        self._found = found
        self._tenant = tenant
        self._context = context
        self._position = 0
        self._is_begun = False
        self._silent_since: float | None = None

    async def run(self) -> None:
        """Write all events, however often the other Router has to be asked.

        Raises:
            Failure: how the request ended, unless well; or what is known of it.
            _NotThere: the other Router does not have it; nothing was written.
        """
        record = self._found.record
        while (answer := await self._ask(record)) is not None:
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            registered = await self._sharing.registered(record.origin.router)
            verdict = idempotency.judge(record.origin, answer, registered, silent_s=now - self._silent_since)
            if verdict is Verdict.LOST:
                raise await self._sharing.lost(self._found, self._position)
            if verdict is Verdict.UNREACHABLE:
                raise Failure(
                    Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE,
                    f"{record.origin.router} has the request with this key and does not answer; try again.",
                    metadata={"request": record.request, "router": record.origin.router},
                )
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, record: Record) -> Answer | None:
        """Follow it as far as it goes; None: to its end."""
        call: Any = self._sharing.stub(record.admin_endpoint).RelayRequest(
            router_pb.RelayRequestRequest(
                request=record.request,
                tenant=self._tenant,
                after_sequence=self._position,
                incarnation=record.origin.incarnation,
            )
        )
        is_relayed = False
        try:
            async with asyncio.timeout(ANSWER_S):
                is_relayed = any(key == _RELAYED for key, _ in await call.initial_metadata() or ())
            if is_relayed:
                self._silent_since = None
                await self._begin()
            while (message := await call.read()) is not grpc.aio.EOF:
                await self.writer.write(message.event)
                self._position += 1
            return None
        except TimeoutError:
            return Answer.SILENT
        except grpc.aio.AioRpcError as error:
            return self._understood(error, is_relayed=is_relayed)
        finally:
            call.cancel()

    def _understood(self, error: grpc.aio.AioRpcError, *, is_relayed: bool) -> Answer:
        failure = status.from_rpc_error(error)
        if failure is None:
            return Answer.SILENT
        if is_relayed:
            raise failure
        if failure.reason is Reason.STALE_EPOCH:
            return Answer.SUCCESSOR
        if failure.reason is Reason.NOT_FOUND:
            if self._is_begun:
                raise _forgotten(self._found.record)
            raise _NotThere(unstarted=failure.metadata.get(_UNSTARTED) == "true")
        raise failure

    async def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            await self._context.send_initial_metadata(_replayed(self._found.record))


def _replayed(record: Record) -> tuple[tuple[str, str], ...]:
    return ((REPLAY, "true"), (REQUEST, record.request))


def _lost(record: Record, written: int) -> Failure:
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


def _forgotten(record: Record) -> Failure:
    return _expired(record.request, record.ending.finish if record.ending else "", record.ending)


def _expired(name: str, finish: str, ending: Ending | None = None) -> Failure:
    how = f" with {finish}" if finish else ""
    return Failure(
        Reason.EVENTS_EXPIRED,
        f"The request with this key has ended{how}; its events are no longer kept, and it is not run again.",
        metadata={"request": name, **({"finishReason": finish} if finish else {}), **_ending(ending)},
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
