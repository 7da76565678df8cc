"""Calls with a key: the first one runs the request, all others follow it, here or where it runs (peers.py)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.router.v1 import router_service_pb2 as router_pb
from headrace.control.errors import Failure, Reason
from headrace.control.idempotency import Decision
from headrace.router.call import Call, Heard
from headrace.router.following import FollowingCall, Writer
from headrace.router.idempotency import Found, Keys
from headrace.router.metrics import RouterMetrics
from headrace.router.peers import (
    RELAYED,
    UNSTARTED,
    NotThere,
    Peers,
    Relaying,
    expired,
    forgotten,
    lost,
    replayed,
    stale,
)
from headrace.router.plan import Plan
from headrace.router.session import Session
from headrace.router.sessions import Sessions
from headrace.router.settings import RouterSettings
from headrace.rpc.calls import Context
from headrace.rpc.proving import Secret

_ROUNDS = 4


class Carried(Heard, Protocol):
    """A call here about a request of another Router."""

    @property
    def writer(self) -> Writer:
        """Its end here."""

    async def run(self) -> None:
        """Write all events."""


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
        secret = settings.admin_secret_file
        self.peers = Peers(keys, Secret(secret, "router setting 'admin_secret_file'") if secret else None)
        """Connections to other Routers."""

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
        await self._refuse_new(generate.idempotency_key, plan, tenant)
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
            except NotThere as answer:
                if answer.unstarted:
                    free.add(found.record.request)
                    continue
            latest = await self.keys.latest(found)
            if latest is not None:
                raise forgotten(latest.record)
        raise Failure(Reason.OVERLOADED, "Many calls use this key at once; try again shortly.")

    async def _refuse_new(self, key: str, plan: Plan, tenant: str) -> None:
        """Where there is no room, refuse a request whose key is new; a duplicate needs none.

        Under overload the store then has reads to answer, instead of two writes for each refusal.
        """
        try:
            self._sessions.check_room(plan)
        except Failure as refusal:
            with contextlib.suppress(Failure):
                if await self.keys.is_used(tenant, key):
                    return
            raise refusal from None

    async def relay(self, request: router_pb.RelayRequestRequest, context: Context) -> None:
        """RouterService.RelayRequest; writes the bytes of GenerateEvents."""
        if request.incarnation != self.keys.here.incarnation:
            raise stale(self.keys.here)
        try:
            session = await self._here(request.request, request.tenant)
        except NotThere as answer:
            raise Failure(
                Reason.NOT_FOUND,
                "This Router knows no such request.",
                metadata={UNSTARTED: str(answer.unstarted).lower()},
            ) from None
        call = self.writer(FollowingCall, context, self._sessions)
        await context.send_initial_metadata(((RELAYED, session.name),))
        self._metrics.relays_out += 1
        if request.cancel:
            session.cancel()
        await call.follow(session, after_sequence=request.after_sequence)

    async def close(self) -> None:
        """Close the connections to other Routers, and let records be written."""
        await self.keys.close()
        await self.peers.close()

    async def _attach(self, found: Found, tenant: str, context: Context, *, interactive: bool) -> None:
        record = found.record
        if found.decision is Decision.ORIGIN_LOST:
            raise lost(record, 0)
        if found.decision is Decision.ATTACH_HERE:
            session = await self._here(record.request, tenant)
            call = self.writer(FollowingCall, context, self._sessions)
            await context.send_initial_metadata(replayed(record))
            await call.follow(session, interactive=interactive)
        else:
            relaying = Relaying(self.peers, found, tenant, self.writer(Writer, context), context)
            await self.carry(relaying, interactive=interactive)

    async def carry(self, carried: Carried, *, interactive: bool) -> None:
        """Run a call that writes what another Router tells; `interactive`: and hear its caller's frames.

        Raises:
            Failure: how the request ended, unless well; or what is known of it.
        """
        writer = carried.writer
        self._sessions.followers.add(writer)
        try:
            if interactive:
                writer.begin_to_hear(carried)
            await carried.run()
        except asyncio.CancelledError:
            failure = writer.broken()
            if failure is None:
                raise
            raise failure from None
        finally:
            writer.is_over = True
            self._sessions.followers.discard(writer)

    async def _here(self, name: str, tenant: str) -> Session:
        """A request of this Router.

        Raises:
            NotThere: it is not known here.
            Failure: EVENTS_EXPIRED: it ended, and its events are gone.
        """
        await self.keys.unsettled(name)
        if self.keys.was_unstarted(name):
            raise NotThere(unstarted=True)
        try:
            session = self._sessions.find(name, tenant)
        except Failure:
            raise NotThere(unstarted=False) from None
        if not isinstance(session, Session):
            raise expired(name, pb.FinishReason.Name(session.finish_reason).removeprefix("FINISH_REASON_"))
        return session

    def writer(self, kind: type[Any], context: Context, *more: object) -> Any:
        """The end of a call here that follows a request, of that kind.

        Raises:
            Failure: OVERLOADED: too many do.
        """
        running, limit = len(self._sessions.followers), self._settings.followers_max
        if running >= limit:
            self._metrics.idempotency("no_room")
            raise Failure(
                Reason.OVERLOADED,
                f"{running} calls follow other calls' requests here, its limit; try again shortly.",
                metadata={"stage": "router", "bound": "followers", "limit": str(limit), "current": str(running)},
            )
        return kind(context, self._metrics, *more)
