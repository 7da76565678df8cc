"""One request in a Router: the production's machine, with what the shell does for it and a reader that never waits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace.control.attempt_book import Dispatched
from headrace.control.attempt_log import AttemptCause
from headrace.control.credit import CreditWindow
from headrace.control.deadlines import Budget, longest_wait_s
from headrace.control.errors import Failure, Reason
from headrace.control.known_waits import Asked
from headrace.control.lifecycle import Finish
from headrace.control.quota import Charge
from headrace.control.request import RequestMachine, Terms
from headrace.control.resources import Replica
from headrace.control.router_admission import Demand
from headrace.control.steps import AttemptEnd, Step
from headrace.control.tenants import Tenant
from sim_load.engine import CONTEXT, REVISION, Sequence
from sim_load.traffic import PREFIX_TOKENS, Call

if TYPE_CHECKING:
    from sim_load.clients import Caller
    from sim_load.router import Router
    from sim_load.scheduler import Scheduler

BUFFER_BYTES = 32 * 16
SLOW_S = 30.0
_TIMER_SLACK_S = 0.002


class Request:
    """See the module."""

    def __init__(self, router: Router, call: Call, tenant: Tenant, caller: Caller) -> None:
        self.router = router
        self.call = call
        self.caller = caller
        self.received_at = router.clock.now
        self.demand = call.demand
        self.where: dict[int, Scheduler] = {}
        self.too_long: list[tuple[int, Failure]] = []
        """Attempts that Schedulers refused for their foreseen wait."""
        self.machine: RequestMachine | None = None
        self.is_over = False
        self._tenant = tenant
        self._charge: Charge | None = None
        self._queue_s = longest_wait_s(call.priority, queue_timeout_s=router.queue_s, ttft_target_s=router.ttft_s)
        self._admission = Demand(
            REVISION.name,
            call.priority,
            min(call.prompt + call.max_tokens, CONTEXT),
            4 * call.prompt + BUFFER_BYTES,
        )

    # Its beginning

    def open(self) -> None:
        """Take it in, and dispatch its first attempt.

        Raises:
            Failure: it is refused, and holds nothing.
        """
        router, now = self.router, self.router.clock.now
        charge = router.quotas.admit(self._tenant, self._admission.tokens, router.routers, now)
        try:
            self._check_known_waits()
            router.admission.admit(self._admission, now)
        except Failure:
            router.quotas.cancel(charge, now)
            raise
        self._charge = charge
        budget = Budget(now, now + self.call.deadline_s, queue_s=self._queue_s)
        terms = Terms(router.attempts_max, SLOW_S)
        window = CreditWindow(self.call.max_tokens + 8)
        self.machine = RequestMachine(budget, window, terms, router.resources, router.retries)
        try:
            self._send(router.place(self, []), AttemptCause.FIRST, is_charged=False)
        except Failure as failure:
            self.machine.ask_end(Reason.CLIENT_CANCELLED, now)
            self._release()
            raise failure from None
        router.running.add(self)
        clock = router.clock
        if self._queue_s is not None:
            clock.at(now + self._queue_s + _TIMER_SLACK_S, self.tick)
        clock.at(now + self.call.deadline_s + _TIMER_SLACK_S, self.tick)

    @property
    def _asked(self) -> Asked:
        call = self.call
        return Asked(
            REVISION.name, call.tenant, call.priority, self._admission.tokens, self.received_at + call.deadline_s,
            math.inf if self._queue_s is None else self._queue_s,
        )  # fmt: skip

    def _check_known_waits(self) -> None:
        """As headrace.router.foreknown."""
        router = self.router
        assert router.snapshot is not None
        if not len(router.known_waits):
            return
        ready = [r.name for r in router.snapshot.ready_of[REVISION.name]]
        wait_s = router.known_waits.refuses(self._asked, ready, router.clock.now)
        if wait_s is not None:
            raise Failure(
                Reason.OVERLOADED,
                "It would wait longer than it may, as each replica has just said.",
                metadata={"stage": "router", "bound": "wait"},
                retry_after_s=router.admission.retry_s(wait_s),
            )

    def _learn_waits(self) -> None:
        machine = self._machine
        if machine.sequence:
            return
        replica_of = {one.token: one.replica for one in machine.attempted}
        for token, failure in self.too_long:
            is_deadline = failure.reason is Reason.DEADLINE_UNMEETABLE
            self.router.known_waits.learn(
                self._asked,
                replica_of[token],
                expected_s=float(failure.metadata["expectedMs"]) / 1000,
                limit_s=float(failure.metadata["remainingMs" if is_deadline else "limitMs"]) / 1000,
                retry_after_s=failure.retry_after_s or 0.0,
                now=self.router.clock.now,
                is_deadline=is_deadline,
            )

    def _send(self, replica: Replica, cause: AttemptCause, *, is_charged: bool) -> None:
        machine, router, call = self._machine, self.router, self.call
        now, token = router.clock.now, next(router.tokens)
        credit = machine.dispatch(token, replica.name, cause, now)
        wanted = Dispatched(
            token=token,
            session=router.session,
            replica=replica.name,
            revision=REVISION.name,
            epoch=replica.epoch,
            input_bytes=4 * call.prompt,
            max_tokens=call.max_tokens,
            remaining_s=machine.budget.for_next_hop_s(now),
            queue_s=machine.budget.queue_remaining_s(now),
            credit_limit=credit,
            record_version=machine.record.attempt_version,
            tenant=self._tenant.name,
            weight=self._tenant.weight,
            priority=call.priority,
            prompt_estimate=call.prompt,
            is_extra=is_charged,
        )
        cells = min(call.prompt + call.max_tokens, CONTEXT)
        sequence = Sequence(token, call.prompt, call.output, cells, call.prefix, PREFIX_TOKENS if call.prefix else 0)
        router.send(wanted, self, self.demand, lambda scheduler: scheduler.dispatch(wanted, sequence))

    @property
    def _machine(self) -> RequestMachine:
        assert self.machine is not None
        return self.machine

    # What is heard

    def on_admitted(self, token: int, version: int, cached: int) -> None:
        self._machine.admitted(token, version, self.router.clock.now, cached_tokens=cached)
        self._look()

    def on_output(self, token: int, tokens: int) -> None:
        machine = self._machine
        is_first = machine.record.first_output_at is None
        if machine.output(token, tokens, self.router.clock.now) and is_first:
            self.caller.first_token(self)
        self._look()

    def on_ended(self, token: int, version: int, end: AttemptEnd) -> None:
        self._machine.ended(token, version, end, self.router.clock.now)
        self._look()

    def on_lost(self, token: int) -> None:
        """As headrace.router.telling.lost."""
        record = self._machine.record
        is_before = record.first_output_at is None
        end = AttemptEnd(
            Finish.FAILED if is_before else Finish.INTERRUPTED,
            Reason.WORKER_LOST_BEFORE_OUTPUT if is_before else Reason.STREAM_INTERRUPTED,
            is_retryable=is_before,
        )
        self.on_ended(token, record.attempt_version, end)

    def tick(self) -> None:
        """A limit may have passed."""
        if self.is_over:
            return
        if self._machine.tick(self.router.clock.now):
            self._stop()
        self._look()

    def _stop(self) -> None:
        finish = self._machine.record.finish
        assert finish is not None
        for token in self.where:
            if self._machine.runs(token):
                self.router.cancel(token, finish)

    # What follows

    def _look(self) -> None:
        """The reader takes whatever is next."""
        if self.is_over:
            return
        machine, clock = self._machine, self.router.clock
        while (step := machine.next(clock.now)) not in (Step.WAIT, Step.OVER):
            if step is Step.RETRY:
                self._again()
                continue
            tokens = machine.pending if step is Step.DELTA else 0
            sequence = machine.take(step)
            if sequence:
                machine.write(tokens, sequence)
        if step is Step.WAIT and machine.retry_at is not None:
            clock.at(machine.retry_at + _TIMER_SLACK_S, self._look)
        if step is Step.OVER and machine.is_over:
            self._learn_waits()
            self._release()
            self.caller.ended(self)

    def _again(self) -> None:
        """As headrace.router.attempting."""
        machine, router, now = self._machine, self.router, self.router.clock.now
        record = machine.record
        avoided = record.tried + router.retries.avoid(now) if record.overloads else record.tried
        try:
            replica = router.place(self, avoided)
        except Failure:
            machine.give_up()
            return
        is_charged = machine.is_charged
        if not router.has_time(replica.name, machine.budget.remaining_s(now)):
            machine.give_up()
        elif is_charged and not router.budget.take(now):
            machine.give_up("budget")
        else:
            self._send(replica, AttemptCause.RETRY, is_charged=is_charged)

    def _release(self) -> None:
        """It is over: everything is given back, once."""
        router, machine, now = self.router, self._machine, self.router.clock.now
        assert self._charge is not None
        assert not self.is_over
        self.is_over = True
        router.running.discard(self)
        router.admission.release(self._admission)
        record = machine.record
        if record.admitted_at is None:
            router.quotas.cancel(self._charge, now)
        else:
            router.quotas.settle(self._charge, self.call.prompt + record.output_tokens, now)
        if record.finish is not None and record.finish.is_ok and machine.current.cause is AttemptCause.FIRST:
            router.budget.succeeded(now)
        machine.close()
