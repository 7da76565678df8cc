"""All requests of this Router: those that run, those that may be resumed, and records of those that ended lately.

running    a call reads it, or an engine may hold something for it
kept       over, its events kept for whoever may resume it; bounded by time, and in bytes over all of them
remembered only its record, for GetRequest; bounded by time and number
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.control.holdings import ResourceLedger
from headrace.control.lifecycle import Phase
from headrace.control.quota import Charge
from headrace.control.resources import Replica
from headrace.control.router_admission import Demand
from headrace.control.snapshot import RoutingSnapshot
from headrace.router import telling
from headrace.router.admission import Admission, demand_of
from headrace.router.foreknown import Foreknown
from headrace.router.links import SchedulerLink
from headrace.router.plan import Plan, Planner
from headrace.router.quotas import TenantQuotas
from headrace.router.retrying import Retrying
from headrace.router.session import Session, new_name
from headrace.router.settings import RouterSettings
from headrace.rpc import status

_STATE: dict[Phase, Any] = {phase: pb.Request.State.Value(f"STATE_{phase.name}") for phase in Phase}


@dataclass(frozen=True, slots=True)
class _Kept:
    session: Session
    size: int
    until: float


@dataclass(frozen=True, slots=True)
class _Remembered:
    record: pb.Request
    tenant: str
    until: float


class Follower(Protocol):
    """A call that reads a request beside its reader."""

    def tick(self, now: float, slow_s: float) -> None:
        """Look at the time: a write that is held up for `slow_s` seconds ends the call."""


class Sessions:
    """Owner of every Session; see the module.

    Args:
        settings: bounds.
        planner: chooses replicas.
        on_over: told of each request once, when its end is decided and nothing is held in an engine.
        tag: of this Router, in the names of its requests.
    """

    def __init__(
        self, settings: RouterSettings, planner: Planner, on_over: Callable[[Session], None], tag: str
    ) -> None:
        self.resources = ResourceLedger()
        self.retrying = Retrying(settings)
        self.idle = asyncio.Event()
        self.idle.set()
        self.admission: Admission | None = None
        """Decides whether a request is taken in; None: all are."""
        self.foreknown: Foreknown | None = None
        """Knows what Schedulers would refuse; None: they are asked."""
        self.quotas: TenantQuotas | None = None
        """Decides whether its tenant may; None: all may."""
        self._settings = settings
        self._planner = planner
        self._tell_over = on_over
        self._tag = tag
        self._running: dict[str, Session] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()
        self.followers: set[Follower] = set()

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._running.values()))

    @property
    def kept_bytes(self) -> int:
        """Bytes of events kept for requests that are over."""
        return self._kept_bytes

    @property
    def detached(self) -> int:
        """Requests that run without a reader."""
        return sum(1 for session in self._running.values() if session.reader is None)

    def open(self, plan: Plan, tenant: str, name: str = "") -> Session:
        """A new request, with its first attempt dispatched; `name`: the one it has already, "" draws one.

        Raises:
            Failure: nobody can take it, or there is no room for it.
        """
        charge, demand = self._take(plan)
        session = Session(plan, tenant, self, self.resources, name or new_name(self._tag))
        if self.quotas is not None and charge is not None:
            self.quotas.keep(session.name, charge)
        if self.admission is not None and demand is not None:
            self.admission.keep(session.name, demand)
        try:
            session.start()
        except Failure:
            session.close()
            self._free(session)
            raise
        self._running[session.name] = session
        self.idle.clear()
        return session

    def check_room(self, plan: Plan) -> None:
        """Raise what `open` would raise now for want of room, counted as a refusal; nothing is taken."""
        charge, demand = self._take(plan)
        if self.quotas is not None and charge is not None:
            self.quotas.drop(charge)
        if self.admission is not None and demand is not None:
            self.admission.drop(demand)

    def _take(self, plan: Plan) -> tuple[Charge | None, Demand | None]:
        charge = self.quotas.take(plan, demand_of(plan).tokens) if self.quotas is not None else None
        try:
            self._check_foreknown(plan)
            demand = self.admission.take(plan) if self.admission is not None else None
        except Failure:
            if self.quotas is not None and charge is not None:
                self.quotas.drop(charge)
            raise
        return charge, demand

    def _check_foreknown(self, plan: Plan) -> None:
        try:
            if self.foreknown is not None:
                self.foreknown.check(plan)
        except Failure:
            if self.admission is not None:
                self.admission.core.came(plan.revision.name, time.monotonic())
            raise

    def find(self, name: str, tenant: str) -> Session | pb.Request:
        """A request by name: the session, or the record of one that is only remembered.

        Raises:
            Failure: NOT_FOUND, also where it is another tenant's.
        """
        session = self._running.get(name)
        if session is None and name in self._kept:
            session = self._kept[name].session
        if session is not None and session.tenant == tenant:
            return session
        remembered = self._remembered.get(name)
        if session is None and remembered is not None and remembered.tenant == tenant:
            return remembered.record
        raise Failure(
            Reason.NOT_FOUND,
            "No such request is known: it ended a while ago, or never was.",
            field="request",
            metadata={"resourceName": name[:128]},
        )

    def record(self, session: Session) -> pb.Request:
        """What is known of a request now."""
        machine = session.machine
        record, failure = machine.record, session.failure()
        now = record.freed_at if session.is_over and record.freed_at is not None else time.monotonic()
        told = pb.Request(
            name=session.name,
            state=_STATE[record.phase],
            version=record.version,
            revision=session.plan.revision.name,
            replica=machine.current.replica if machine.attempted else "",
            attempts=record.attempts,
            last_sequence=machine.sequence,
            attached=session.reader is not None,
            finish_reason=telling.FINISH_NUMBER[record.finish] if record.finish else None,
            usage=session.usage(),
            attempt_records=session.attempt_records(),
            timing=telling.timing(record, now),
        )
        telling.fixed(told, session.plan)
        if failure is not None:
            told.error.CopyFrom(status.to_proto(failure))
        told.receive_time.FromMilliseconds(round(session.received_at * 1000))
        return told

    def release(self, session: Session) -> None:
        """Look whether a session may leave `running`: it is over and nobody reads it."""
        if not session.is_over or session.reader is not None or self._running.pop(session.name, None) is None:
            return
        if not session.machine.sequence and not session.plan.is_shared:
            session.close()  # its caller never heard its name: nobody can ask, and under load most are such
        elif session.log is not None:
            until = time.monotonic() + self._settings.resume_window_s
            self._kept[session.name] = _Kept(session, session.log.size, until)
            self._kept_bytes += session.log.size
            while self._kept_bytes > self._settings.resume_bytes_total_max:
                self._forget_oldest_kept()
        else:
            self._remember(session)
        if not self._running:
            self.idle.set()

    def reopen(self, session: Session) -> None:
        """A call is about to read a kept session again."""
        kept = self._kept.pop(session.name, None)
        if kept is not None:
            self._kept_bytes -= kept.size
            self._running[session.name] = session
            self.idle.clear()

    def end_revoked(self, snapshot: RoutingSnapshot) -> None:
        """End what runs on a revision or a replica, or was started with a key, whose revocation says so."""
        ended = {r.name for r in snapshot.revocations if r.end_running}
        for session in self if ended else ():
            fixed = (session.plan.revision.name, session.plan.caller.key)
            if not ended.isdisjoint(fixed) or not ended.isdisjoint(session.replicas):
                session.revoke()

    def sweep(self) -> None:
        """Look at the time, for all of them."""
        for session in self:
            session.tick()
        now = time.monotonic()
        for follower in self.followers:
            follower.tick(now, self._settings.slow_consumer_s)
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._forget_oldest_kept()
        while self._remembered and next(iter(self._remembered.values())).until <= now:
            self._remembered.popitem(last=False)

    # What sessions call

    def place(self, session: Session) -> tuple[SchedulerLink, Replica]:
        """See Owner."""
        return self._planner.place(session.plan, session.avoided)

    def on_over(self, session: Session) -> None:
        """See Owner."""
        self._free(session)
        if self.foreknown is not None:
            self.foreknown.learn(session)
        self._tell_over(session)

    def _free(self, session: Session) -> None:
        if self.admission is not None:
            self.admission.release(session.name)
        if self.quotas is not None:
            self.quotas.release(session)

    def _forget_oldest_kept(self) -> None:
        _, kept = self._kept.popitem(last=False)
        self._kept_bytes -= kept.size
        self._remember(kept.session)

    def _remember(self, session: Session) -> None:
        until = time.monotonic() + self._settings.record_retention_s
        self._remembered[session.name] = _Remembered(self.record(session), session.tenant, until)
        if len(self._remembered) > self._settings.records_max:
            self._remembered.popitem(last=False)
        session.close()
