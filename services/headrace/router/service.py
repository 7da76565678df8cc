"""InferenceService: from a request to its events."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.control.lifecycle import Finish
from headrace.control.placement import choose_replica, resolve_revision
from headrace.control.resources import Revision
from headrace.control.snapshot import RoutingSnapshot
from headrace.control.validation import RequestLimits
from headrace.router.codec import check_request, complete_request
from headrace.router.metrics import RouterMetrics
from headrace.router.routes import Routes
from headrace.router.session import FINISH_NUMBER, Efforts, Session, finish_of, interrupted
from headrace.router.settings import RouterSettings
from headrace.rpc import status
from headrace.rpc.server import Context

RELEASE_TIMEOUT_S = 10.0

_FAILURE_OF: dict[Finish, tuple[Reason, str]] = {
    Finish.CANCELLED: (Reason.CLIENT_CANCELLED, "The request was cancelled."),
    Finish.DEADLINE_EXCEEDED: (Reason.DEADLINE_EXCEEDED, "The deadline passed before the answer was complete."),
    Finish.SLOW_CONSUMER: (Reason.SLOW_CONSUMER, "The stream was not read for too long."),
    Finish.DRAINED: (Reason.DRAINING, "The worker was drained before the answer was complete."),
}


class InferenceService:
    """Serves headrace.api.inference.v1.InferenceService."""

    def __init__(self, settings: RouterSettings, routes: Routes, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._routes = routes
        self._metrics = metrics
        self._limits = RequestLimits(
            prompt_bytes_max=settings.prompt_bytes_max, output_tokens_max=settings.output_tokens_max
        )
        self._active = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[bytes]:  # noqa: N802
        """Run one request; see the proto. Yields serialized events."""
        now = time.monotonic()
        deadline = now + self._remaining_s(context)
        self._admit()
        try:
            session = Session(now=now, window=self._settings.credit_window_tokens, clock=time.monotonic)
            check_request(request, self._limits)
            snapshot = self._snapshot()
            revision = resolve_revision(snapshot, request.model, random.random)
            completed = complete_request(request, revision, self._limits)
            if deadline <= now:
                raise Failure(Reason.DEADLINE_EXCEEDED, "The deadline had passed when the request arrived.")
            async for event in self._run(session, snapshot, revision, completed, deadline):
                yield event
            self._raise_for(session)
        finally:
            self._release()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests and wait for the running ones, at most `grace_s` seconds."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            pass

    async def _run(
        self,
        session: Session,
        snapshot: RoutingSnapshot,
        revision: Revision,
        completed: Any,
        deadline: float,
    ) -> AsyncIterator[bytes]:
        """Make attempts until one counts; yield what the client is told."""
        record = session.record
        metrics = self._metrics
        try:
            self._dispatch(session, snapshot, revision, completed.request, deadline)
            while True:
                await session.wait()
                metrics.wakeups += 1
                admitted = session.take_admitted()
                if admitted is not None:
                    event = session.event()
                    if session.sequence == 1:
                        event.accepted.CopyFrom(_accepted(session, snapshot, revision, completed.efforts, admitted))
                    else:
                        event.notice.CopyFrom(_retried(record.attempts))
                    metrics.writes += 1
                    yield event.SerializeToString()
                output = session.take_delta()
                if output is not None:
                    metrics.writes += 1
                    yield output.SerializeToString()
                    session.sent(len(output.delta.token_ids))
                if session.ended is None or session.has_output:
                    continue
                if session.is_retryable(self._settings.attempts_max):
                    try:
                        self._dispatch(session, self._snapshot(), revision, completed.request, deadline)
                        continue
                    except Failure:
                        pass  # nobody else can take it: the first failure is the truthful one
                record.end(finish_of(session.ended))
                if session.sequence:
                    event = session.event()
                    event.terminal.CopyFrom(self._terminal(session))
                    metrics.writes += 1
                    yield event.SerializeToString()
                return
        finally:
            # Reached by the client's cancel, its deadline, or a lost connection while the request still runs.
            if record.finish is None:
                cause = Finish.DEADLINE_EXCEEDED if time.monotonic() >= deadline - 0.001 else Finish.CANCELLED
                session.cancel(cause)
                record.end(cause)
            usage = session.usage()
            metrics.late_messages += session.late_messages
            metrics.finished(revision.model, record, usage.generated_tokens, usage.prompt_tokens)

    def _dispatch(
        self,
        session: Session,
        snapshot: RoutingSnapshot,
        revision: Revision,
        generate: pb.GenerateRequest,
        deadline: float,
    ) -> None:
        replica = choose_replica(
            snapshot,
            revision,
            in_flight=self._routes.in_flight,
            reachable=self._routes.is_reachable,
            tried=session.record.tried,
            random=random.random,
        )
        remaining_s = deadline - time.monotonic()
        # The engine stops a little earlier, so that the caller hears of it before its own timer ends the call.
        margin_s = min(0.05, 0.1 * remaining_s)
        session.dispatch(self._routes.link(replica.endpoint), replica, generate, remaining_s - margin_s)

    def _terminal(self, session: Session) -> pb.Terminal:
        record, ended = session.record, session.ended
        assert ended is not None
        assert record.finish is not None
        terminal = pb.Terminal(
            finish_reason=FINISH_NUMBER[record.finish],
            usage=session.usage(),
            attempts=record.attempts,
            timing=session.timing(time.monotonic()),
        )
        if ended.HasField("stop"):
            terminal.stop.CopyFrom(ended.stop)
        if not record.finish.is_ok:
            terminal.error.CopyFrom(status.to_proto(_failure(session)))
        return terminal

    def _raise_for(self, session: Session) -> None:
        """Make the call's status mirror the terminal event."""
        finish = session.record.finish
        if finish is not None and not finish.is_ok:
            raise _failure(session)

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

    def _admit(self) -> None:
        if self.draining:
            raise Failure(Reason.DRAINING, "This Router is shutting down; use another one.")
        if self._active >= self._settings.requests_max:
            raise Failure(
                Reason.OVERLOADED,
                f"This Router runs {self._active} requests, its limit; try again shortly.",
                metadata={"limitRequests": str(self._settings.requests_max)},
            )
        self._active += 1
        self._metrics.active.set(self._active)
        self._idle.clear()

    def _release(self) -> None:
        self._active -= 1
        self._metrics.active.set(self._active)
        if not self._active:
            self._idle.set()


