"""SchedulerService: Attach, one long-lived stream a Router, and GetState."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.worker_lifecycle import WorkerState
from headrace.rpc.requests import Refused
from headrace.rpc.server import Context
from headrace.runtime.tasks import cancel_and_wait
from headrace.runtime.telemetry import get_logger
from headrace.scheduler.fleet import Fleet
from headrace.scheduler.relay import Relay
from headrace.scheduler.session import Session
from headrace.scheduler.vitals import Vitals

HELLO_S = 10.0
ROUTER_NAME_MAX = 128

_STATE_NAMES = {state: f"STATE_{state.name}" for state in WorkerState} | {
    WorkerState.RECYCLING: "STATE_DRAINING"  # what it does is the same, and what it is for is in its detail
}


class SchedulerService:
    """Serves headrace.api.scheduler.v1.SchedulerService."""

    def __init__(self, scheduler: str, incarnation: str, relay: Relay, fleet: Fleet, vitals: Vitals) -> None:
        self._scheduler = scheduler
        self._incarnation = incarnation
        self._relay = relay
        self._fleet = fleet
        self._vitals = vitals

    def close(self) -> None:
        """End every session, once what waits for it has been sent."""
        for session in self._relay.sessions.values():
            session.close()

    async def Attach(self, requests: AsyncIterator[pb.AttachRequest | Refused], context: Context) -> None:  # noqa: N802
        """Run a Router's session until either side ends it; see the proto."""
        hello = await self._hello(requests)
        await context.write(
            pb.AttachResponse(welcome=pb.Welcome(scheduler=self._scheduler, incarnation=self._incarnation))
        )
        session = self._relay.open_session(hello.router)
        log = get_logger().bind(router=hello.router, session=session.number)
        log.info("router_attached")
        reading = asyncio.create_task(self._read(session, requests), name=f"session {session.number} reader")
        writing = asyncio.create_task(session.write(context), name=f"session {session.number} writer")
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, writing):
                error = task.exception() if task.done() and not task.cancelled() else None
                # A write that was under way when the peer left raises an error of gRPC's own: the end of the stream.
                # A Failure is for the Router to see, and anything else is a bug that the server reports.
                if error is not None and not type(error).__module__.startswith("grpc"):
                    raise error
            if session.is_closing:
                raise Failure(Reason.DRAINING, "This Scheduler has stopped; choose another one.")
        finally:
            self._relay.close_session(session)
            await cancel_and_wait(reading, writing)
            log.info("router_detached")

    async def GetState(self, request: pb.GetStateRequest, context: Context) -> pb.GetStateResponse:  # noqa: N802
        """What this Scheduler owns; see the proto."""
        lease = self._vitals.lease
        response = pb.GetStateResponse(
            scheduler=self._scheduler,
            attempts=len(self._relay.ledger.attempts),
            sessions=len(self._relay.sessions),
            lease=f"LEASE_{lease.state.name}",
            orphans_cancelled=self._relay.counts.orphans,
            attempts_unknown=self._relay.counts.unknown,
        )
        response.lease_age.FromMilliseconds(round(lease.age_s * 1000))
        for worker in self._fleet.workers.values():
            state: Any = pb.Worker.State.Value(_STATE_NAMES[worker.life.state])
            signals = worker.signals
            told = response.workers.add(
                replica=worker.name,
                revision=worker.revision,
                state=state,
                detail=worker.life.detail,
                restarts=worker.life.restarts,
                engine_json=json.dumps(worker.hello, sort_keys=True) if worker.hello else "",
                pid=worker.pid,
                started=signals.started,
                alive=signals.alive,
                ready=signals.ready,
                memory_bytes=worker.memory_bytes(),
                crash_loop=worker.life.is_crash_loop and not worker.life.takes_attempts,
            )
            if worker.heard_ago_s is not None:
                told.heard_ago.FromMilliseconds(round(worker.heard_ago_s * 1000))
        return response

    async def _hello(self, requests: AsyncIterator[pb.AttachRequest | Refused]) -> pb.Hello:
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(requests, None)
        except TimeoutError:
            raise Failure(Reason.INVALID_REQUEST, "No hello came.", field="hello") from None
        if isinstance(first, Refused):
            raise first.failure
        if first is None or not first.HasField("hello"):
            raise InvalidRequest((Violation("hello", "must be in the first frame"),))
        if not 0 < len(first.hello.router) <= ROUTER_NAME_MAX:
            raise InvalidRequest((Violation("hello.router", f"must have 1 to {ROUTER_NAME_MAX} characters"),))
        return first.hello

    async def _read(self, session: Session, requests: AsyncIterator[pb.AttachRequest | Refused]) -> None:
        async for frame in requests:
            if isinstance(frame, Refused):
                raise frame.failure
            self._relay.take(session, frame)
