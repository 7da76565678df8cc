"""Requests of this Router, by name: looked up, ended, read on; for callers here and at other Routers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.control.request import CONFIRM_S
from headrace.router.call import Call
from headrace.router.metrics import RouterMetrics
from headrace.router.session import Session
from headrace.router.sessions import Sessions
from headrace.rpc.calls import Context


class Lookups:
    """Of one Router.

    Args:
        sessions: the requests here.
        metrics: what is counted.
    """

    def __init__(self, sessions: Sessions, metrics: RouterMetrics) -> None:
        self._sessions = sessions
        self._metrics = metrics

    async def record(self, name: str, tenant: str, *, cancel: bool, left_s: float) -> pb.Request:
        """What is known of a request; `cancel`: end it before, and wait for the confirmation, at most `left_s` seconds.

        Raises:
            Failure: NOT_FOUND, also where it is another tenant's.
        """
        found = self._sessions.find(name, tenant)
        if not isinstance(found, Session):
            return found
        if cancel:
            found.cancel()
            await found.wait_over(min(CONFIRM_S, left_s))
        return self._sessions.record(found)

    async def resume(
        self,
        asked: pb.ResumeGenerateRequest,
        tenant: str,
        context: Context,
        *,
        interactive: bool,
        begin: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Write the events of a request that its caller missed, and those that come; `begin` is called before.

        Raises:
            Failure: how the request ended, unless well; or why it cannot be resumed.
        """
        found = self._sessions.find(asked.request, tenant)
        if not isinstance(found, Session):
            raise Failure(Reason.EVENTS_EXPIRED, "The request ended, and its events are no longer kept.")
        if found.log is None:
            raise Failure(
                Reason.NOT_RESUMABLE, "The request was made without on_disconnect CONTINUE; its events are not kept."
            )
        self._sessions.reopen(found)
        self._metrics.resumes += 1
        try:
            if begin is not None:
                await begin()
            call = Call(context, self._metrics)
            await call.serve(found, after_sequence=asked.after_sequence, interactive=interactive)
        finally:
            self._sessions.release(found)
