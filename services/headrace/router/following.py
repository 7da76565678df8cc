"""Calls that read a request beside its reader: duplicates of one idempotency key.

    reader     takes events as they come; generation follows its pace
    followers  read the event log, each at its own pace; nothing waits for them

A follower that falls behind what the log keeps ends with EVENTS_EXPIRED, one that does not read at all with
SLOW_CONSUMER. When the reader leaves, the first follower that notices goes on as the reader, so that the request is
never without one while anybody wants it; without followers it runs on by the rules of its log.
"""

from __future__ import annotations

import asyncio
import time

from headrace.control.errors import Failure, Reason
from headrace.control.event_log import EventLog
from headrace.router.call import Call, missing
from headrace.router.metrics import RouterMetrics
from headrace.router.session import Session
from headrace.router.sessions import Sessions
from headrace.rpc.calls import Context


class Writer(Call):
    """A call that writes what others have read; `Sessions.followers` has those that write now."""

    def __init__(self, context: Context, metrics: RouterMetrics) -> None:
        super().__init__(context, metrics)
        self._writing_since: float | None = None

    def tick(self, now: float, slow_s: float) -> None:
        """See sessions.Follower."""
        if self._writing_since is not None and now - self._writing_since >= slow_s:
            self.break_off(Failure(Reason.SLOW_CONSUMER, "The stream was not read for too long."))

    async def write(self, data: bytes) -> None:
        """Write one event as it is."""
        self._writing_since = time.monotonic()
        await self._context.write(data)
        self._writing_since = None
        self._metrics.writes += 1

    def broken(self) -> Failure | None:
        """To be asked when the task was cancelled: why this side has ended the call; None: its caller has."""
        if self._broken is None or self._task is None:
            return None
        self._task.uncancel()
        return self._broken


class FollowingCall(Writer):
    """The reading end of a duplicate; made in the handler's task."""

    def __init__(self, context: Context, metrics: RouterMetrics, sessions: Sessions) -> None:
        super().__init__(context, metrics)
        self._sessions = sessions

    async def follow(self, session: Session, *, after_sequence: int = 0, interactive: bool = False) -> None:
        """Write all events behind `after_sequence` until the last one.

        `interactive`: and hear frames, of which only `cancel` counts: what others read is not this caller's to pace.

        Raises:
            Failure: how the request ended, unless well; or why this call does.
        """
        assert session.log is not None, "a request with a key has a log"
        missing(session.log.after, after_sequence)
        session.followers.add(self)
        self._sessions.followers.add(self)
        try:
            if interactive:
                self.begin_to_hear(session)
            position = await self._follow(session, session.log, after_sequence)
        except asyncio.CancelledError:
            failure = self.broken()
            if failure is None:
                raise
            raise failure from None
        finally:
            session.followers.discard(self)
            self._sessions.followers.discard(self)
        if not session.machine.is_told:
            await self.serve(session, after_sequence=position)
            return
        self.is_over = True
        ended = session.failure()
        if ended is not None:
            raise ended

    async def _follow(self, session: Session, log: EventLog, position: int) -> int:
        """Until the end, or until there is no reader: this call can then be it. Returns how far it has come."""
        machine = session.machine
        while True:
            for event in missing(log.after, position):
                await self.write(event.data)
                position = event.sequence
            if log.last > position:
                continue
            if machine.is_told or session.reader is None:
                return position
            await self._wake.wait()
            self._wake.clear()
            self._metrics.wakeups += 1
