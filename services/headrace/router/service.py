"""InferenceService: from a request to its events."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from headrace.adapters.route_codec import EFFORTS
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.control.errors import Failure, Reason
from headrace.control.lifecycle import Finish
from headrace.control.placement import choose_replica, resolve_revision
from headrace.control.resources import Effort, Revision
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.validation import RequestLimits
from headrace.router.codec import (
    Efforts,
    check_request,
    complete_request,
    output_tokens_allowed,
    resolve_efforts,
)
from headrace.router.metrics import RouterMetrics
from headrace.router.routes import Routes
from headrace.router.session import FINISH_NUMBER, Session, finish_of, interrupted
from headrace.router.settings import RouterSettings
from headrace.rpc import status
from headrace.rpc.server import Context

DEADLINE_TOLERANCE_S = 0.001
DRAINED_CONFIRM_S = 2.0

_FAILURE_OF: dict[Finish, tuple[Reason, str]] = {
    Finish.CANCELLED: (Reason.CLIENT_CANCELLED, "The request was cancelled."),
    Finish.DEADLINE_EXCEEDED: (Reason.DEADLINE_EXCEEDED, "The deadline passed before the answer was complete."),
    Finish.SLOW_CONSUMER: (Reason.SLOW_CONSUMER, "The stream was not read for too long."),
    Finish.DRAINED: (Reason.DRAINING, "The worker was drained before the answer was complete."),
}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is fixed for a request before its first attempt."""

    snapshot: RoutingSnapshot
    revision: Revision
    efforts: Efforts
    generate: pb.GenerateRequest
    output_tokens_max: int
    deadline: float


