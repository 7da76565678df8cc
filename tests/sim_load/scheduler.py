"""A Scheduler: the production's ledger, queues and control of overload, and what `headrace.scheduler.relay` does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from headrace.control.attempt_book import Attempt, Cause, Dispatched, Load, WorkerBook
from headrace.control.attempts import AttemptLedger
from headrace.control.errors import RULES, Failure, Reason, Retry
from headrace.control.lifecycle import Finish
from headrace.control.overload import OverloadControl
from headrace.control.retry_budget import WINDOW_S
from headrace.control.service_times import Served
from headrace.control.sliding_count import SlidingCount
from headrace.control.steps import AttemptEnd
from sim_load.clock import Clock
from sim_load.engine import CONTEXT, KV_CELLS, REVISION, SLOTS, Engine, Sequence

if TYPE_CHECKING:
    from sim_load.router import Router

TICK_S = 1.0
OVERDUE_S = 2.0


class Report(NamedTuple):
    """What a LoadReport holds."""

    loads: dict[str, Load]
    successes: int
    extra_attempts: int
    routers: int


class Scheduler:
    """One run of one Scheduler process, with its workers. A session is a Router's, by the Router's number + 1."""

    def __init__(self, clock: Clock, endpoint: str, zone: str, replicas: dict[str, int], first_run: int) -> None:
        self.clock = clock
        self.endpoint = endpoint
        self.zone = zone
        self.ledger = AttemptLedger()
        self.control = OverloadControl(self.ledger)
        self.engines: dict[str, Engine] = {}
        self.routers: dict[int, Router] = {}
        self.is_dead = False
        self.dispatched = 0
        self.told_ends = 0
        self.delay_s: dict[int, float] = {}
        self._successes = SlidingCount(WINDOW_S)
        self._extra = SlidingCount(WINDOW_S)
        self._timer_at = math.inf
        for run, (replica, epoch) in enumerate(replicas.items(), first_run):
            self.engines[replica] = Engine(clock, replica, run, self)
            self.ledger.open_worker(
                WorkerBook(
                    replica,
                    REVISION.name,
                    (epoch,),
                    slots=SLOTS,
                    kv_cells=KV_CELLS,
                    context_tokens=CONTEXT,
                    incarnation=run,
                )
            )
            self.control.open(replica)
        clock.after(TICK_S, self._tick)

    def kill(self) -> None:
        """It is gone, with all its workers."""
        self.is_dead = True
        for engine in self.engines.values():
            engine.kill()

    # From Routers

    def dispatch(self, wanted: Dispatched, sequence: Sequence) -> None:
        """A Router sends an attempt."""
        if self.is_dead:
            return
        self.dispatched += 1
        now = self.clock.now
        try:
            self.ledger.dispatch(wanted, now, sequence)
        except Failure as failure:
            self._tell_end(wanted.session, wanted.token, wanted.record_version, _refused(failure), failure)
        else:
            if wanted.is_extra:
                self._extra.add(now)
        self._advance()

    def cancel(self, token: int, session: int, cause: Cause) -> None:
        """A Router wants its end."""
        if self.is_dead:
            return
        attempt = self.ledger.cancel(token, session, cause, self.clock.now)
        if attempt is not None:
            self.engines[attempt.replica].cancel(token)
        self._advance()

    # From engines

    def admitted(self, engine: Engine, sequence: Sequence) -> None:
        attempt = self.ledger.admit(sequence.token, engine.incarnation, sequence.prompt, self.clock.now)
        if attempt is not None and (router := self.routers.get(attempt.session)):
            arguments = attempt.token, attempt.record_version, sequence.prompt, sequence.cached
            self.clock.after(self.delay_s[attempt.session], router.on_admitted, *arguments)

    def first_token(self, engine: Engine, sequence: Sequence) -> None:
        self._output(engine, sequence, 1)

    def finished(self, engine: Engine, sequence: Sequence) -> None:
        if sequence.generated > 1:
            self._output(engine, sequence, sequence.generated - 1)
        attempt, now = self.ledger.finish(sequence.token, engine.incarnation), self.clock.now
        if attempt is None:
            return
        is_whole = not sequence.is_cancelled
        if sequence.admitted_at:
            self.ledger.measure(attempt, _served(sequence, now, is_whole=is_whole), now)
        if is_whole:
            if not attempt.is_extra:
                self._successes.add(now)
            end = AttemptEnd(Finish.STOP, release_s=0.0, output_tokens=sequence.generated)
        else:
            end = AttemptEnd(Finish.CANCELLED, release_s=0.0, output_tokens=sequence.generated)
        self._tell_end(attempt.session, attempt.token, attempt.record_version, end)

    def failed(self, engine: Engine, sequence: Sequence) -> None:
        attempt = self.ledger.finish(sequence.token, engine.incarnation)
        if attempt is not None:
            failure = Failure(Reason.WORKER_LOST_BEFORE_OUTPUT, "Every attempt fails.")
            self._tell_end(attempt.session, attempt.token, attempt.record_version, _refused(failure))
        self._advance()

    def responded(self, engine: Engine, steps: int) -> None:
        now = self.clock.now
        self.control.stepped(engine.replica, steps, round(now * 1e9), now)

    def settled(self, engine: Engine) -> None:
        self._advance()

    def _output(self, engine: Engine, sequence: Sequence, tokens: int) -> None:
        session = self.ledger.workers[engine.replica].session_of(sequence.token)
        if router := self.routers.get(session):
            self.ledger.outputs.add(sequence.token)
            self.clock.after(self.delay_s[session], router.on_output, sequence.token, tokens)

    # The queue

    def _advance(self) -> None:
        now = self.clock.now
        self.ledger.advance(now)
        while True:
            ready = self.ledger.take_ready()
            for attempt in ready:
                self.engines[attempt.replica].submit(attempt.payload)
            for ended in self.ledger.take_ended():
                self._tell_end_here(ended.attempt, ended.failure)
            if not ready:
                break
        due = self.ledger.next_due()
        if due < self._timer_at:
            self._timer_at = due
            self.clock.at(due, self._on_timer)

    def _on_timer(self) -> None:
        if not self.is_dead and self.clock.now >= self._timer_at:
            self._timer_at = math.inf
            self._advance()

    def _tell_end_here(self, attempt: Attempt, failure: Failure | None) -> None:
        end = _refused(failure) if failure is not None else AttemptEnd(Finish.CANCELLED, output_tokens=0)
        self._tell_end(attempt.session, attempt.token, attempt.record_version, end, failure)

    def _tell_end(
        self, session: int, token: int, version: int, end: AttemptEnd, failure: Failure | None = None
    ) -> None:
        self.told_ends += 1
        if router := self.routers.get(session):
            self.clock.after(self.delay_s[session], router.on_ended, token, version, end, failure)

    # Load and time

    def report(self) -> Report:
        """How busy the workers are."""
        now = self.clock.now
        loads = {replica: self.ledger.load(replica, now) for replica in self.engines}
        return Report(
            {replica: load for replica, load in loads.items() if load is not None},
            self._successes.total(now),
            self._extra.total(now),
            len(self.routers),
        )

    def _tick(self) -> None:
        if self.is_dead:
            return
        now = self.clock.now
        self.control.tick(now)
        self.ledger.look_again()
        self._advance()
        for attempt in self.ledger.overdue(now, OVERDUE_S):
            self.engines[attempt.replica].cancel(attempt.token)
        self.clock.after(TICK_S, self._tick)


def _served(sequence: Sequence, now: float, *, is_whole: bool) -> Served:
    first, generated = sequence.first_at, sequence.generated
    return Served(
        prompt_tokens=max(1, sequence.prompt - sequence.cached),
        prefill_s=first - sequence.admitted_at if first else None,
        token_s=(now - first) / (generated - 1) if first and generated > 1 else None,
        output_tokens=generated if is_whole else None,
        hold_s=now - sequence.admitted_at if is_whole else None,
    )


def _refused(failure: Failure) -> AttemptEnd:
    """As headrace.router.telling reads it."""
    is_late = failure.reason is Reason.DEADLINE_EXCEEDED
    return AttemptEnd(
        Finish.DEADLINE_EXCEEDED if is_late else Finish.REJECTED,
        failure.reason,
        is_retryable=RULES[failure.reason].retry is Retry.ROUTER,
        is_free=failure.reason in (Reason.DRAINING, Reason.STALE_EPOCH),
        push_back_s=failure.retry_after_s if failure.retry_after_s != failure.rule.retry_after_s else None,
        output_tokens=0,
    )
