"""InferenceService: the public calls. Each either reads a session (call.py) or looks one up (sessions.py)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.idempotency import Origin
from headrace.router.admission import Admission
from headrace.router.admission_metrics import AdmissionMetrics
from headrace.router.call import Call, first_frame
from headrace.router.elsewhere import Elsewhere
from headrace.router.fleet import Fleet
from headrace.router.foreknown import Foreknown
from headrace.router.idempotency import Keys
from headrace.router.identity import Identities
from headrace.router.lookups import Lookups
from headrace.router.metrics import RouterMetrics
from headrace.router.plan import Plan, Planner
from headrace.router.quotas import TenantQuotas
from headrace.router.relaying import Sharing
from headrace.router.retrying import RetryMetrics
from headrace.router.routes import Routes
from headrace.router.session import Session
from headrace.router.sessions import Sessions
from headrace.router.settings import RouterSettings
from headrace.router.tenant_metrics import TenantMetrics
from headrace.router.usage import UsageReport
from headrace.rpc.calls import Context, has_written

START_S = 10.0
DRAINED_CONFIRM_S = 2.0


def _already_bytes(event: bytes) -> bytes:
    return event


SERIALIZERS: Mapping[str, Callable[[Any], bytes]] = dict.fromkeys(
    ("Generate", "GenerateInteractive", "ResumeGenerate"), _already_bytes
)
"""The streaming calls write events that are bytes already: the same bytes that the event log keeps."""


class InferenceService:
    """Serves headrace.api.inference.v1.InferenceService."""

    def __init__(
        self, settings: RouterSettings, routes: Routes, metrics: RouterMetrics, here: Origin | None = None
    ) -> None:
        here = here or Origin("", "")
        fleet = Fleet(here)
        self.sessions = Sessions(settings, Planner(settings, routes), self._on_over, fleet.tag)
        routes.fleet_listeners.append(self.sessions.retrying.on_load)
        RetryMetrics(metrics.registry, self.sessions.retrying)
        self.sharing = Sharing(settings, Keys(settings, here, metrics), self.sessions, metrics)
        self.lookups = Lookups(self.sessions, metrics)
        self.elsewhere = Elsewhere(fleet, self.sharing, metrics, settings.followers_max)
        self.admission = Admission(settings, routes, AdmissionMetrics(metrics.registry))
        self.sessions.admission = self.admission
        self.sessions.foreknown = Foreknown(self.admission.core.retry_s)
        self._usage = UsageReport(metrics.registry, logs=settings.usage_log)
        tenant_metrics = TenantMetrics(metrics.registry, settings.tenant_labels_max)
        self.quotas = TenantQuotas(routes, tenant_metrics, lambda: self.admission.routers)
        self.sessions.quotas = self.quotas
        self.identities = Identities(settings, routes)
        self.draining = False
        self._settings = settings
        self._planner = Planner(settings, routes)
        self._metrics = metrics
        self._opening = 0

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Run one request; see the proto."""
        await self._run(request, context, interactive=False)

    async def GenerateInteractive(self, _frames: Any, context: Context) -> None:  # noqa: N802
        """Run, or go on with, one request whose reader says what it has read; see the proto."""
        self._refuse_more()
        self.identities.caller(context)  # before anything of an unknown caller is waited for
        self._opening += 1
        try:
            first = await first_frame(context, START_S)
        finally:
            self._opening -= 1
        if first.WhichOneof("frame") == "resume":
            await self._resume(first.resume, context, interactive=True)
        else:
            await self._run(first.start, context, interactive=True)

    async def ResumeGenerate(self, request: pb.ResumeGenerateRequest, context: Context) -> None:  # noqa: N802
        """Repeat what was missed and go on; see the proto."""
        await self._resume(request, context, interactive=False)

    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.Request:  # noqa: N802
        """Tell what is known of a request; see the proto."""
        return await self._record(request.request, context, cancel=False)

    async def CancelRequest(self, request: pb.CancelRequestRequest, context: Context) -> pb.Request:  # noqa: N802
        """End a request, and wait a little for the engine's confirmation; see the proto."""
        return await self._record(request.request, context, cancel=True)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait for the running ones, and end as DRAINED what still runs after `grace_s` s."""
        self.draining = True
        for limit_s in (grace_s, DRAINED_CONFIRM_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self.sessions.idle.wait()
                return
            for session in self.sessions:
                session.drain()

    def tend(self) -> None:
        """Look at the time for all requests, and set the gauges; a few times a second."""
        self.sessions.sweep()
        self.admission.tend(self.sessions)
        self.quotas.tend()
        self.sessions.retrying.tend()
        if self.sessions.foreknown is not None:
            self._metrics.foreknown = self.sessions.foreknown.core.refused
        self._metrics.active.set(len(self.sessions))
        self._metrics.detached.set(self.sessions.detached)
        self._metrics.kept_bytes.set(self.sessions.kept_bytes)
        self._metrics.followers.set(len(self.sessions.followers))
        self._metrics.idempotency_writes_pending.set(self.sharing.keys.pending)
        self._metrics.idempotency_keys.set(self.sharing.keys.held)
        self._metrics.take_resources(self.sessions.resources)
        self._metrics.tasks.set(len(asyncio.all_tasks()))

    async def _run(self, request: pb.GenerateRequest, context: Context, *, interactive: bool) -> None:
        now = time.monotonic()
        try:
            await self._serve(request, context, now, interactive=interactive)
        except Failure as failure:
            if not has_written(context):
                self._metrics.refused(failure.reason, time.monotonic() - now)
            raise

    async def _serve(self, request: pb.GenerateRequest, context: Context, now: float, *, interactive: bool) -> None:
        self._refuse_more()
        caller = self.identities.caller(context, starts=True)
        plan, tenant = self._planner.plan(request, now, now + self._remaining_s(context), caller), caller.tenant.name
        if plan.is_shared:
            start = functools.partial(self._start, plan, tenant)
            await self.sharing.run(request, plan, tenant, context, start, interactive=interactive)
        else:
            await Call(context, self._metrics).serve(self._start(plan, tenant), interactive=interactive)

    def _start(self, plan: Plan, tenant: str, name: str = "") -> Session:
        if name:  # the store was asked meanwhile
            self._refuse_more()
        return self.sessions.open(plan, tenant, name)

    async def _resume(self, request: pb.ResumeGenerateRequest, context: Context, *, interactive: bool) -> None:
        self._refuse_more()
        tenant = self._asking(request.request, context)
        where = self.elsewhere if self.elsewhere.has(request.request) else self.lookups
        await where.resume(request, tenant, context, interactive=interactive)

    async def _record(self, name: str, context: Context, *, cancel: bool) -> pb.Request:
        tenant = self._asking(name, context)
        if self.elsewhere.has(name):
            return await self.elsewhere.record(name, tenant, context, cancel=cancel)
        return await self.lookups.record(name, tenant, cancel=cancel, left_s=self._remaining_s(context))

    def _asking(self, name: str, context: Context) -> str:
        """The tenant that asks for a request."""
        if not name.startswith("requests/"):
            raise InvalidRequest((Violation("request", 'must be the name of a request, "requests/..."'),))
        return self.identities.caller(context).tenant.name

    def _on_over(self, session: Session) -> None:
        self._metrics.finished(session)
        self._usage.finished(session)
        self.sharing.keys.on_over(session)

    def _refuse_more(self) -> None:
        if self.draining:
            raise Failure(Reason.DRAINING, "This Router is shutting down; use another one.")
        self.admission.refuse_early(len(self.sessions), self._opening)

    def _remaining_s(self, context: Context) -> float:
        remaining_s = context.time_remaining()
        # A caller without a deadline shows as None or as centuries.
        if remaining_s is None or remaining_s > 10 * 365 * 86400:
            return self._settings.deadline_s_default
        return remaining_s