class InferenceService:
    """Serves headrace.api.inference.v1.InferenceService."""

    def __init__(self, settings: RouterSettings, routes: Routes, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._routes = routes
        self._metrics = metrics
        self._limits = RequestLimits(
            prompt_bytes_max=settings.prompt_bytes_max, output_tokens_max=settings.output_tokens_max
        )
        self._sessions: set[Session] = set()
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[bytes]:  # noqa: N802
        """Run one request; see the proto. Yields serialized events."""
        now = time.monotonic()
        deadline = now + self._remaining_s(context)
        session = self._admit(now)
        expiry: asyncio.TimerHandle | None = None
        try:
            plan = self._plan(request, deadline)
            self._dispatch(session, plan)
            # gRPC ends a call only at a deadline that its caller set; this holds for the default one too.
            expiry = asyncio.get_running_loop().call_later(deadline - time.monotonic(), session.expire)
            while session.record.finish is None:
                await session.wait()
                self._metrics.wakeups += 1
                while (event := self._next_event(session, plan)) is not None:
                    self._metrics.writes += 1
                    yield event.SerializeToString()
                    session.sent(len(event.delta.token_ids) if event.HasField("delta") else 0)
            if not session.record.finish.is_ok:
                raise _failure(session)
        finally:
            if expiry is not None:
                expiry.cancel()
            # Without an end yet when the client cancelled, its deadline passed, or its connection was lost.
            late = time.monotonic() >= deadline - DEADLINE_TOLERANCE_S
            session.abandon(Finish.DEADLINE_EXCEEDED if late else Finish.CANCELLED)
            self._release(session)

    @property
    def active(self) -> int:
        """Requests that run now."""
        return len(self._sessions)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait for the running ones, and end as DRAINED what still runs after `grace_s` s."""
        self.draining = True
        for limit_s in (grace_s, DRAINED_CONFIRM_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._idle.wait()
                return
            for session in self._sessions:
                session.end_early(Finish.DRAINED)

    def _plan(self, request: pb.GenerateRequest, deadline: float) -> _Plan:
        """Check a request and fix what stays the same for all its attempts."""
        check_request(request, self._limits)
        snapshot = self._snapshot()
        revision = resolve_revision(snapshot, request.model, random.random)
        efforts = resolve_efforts(request, revision)
        return _Plan(
            snapshot=snapshot,
            revision=revision,
            efforts=efforts,
            generate=complete_request(request, revision, self._limits),
            output_tokens_max=output_tokens_allowed(revision, self._limits),
            deadline=deadline,
        )

    def _dispatch(self, session: Session, plan: _Plan) -> None:
        """Start an attempt on a replica that was not tried yet."""
        remaining_s = plan.deadline - time.monotonic()
        if remaining_s <= 0:
            raise Failure(Reason.DEADLINE_EXCEEDED, "The deadline passed before the request could be started.")
        snapshot = self._snapshot()
        if plan.revision.name not in snapshot.replicas_of:
            snapshot = plan.snapshot
        replica = choose_replica(
            snapshot,
            plan.revision,
            in_flight=self._routes.in_flight,
            reachable=self._routes.is_reachable,
            tried=session.record.tried,
            random=random.random,
        )
        # The engine stops a little earlier, so that the caller hears of it before its own timer ends the call.
        margin_s = min(0.05, 0.1 * remaining_s)
        session.dispatch(
            self._routes.link(replica.endpoint),
            replica,
            plan.generate,
            output_tokens_max=plan.output_tokens_max,
            remaining_s=remaining_s - margin_s,
        )

    def _next_event(self, session: Session, plan: _Plan) -> pb.GenerateEvent | None:
        """What the client is told next, if there is something; decides the end once the attempt has ended."""
        admitted = session.take_admitted()
        if admitted is not None:
            return _begun(session, plan, admitted)
        output = session.take_delta()
        if output is not None:
            return output
        if session.ended is None or session.record.finish is not None:
            return None
        if session.is_retryable(self._settings.attempts_max):
            try:
                self._dispatch(session, plan)
                return None
            except Failure:
                pass  # nobody else can take it: what the first attempt said is the truth
        session.record.end(session.outcome())
        session.settle()
        return self._terminal(session) if session.sequence else None

    def _terminal(self, session: Session) -> pb.GenerateEvent:
        record, ended = session.record, session.ended
        assert ended is not None
        assert record.finish is not None
        event = session.event()
        terminal = event.terminal
        terminal.finish_reason = FINISH_NUMBER[record.finish]
        terminal.usage.CopyFrom(session.usage())
        terminal.attempts = record.attempts
        terminal.timing.CopyFrom(session.timing(time.monotonic()))
        if ended.HasField("stop"):
            terminal.stop.CopyFrom(ended.stop)
        if not record.finish.is_ok:
            terminal.error.CopyFrom(status.to_proto(_failure(session)))
        return event

    def _settled(self, session: Session) -> None:
        """Count a request whose end is decided and whose last attempt holds nothing any more."""
        self._metrics.late_messages += session.late_messages
        if session.record.attempts:
            model = session.model
            self._metrics.finished(model, session.record, session.usage())

    def _snapshot(self) -> RoutingSnapshot:
        snapshot = self._routes.snapshot
        if snapshot is None:
            raise Failure(
                Reason.NO_SNAPSHOT, "This Router has no routing snapshot yet; try again shortly, or another Router."
            )
        return snapshot

    def _remaining_s(self, context: Context) -> float:
        remaining_s = context.time_remaining()
        # A caller without a deadline shows as None or as centuries.
        if remaining_s is None or remaining_s > 10 * 365 * 86400:
            return self._settings.deadline_s_default
        return remaining_s

    def _admit(self, now: float) -> Session:
        if self.draining:
            raise Failure(Reason.DRAINING, "This Router is shutting down; use another one.")
        if self.active >= self._settings.requests_max:
            raise Failure(
                Reason.OVERLOADED,
                f"This Router runs {self.active} requests, its limit; try again shortly.",
                metadata={"limitRequests": str(self._settings.requests_max)},
            )
        window = self._settings.credit_window_tokens
        session = Session(now=now, window=window, clock=time.monotonic, on_settled=self._settled)
        self._sessions.add(session)
        self._metrics.active.set(self.active)
        self._idle.clear()
        return session

    def _release(self, session: Session) -> None:
        self._sessions.discard(session)
        self._metrics.active.set(self.active)
        if not self._sessions:
            self._idle.set()


def _failure(session: Session) -> Failure:
    """Why a request did not end well."""
    record, ended = session.record, session.ended
    assert record.finish is not None
    if ended is not None and ended.HasField("error") and finish_of(ended) is record.finish:
        return status.from_proto(ended.error)
    if record.finish is Finish.INTERRUPTED:
        return interrupted(record.output_tokens)
    reason, sentence = _FAILURE_OF.get(record.finish, (Reason.ENGINE_FAILED, "The engine failed on this request."))
    return Failure(reason, sentence, metadata={"outputTokens": str(record.output_tokens)})


def _begun(session: Session, plan: _Plan, admitted: scheduler_pb2.Admitted) -> pb.GenerateEvent:
    """Tell that the engine has begun: `accepted` the first time, a notice after a retry."""
    event = session.event()
    if event.sequence > 1:
        event.notice.CopyFrom(_retried(session.record.attempts))
        return event
    accepted = event.accepted
    accepted.revision = plan.revision.name
    accepted.replica = session.record.tried[-1]
    accepted.attempt = session.record.attempts
    accepted.requested_effort = _effort_number(plan.efforts.requested)
    accepted.default_effort = _effort_number(plan.efforts.default)
    accepted.effective_effort = _effort_number(plan.efforts.effective)
    accepted.snapshot_version = plan.snapshot.version
    accepted.prompt_tokens = admitted.prompt_tokens
    accepted.cached_prompt_tokens = admitted.cached_prompt_tokens
    return event


def _effort_number(effort: Effort | None) -> Any:
    return EFFORTS[effort] if effort is not None else pb.REASONING_EFFORT_UNSPECIFIED


def _retried(attempt: int) -> pb.Notice:
    return pb.Notice(
        kind=pb.Notice.KIND_RETRIED,
        message="The request started again on another worker; nothing had been sent.",
        attempt=attempt,
    )
