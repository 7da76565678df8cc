"""The attempts of one request: each is built as a Dispatch, sent to its Scheduler, and told to stop.

Whether there is another one is the machine's to say (headrace.control.request), where it runs the planner's, and
whether it may be had the retry budget's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempt_log import AttemptCause
from headrace.control.continuation import KnownAnswer
from headrace.control.errors import Failure
from headrace.control.hedge import is_due
from headrace.control.lifecycle import Finish
from headrace.control.request import RequestMachine
from headrace.control.resources import Replica
from headrace.router.links import AttemptOwner, SchedulerLink
from headrace.router.plan import Plan
from headrace.router.retrying import Retrying
from headrace.router.telling import FINISH_NUMBER

TIMER_SLACK_S = 0.002
"""Timers of the loop may fire a millisecond early."""

Place = Callable[[], tuple[SchedulerLink, Replica]]
"""Chooses where the next attempt runs; raises Failure: nobody can take it."""


class RequestOwner(AttemptOwner, Protocol):
    """The session, as its attempts see it."""

    def look(self) -> None:
        """The time of the next attempt has come."""


@dataclass(slots=True)
class Sent:
    """One attempt, as far as its Scheduler has spoken."""

    link: SchedulerLink
    admitted: pb.Admitted | None = None
    ended: pb.Ended | None = None


class Attempting:
    """See the module.

    Args:
        request: name of the request.
        plan: what is fixed for it.
        machine: its state.
        owner: who hears of the attempts.
        place: where the next one runs.
        retrying: what all requests share.
    """

    def __init__(
        self, request: str, plan: Plan, machine: RequestMachine, owner: RequestOwner, place: Place, retrying: Retrying
    ) -> None:
        self.sent: dict[int, Sent] = {}
        """By token, in order."""
        self.known = KnownAnswer(plan.terms.known_max) if plan.terms.known_max else None
        """The answer so far, where another worker is to go on with it; None: it is not."""
        self._request = request
        self._plan = plan
        self._machine = machine
        self._owner = owner
        self._place = place
        self._retrying = retrying
        self._dispatched_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def admitted(self) -> pb.Admitted | None:
        """What the engine said when it began with the attempt that counts."""
        sent = self.sent.get(self._machine.record.attempt)
        return sent.admitted if sent is not None else None

    @property
    def ended(self) -> pb.Ended | None:
        """The end of the attempt that counts, as its Scheduler said; None: it has not."""
        sent = self.sent.get(self._machine.record.attempt)
        return sent.ended if sent is not None else None

    @property
    def ends(self) -> dict[int, pb.Ended]:
        """By token, what Schedulers have said of the ends of attempts."""
        return {token: sent.ended for token, sent in self.sent.items() if sent.ended is not None}

    @property
    def avoided(self) -> list[str]:
        """Replicas that the next attempt does not go to: those that were tried; overloaded ones, where that matters."""
        record = self._machine.record
        if record.overloads or self._machine.is_running:
            return record.tried + self._retrying.policy.avoid(time.monotonic())
        return record.tried

    def start(self) -> None:
        """Dispatch the first attempt.

        Raises:
            Failure: nobody can take it.
        """
        self._send(*self._place(), AttemptCause.FIRST, is_charged=False)

    def again(self) -> None:
        """Dispatch the next attempt, or tell the machine that there is none."""
        machine = self._machine
        try:
            link, replica = self._place()
        except Failure:
            self._retrying.given_up["nobody"] += 1
            machine.give_up()
            return
        is_charged = machine.is_charged
        why = self._refusal(replica, is_charged=is_charged)
        if why is not None:
            machine.give_up(why)
        else:
            self._send(link, replica, AttemptCause.RETRY, is_charged=is_charged)

    def await_retry(self) -> None:
        """Have the owner look when the time of the next attempt has come."""
        retry_at = self._machine.retry_at
        if retry_at is not None:
            self._call_at(retry_at, self._owner.look)

    def grant(self, limit: int, *, urgent: bool) -> None:
        """Let the attempt that counts generate up to `limit` tokens; `urgent`: it waits for them."""
        token = self._machine.record.attempt
        self.sent[token].link.grant(token, limit, urgent=urgent)

    def stop(self, finish: Finish | None = None) -> None:
        """Ask for the end of what runs, for `finish` or for what the request ended with."""
        cause = finish or self._machine.record.finish
        if cause is None:
            return
        for token, sent in self.sent.items():
            if self._machine.runs(token):
                sent.link.cancel(token, FINISH_NUMBER[cause])

    def stop_loser(self) -> None:
        """Ask for the end of an attempt that another one has beaten."""
        token, self._machine.unstopped = self._machine.unstopped, 0
        if token:
            self.sent[token].link.cancel(token, FINISH_NUMBER[Finish.CANCELLED])

    def close(self) -> None:
        """There will be no other attempt."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hedge(self) -> None:
        """The first token has been waited for long enough: a rival starts, if there are room, time and a replica."""
        machine, now = self._machine, time.monotonic()
        if not machine.may_hedge or not is_due(self._retrying.hedge_after_s, self._dispatched_at, now):
            return
        try:
            link, replica = self._place()
        except Failure:
            return
        if self._refusal(replica, is_charged=True) is None:
            self._send(link, replica, AttemptCause.HEDGE, is_charged=True)

    def _refusal(self, replica: Replica, *, is_charged: bool) -> str | None:
        """Why another attempt is not made although somebody could take it; None: it is, and paid for."""
        now = time.monotonic()
        if not self._retrying.has_time(replica.name, self._plan.budget.remaining_s(now), now):
            return ""
        return "budget" if is_charged and not self._retrying.budget.take(now) else None

    def _send(self, link: SchedulerLink, replica: Replica, cause: AttemptCause, *, is_charged: bool) -> None:
        machine = self._machine
        attempt = secrets.randbits(62) + 1
        if cause is AttemptCause.HEDGE:
            credit = machine.hedge(attempt, replica.name)
        else:
            self._dispatched_at = time.monotonic()
            credit = machine.dispatch(attempt, replica.name, cause, self._dispatched_at)
            cause = machine.current.cause
        self.sent[attempt] = Sent(link)
        self._retrying.attempts[cause] += 1
        message = self._dispatch(attempt, replica, credit)
        if cause is AttemptCause.CONTINUATION:
            self._continue(message)
        # An attempt behind one that a draining worker refused is the first that anybody begins with.
        message.cause = int(cause if is_charged else AttemptCause.FIRST)  # type: ignore[assignment]
        link.dispatch(message, self._owner, self._plan.demand)
        if self._retrying.hedge_after_s and machine.may_hedge:
            self._call_at(self._dispatched_at + self._retrying.hedge_after_s, self._hedge)

    def _dispatch(self, attempt: int, replica: Replica, credit: int) -> pb.Dispatch:
        plan, now = self._plan, time.monotonic()
        message = pb.Dispatch(
            attempt=attempt,
            request=self._request,
            revision=replica.revision,
            replica=replica.name,
            epoch=replica.epoch,
            generate=plan.generate,
            credit_limit=credit,
            output_tokens_max=plan.output_tokens_max,
            record_version=self._machine.version_of(attempt),
            tenant=plan.caller.tenant.name,
            tenant_weight=plan.caller.tenant.weight,
            priority=plan.generate.priority,
            effective_effort=plan.generate.reasoning_effort,
        )
        message.remaining.FromMicroseconds(int(plan.budget.for_next_hop_s(now) * 1e6))
        queue_s = plan.budget.queue_remaining_s(now)
        if queue_s is not None:
            message.queue_timeout.FromMicroseconds(int(queue_s * 1e6))
        if plan.budget.execution_s is not None:
            message.execution_timeout.FromMicroseconds(int(plan.budget.execution_s * 1e6))
        return message

    def _continue(self, message: pb.Dispatch) -> None:
        """Let an attempt begin behind all output so far; it gets a wait of its own, and what is left of the run."""
        known, budget, admitted_at = self.known, self._plan.budget, self._machine.record.admitted_at
        assert known is not None
        message.continuation.token_ids.extend(known.token_ids)
        message.continuation.text_bytes = known.text_bytes
        if budget.queue_s is not None:
            message.queue_timeout.FromMicroseconds(int(budget.queue_s * 1e6))
        if budget.execution_s is not None and admitted_at is not None:
            left_s = max(0.001, admitted_at + budget.execution_s - self._dispatched_at)
            message.execution_timeout.FromMicroseconds(int(left_s * 1e6))

    def _call_at(self, at: float, call: Callable[[], None]) -> None:
        self.close()
        delay_s = max(0.0, at - time.monotonic()) + TIMER_SLACK_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, call)