def _failure(session: Session) -> Failure:
    """Why a request did not end well."""
    record, ended = session.record, session.ended
    assert record.finish is not None
    if ended is not None and ended.HasField("error"):
        return status.from_proto(ended.error)
    if record.finish is Finish.INTERRUPTED:
        return interrupted(record.output_tokens)
    reason, sentence = _FAILURE_OF.get(record.finish, (Reason.ENGINE_FAILED, "The engine failed on this request."))
    return Failure(reason, sentence, metadata={"outputTokens": str(record.output_tokens)})


def _accepted(
    session: Session, snapshot: RoutingSnapshot, revision: Revision, efforts: Efforts, admitted: Any
) -> pb.Accepted:
    return pb.Accepted(
        revision=revision.name,
        replica=session.record.tried[-1],
        attempt=session.record.attempts,
        requested_effort=efforts.requested,  # type: ignore[arg-type]
        default_effort=efforts.default,  # type: ignore[arg-type]
        effective_effort=efforts.effective,  # type: ignore[arg-type]
        snapshot_version=snapshot.version,
        prompt_tokens=admitted.prompt_tokens,
        cached_prompt_tokens=admitted.cached_prompt_tokens,
    )


def _retried(attempt: int) -> pb.Notice:
    return pb.Notice(
        kind=pb.Notice.KIND_RETRIED,
        message="The request started again on another worker; nothing had been sent.",
        attempt=attempt,
    )
