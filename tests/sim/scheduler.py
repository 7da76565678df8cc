"""The Scheduler: the real ledger of attempts, and what `headrace.scheduler.relay` does around it.

One Scheduler process owns all workers. A session is one Router's Attach stream; the Router opens another one when it
has lost it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.control.attempt_book import Attempt, Cause, Dispatched, WorkerBook
from headrace.control.attempts import AttemptLedger, DuplicateAttempt
from headrace.control.errors import RULES, Failure, Reason, Retry
from headrace.control.lifecycle import Finish
from headrace.control.request import AttemptEnd
from headrace.engine.contract import StepBatch
from headrace.engine.operations import Cancel, Grant
from headrace.engine.request import Continuation
from sim.engine import Engine, submit
from sim.timeline import Pipe

if TYPE_CHECKING:
    from sim.world import World

REVISION = "models/m/revisions/0123456789ab"
CAUSE_END: Mapping[Cause, tuple[Finish, Reason]] = {
    Cause.CANCELLED: (Finish.CANCELLED, Reason.CLIENT_CANCELLED),
    Cause.DEADLINE_EXCEEDED: (Finish.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED),
    Cause.QUEUE_TIMEOUT: (Finish.REJECTED, Reason.QUEUE_TIMEOUT),
    Cause.EXECUTION_TIMEOUT: (Finish.DEADLINE_EXCEEDED, Reason.EXECUTION_TIMEOUT),
    Cause.SLOW_CONSUMER: (Finish.SLOW_CONSUMER, Reason.SLOW_CONSUMER),
    Cause.DRAINED: (Finish.DRAINED, Reason.DRAINING),
}
ENGINE_END: Mapping[str, tuple[Finish, Reason | None]] = {
    "stop": (Finish.STOP, None),
    "length": (Finish.LENGTH, None),
    "deadline": (Finish.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED),
    "timeout": (Finish.DEADLINE_EXCEEDED, Reason.EXECUTION_TIMEOUT),
    "error": (Finish.FAILED, Reason.ENGINE_FAILED),
}


class Dispatch(NamedTuple):
    wanted: Dispatched
    prompt: list[int]
    known: Continuation | None = None


class Credit(NamedTuple):
    token: int
    limit: int


class CancelAttempt(NamedTuple):
    token: int
    cause: Cause


class Admitted(NamedTuple):
    token: int
    version: int
    cached: int


class Output(NamedTuple):
    token: int
    ids: tuple[int, ...]
    text: str


class Ended(NamedTuple):
    token: int
    version: int
    end: AttemptEnd


ToScheduler = Dispatch | Credit | CancelAttempt
ToRouter = Admitted | Output | Ended
_NAMES = {Dispatch: "dispatch", Credit: "credit", CancelAttempt: "cancel"}
_ORDER: Mapping[type, int] = {Dispatch: 0, Credit: 1, CancelAttempt: 2, Admitted: 0, Output: 1, Ended: 2}


def in_frame_order(messages: list[Any]) -> list[Any]:
    """As the reader of a frame takes them."""
    return sorted(messages, key=lambda message: _ORDER[type(message)])


class Scheduler:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = AttemptLedger()
        self.engines: dict[str, Engine] = {}
        self.sessions: dict[int, Pipe] = {}
        self._operations: dict[str, Pipe] = {}
        self._incarnations = 0
        self._due_ms = -1
        """When the ledger is looked at next; -1: at the next event only."""

    # Workers

    def start_worker(self, replica: str, epoch: int) -> None:
        """A new run of a worker's engine is ready."""
        self._incarnations += 1
        engine = Engine(self.world, replica, epoch, self._incarnations)
        scenario = self.world.scenario
        self.engines[replica] = engine
        self._operations[replica] = Pipe(self.world.time, 3, engine.take)
        self.ledger.open_worker(
            WorkerBook(
                replica,
                REVISION,
                (epoch,),
                slots=scenario.slots,
                kv_cells=scenario.kv_cells,
                context_tokens=scenario.kv_cells,
                incarnation=self._incarnations,
            )
        )

    def close_worker(self, replica: str, *, drained: bool) -> None:
        """A worker is known to be gone: each of its attempts ends, now and truthfully."""
        engine = self.engines.pop(replica, None)
        if engine is None:
            return
        assert engine.is_dead
        self._operations.pop(replica).cut()
        for attempt, had_output in self.ledger.close_worker(replica):
            self.world.counts["worker_lost_after_output" if had_output else "worker_lost_before_output"] += 1
            cause = attempt.cause or (Cause.DRAINED if drained else None)
            if cause is not None:
                finish, reason = CAUSE_END[cause]
            elif had_output:
                finish, reason = Finish.INTERRUPTED, Reason.STREAM_INTERRUPTED
            else:
                finish, reason = Finish.FAILED, Reason.WORKER_LOST_BEFORE_OUTPUT
            self._tell_end(attempt, finish, reason, release_s=None, tokens=None if had_output else 0)
        self._advance()

    def cut_worker(self, replica: str) -> None:
        """The grace of a drain is over."""
        for token in self.ledger.cancel_worker(replica, Cause.DRAINED, self.world.time.now):
            self._tell_engine(replica, Cancel((token,), "drained"))
        self._advance()

    # Sessions

    def open_session(self, number: int, pipe: Pipe) -> None:
        self.sessions[number] = pipe

    def close_session(self, number: int) -> None:
        """The Router of a session is gone."""
        if self.sessions.pop(number, None) is None:
            return
        for replica, tokens in self.ledger.close_session(number, self.world.time.now).items():
            self._tell_engine(replica, Cancel(tuple(tokens), "cancelled"))
        self._advance()

    def take(self, number: int, frame: list[ToScheduler]) -> None:
        """Act on one frame of a session."""
        if number not in self.sessions:
            return
        for message in in_frame_order(frame):
            self.take_one(number, message)
            self.world.repeat(_NAMES[type(message)], self.take_one, number, message)

    def take_one(self, number: int, message: ToScheduler) -> None:
        now = self.world.time.now
        if number not in self.sessions:
            return
        if isinstance(message, Dispatch):
            self._dispatch(message, now)
        elif isinstance(message, Credit):
            attempt = self.ledger.credit(message.token, number, message.limit)
            if attempt is not None:
                self._tell_engine(attempt.replica, Grant(((message.token, message.limit),)))
        else:
            attempt = self.ledger.cancel(message.token, number, message.cause, now)
            if attempt is not None:
                late = message.cause is Cause.DEADLINE_EXCEEDED
                self._tell_engine(attempt.replica, Cancel((message.token,), "deadline" if late else "cancelled"))
        self._advance()

    def _dispatch(self, message: Dispatch, now: float) -> None:
        wanted = message.wanted
        try:
            self.ledger.dispatch(wanted, now, (message.prompt, message.known))
        except DuplicateAttempt:
            return
        except Failure as failure:
            self.world.counts[f"refused_{failure.reason.name.lower()}"] += 1
            self._put(wanted.session, Ended(wanted.token, wanted.record_version, refusal(failure.reason)))
            return
        self.world.laws.on_dispatched(wanted, self.engines[wanted.replica])
        self._flush()

    # The queue

    def _advance(self) -> None:
        time = self.world.time
        self.ledger.advance(time.now)
        self._flush()
        due = self.ledger.next_due()
        due_ms = -1 if due == math.inf else math.floor(due * 1_000) + 1
        if due_ms != self._due_ms:
            self._due_ms = due_ms
            if due_ms >= 0:
                time.later(max(0, due_ms - time.now_ns // 1_000_000), self._on_timer, due_ms)

    def _on_timer(self, due_ms: int) -> None:
        if due_ms == self._due_ms:
            self._due_ms = -1
            self._advance()

    def _flush(self) -> None:
        now = self.world.time.now
        for attempt in self.ledger.take_ready():
            budget = attempt.budget
            operation = submit(
                attempt.token,
                *attempt.payload,
                max_tokens=attempt.max_tokens,
                credit=attempt.credit_limit,
                now_ns=self.world.time.now_ns,
                limits=(budget.remaining_s(now), budget.queue_remaining_s(now), budget.execution_s),
            )
            self._operations[attempt.replica].send(operation)
        for attempt, failure in ((ended.attempt, ended.failure) for ended in self.ledger.take_ended()):
            if failure is not None:
                self.world.counts[f"queue_{failure.reason.name.lower()}"] += 1
                self._put(attempt.session, Ended(attempt.token, attempt.record_version, refusal(failure.reason)))
                continue
            assert attempt.cause is not None
            self.world.counts["cancelled_in_queue"] += 1
            finish, reason = CAUSE_END[attempt.cause]
            self._tell_end(attempt, finish, reason, release_s=None, tokens=0)

    # Engines

    def on_batch(self, replica: str, incarnation: int, batch: StepBatch) -> None:
        """What an engine says."""
        ledger, now = self.ledger, self.world.time.now
        if ledger.current(replica, incarnation) is None:
            self.world.counts["late_incarnation"] += 1
            with self.world.laws.changes_nothing_in_ledger():
                for event in batch.events:
                    self._late_event(event, incarnation)
            return
        self._take_events(batch.events, incarnation, now)
        self._forward(replica, batch)
        for event in batch.events:
            if event["type"] in ("finished", "refused"):
                self.on_finished(event, incarnation)
                self.world.repeat("finish", self.on_finished, event, incarnation)
        self._advance()

    def _late_event(self, event: Mapping[str, Any], incarnation: int) -> None:
        """Of an engine that does not serve any more: the ledger itself has to refuse it."""
        if event["type"] == "admitted":
            self.ledger.admit(event["seq"], incarnation, event["prompt_tokens"], self.world.time.now)
        elif event["type"] in ("finished", "refused"):
            self.ledger.finish(event["seq"], incarnation)

    def _take_events(self, events: Sequence[Mapping[str, Any]], incarnation: int, now: float) -> None:
        for event in events:
            kind = event["type"]
            if kind == "admitted":
                attempt = self.ledger.admit(event["seq"], incarnation, event["prompt_tokens"], now)
                if attempt is not None:
                    self.world.counts["cached_prompt"] += bool(event["cached_tokens"])
                    self._put(attempt.session, Admitted(attempt.token, attempt.record_version, event["cached_tokens"]))
                    self._repeat_admit(event, incarnation)
            elif kind == "preempted":
                self.world.counts["preempted"] += 1
                self.ledger.preempt(event["seq"], incarnation, event["preemptions"])
            elif kind == "resumed":
                self.world.counts["resumed_after_preemption"] += 1
                self.ledger.resume(event["seq"], incarnation, event["preemptions"])

    def _repeat_admit(self, event: Mapping[str, Any], incarnation: int) -> None:
        now = self.world.time.now
        self.world.repeat("admit", self.ledger.admit, event["seq"], incarnation, event["prompt_tokens"], now)

    def _forward(self, replica: str, batch: StepBatch) -> None:
        book = self.ledger.workers[replica]
        for part in batch.parts():
            session = book.session_of(part.seq)
            if session in self.sessions:
                self.ledger.outputs.add(part.seq)
                self._put(session, Output(part.seq, tuple(part.token_ids), part.text.decode()))

    def on_finished(self, event: Mapping[str, Any], incarnation: int) -> None:
        """The engine has let go of an attempt."""
        attempt = self.ledger.finish(event["seq"], incarnation)
        if attempt is None:
            return
        if event["type"] == "refused":
            reason = Reason(event["error"]["reason"])
            self.world.counts[f"engine_refused_{reason.name.lower()}"] += 1
            self._put(attempt.session, Ended(attempt.token, attempt.record_version, refusal(reason)))
            return
        cause = attempt.cause or Cause.CANCELLED
        finish, reason = CAUSE_END[cause] if event["reason"] == "cancelled" else ENGINE_END[event["reason"]]
        self._tell_end(attempt, finish, reason, release_s=0.0, tokens=event["usage"]["emitted"])

    def _tell_end(
        self, attempt: Attempt, finish: Finish, reason: Reason | None, *, release_s: float | None, tokens: int | None
    ) -> None:
        end = AttemptEnd(
            finish,
            reason,
            is_retryable=reason is not None and RULES[reason].retry is Retry.ROUTER,
            is_free=reason is Reason.DRAINING and attempt.admitted_at is None,
            push_back_s=self.world.pauses.push_back_s() if reason is Reason.WORKER_LOST_BEFORE_OUTPUT else None,
            release_s=release_s,
            output_tokens=tokens,
        )
        self._put(attempt.session, Ended(attempt.token, attempt.record_version, end))

    def _put(self, session: int, message: ToRouter) -> None:
        if session in self.sessions:
            self.sessions[session].send(message)

    def _tell_engine(self, replica: str, operation: Grant | Cancel) -> None:
        pipe = self._operations.get(replica)
        if pipe is not None:
            pipe.send(operation)
            self.world.repeat("operation", pipe.send, operation)


def refusal(reason: Reason) -> AttemptEnd:
    """The end of an attempt that an engine never began with."""
    late = reason is Reason.DEADLINE_EXCEEDED
    return AttemptEnd(
        Finish.DEADLINE_EXCEEDED if late else Finish.REJECTED,
        reason,
        is_retryable=RULES[reason].retry is Retry.ROUTER,
        is_free=reason in (Reason.DRAINING, Reason.STALE_EPOCH),
        output_tokens=0,
    )
