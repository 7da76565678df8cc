"""The attempts of one request: each is built as a Dispatch, sent to its Scheduler, and told to stop.

Whether there is another one is the machine's to say (headrace.control.request), where it runs the planner's.
"""

from __future__ import annotations

import secrets
import time

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.lifecycle import Finish
from headrace.control.request import RequestMachine
from headrace.control.resources import Replica
from headrace.router.links import AttemptOwner, SchedulerLink
from headrace.router.plan import Plan
from headrace.router.telling import FINISH_NUMBER


class Attempting:
    """See the module.

    Args:
        request: name of the request.
        plan: what is fixed for it.
        machine: its state.
        owner: who hears of the attempts.
    """

    def __init__(self, request: str, plan: Plan, machine: RequestMachine, owner: AttemptOwner) -> None:
        self.admitted: pb.Admitted | None = None
        """What the engine said when it began with the newest attempt."""
        self.ended: pb.Ended | None = None
        """The end of the newest attempt."""
        self._request = request
        self._plan = plan
        self._machine = machine
        self._owner = owner
        self._link: SchedulerLink | None = None

    def start(self, link: SchedulerLink, replica: Replica) -> None:
        """Dispatch an attempt."""
        machine = self._machine
        attempt = secrets.randbits(62) + 1
        credit = machine.dispatch(attempt, replica.name)
        self.ended = self.admitted = None
        self._link = link
        link.dispatch(self._dispatch(attempt, replica, credit), self._owner)

    def grant(self, limit: int, *, urgent: bool) -> None:
        """Let the running attempt generate up to `limit` tokens; `urgent`: it waits for them."""
        if self._link is not None:
            self._link.grant(self._machine.record.attempt, limit, urgent=urgent)

    def stop(self, finish: Finish | None = None) -> None:
        """Ask for the end of the running attempt, for `finish` or for what the request ended with."""
        record = self._machine.record
        cause = finish or record.finish
        if self._link is not None and cause is not None:
            self._link.cancel(record.attempt, FINISH_NUMBER[cause])

    def _dispatch(self, attempt: int, replica: Replica, credit: int) -> pb.Dispatch:
        machine, plan, now = self._machine, self._plan, time.monotonic()
        message = pb.Dispatch(
            attempt=attempt,
            request=self._request,
            revision=replica.revision,
            replica=replica.name,
            epoch=replica.epoch,
            generate=plan.generate,
            credit_limit=credit,
            output_tokens_max=plan.output_tokens_max,
            record_version=machine.record.attempt_version,
        )
        message.remaining.FromMicroseconds(int(plan.budget.for_next_hop_s(now) * 1e6))
        queue_s = plan.budget.queue_remaining_s(now)
        if queue_s is not None:
            message.queue_timeout.FromMicroseconds(int(queue_s * 1e6))
        if plan.budget.execution_s is not None:
            message.execution_timeout.FromMicroseconds(int(plan.budget.execution_s * 1e6))
        return message
