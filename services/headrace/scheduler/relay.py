"""The hot path: frames from Routers to engines, steps from engines to Routers.

    Router --Dispatch, Credit, Cancel--> Relay --> ledger and queue --> engine of the replica
    Router <--one frame a step--------- Session <-- Relay <--one response a step-- engine

Decisions are the ledger's (headrace.control.attempts); this file only carries. Once a step: a look-up for each
sequence that has output, one append for each session, one wake-up for each session. Nothing is done for a token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempt_book import Attempt, Cause, WorkerBook
from headrace.control.attempts import AttemptLedger, DuplicateAttempt
from headrace.control.errors import Failure, InvalidRequest, Violation
from headrace.control.overload import OverloadControl, OverloadSettings
from headrace.control.reconcile import Reconciler
from headrace.control.sliding_count import SlidingCount
from headrace.engine.contract import StepBatch
from headrace.runtime.telemetry import get_logger
from headrace.scheduler import codec, queue_codec
from headrace.scheduler.columns import split_by_owner
from headrace.scheduler.door_watch import DoorWatch
from headrace.scheduler.kv_counts import KvCounts
from headrace.scheduler.relay_counts import RelayCounts
from headrace.scheduler.session import Session
from headrace.triton.engine_client import EngineClient

OVERDUE_S = 2.0
"""The engine enforces deadlines and limits; an attempt that is this much past one is cancelled from here."""
CANCEL_CONFIRM_S = 10.0
"""Time that an engine gets to confirm a cancel. It takes one between two steps, and a step that lasts longer than the
silence that counts as death (3 s) is the end of it anyway; so this is three times what a living engine can need."""
RECENT_S = 10.0
"""Over which load reports count what ended well and what was tried again."""
_CANCEL: Mapping[Cause, str] = {Cause.DEADLINE_EXCEEDED: "deadline", Cause.DRAINED: "drained"}
"""The engine's reason of a cancel for a cause, where it is not "cancelled"."""


class Relay:
    """All sessions and all engines of one Scheduler."""

    def __init__(self, ledger: AttemptLedger, overload: OverloadSettings | None = None) -> None:
        self.ledger = ledger
        self.overload = OverloadControl(ledger, overload)
        self.counts = RelayCounts()
        self.kv = KvCounts()
        self.sessions: dict[int, Session] = {}
        self._engines: dict[str, EngineClient] = {}
        self._looks: dict[str, Reconciler] = {}
        self._ends: dict[str, asyncio.Event] = {}
        """Set at each end, by replica, where someone waits for a worker to be idle."""
        self.doors = DoorWatch()
        self._numbers = itertools.count(1)
        self._successes = SlidingCount(RECENT_S)
        self._extra_attempts = SlidingCount(RECENT_S)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    # Sessions

    def open_session(self, router: str) -> Session:
        """A Router attached."""
        session = Session(next(self._numbers), router, self)
        self.sessions[session.number] = session
        return session

    def close_session(self, session: Session) -> None:
        """A Router is gone: what it started is ended in the engines."""
        if self.sessions.pop(session.number, None) is None:
            return
        self.counts.frames_out += session.writes
        self.counts.wakeups += session.wakeups
        self.counts.overflows += session.is_overflown
        now = time.monotonic()
        for replica, tokens in self.ledger.close_session(session.number, now).items():
            self._engines[replica].cancel(tokens)
        self._advance(now)

    def take(self, session: Session, frame: pb.AttachRequest) -> None:
        """Act on one frame of a Router. Dispatches first: a credit or cancel may follow its own dispatch."""
        self.counts.frames_in += 1
        now = time.monotonic()  # of its arrival: what acting on it takes is the attempts' own time
        for dispatch in frame.dispatches:
            self._dispatch(session, dispatch, now)
        for credit in frame.credits:
            limit = min(credit.limit, codec.CREDIT_MAX)
            attempt = self.ledger.credit(credit.attempt, session.number, limit)
            if attempt is not None:
                self._engines[attempt.replica].credit(attempt.token, limit)
        for cancel in frame.cancels:
            cause = codec.cause_of(cancel.cause)
            attempt = self.ledger.cancel(cancel.attempt, session.number, cause, now)
            if attempt is not None:
                self._cancel(attempt.replica, [attempt.token], cause)
        self._advance(now)
        if frame.inventory_request:
            session.ask_inventory(frame.inventory_request)

    def attempts_of(self, session: int) -> list[int]:
        """See Loads."""
        return [attempt.token for attempt in self.ledger.attempts.values() if attempt.session == session]

    def _dispatch(self, session: Session, message: pb.Dispatch, now: float) -> None:
        book = self.ledger.workers.get(message.replica)
        try:
            if not 0 < message.attempt <= codec.SEQ_MAX:
                raise InvalidRequest((Violation("attempt", "must be a positive 63-bit number"),))
            request, tokens = codec.engine_request(message)
            known = codec.dispatched(message, session=session.number, context_tokens=book.context_tokens if book else 0)
            wanted = queue_codec.with_load(known, message)
            self.ledger.dispatch(wanted, now, (request, tokens))
        except DuplicateAttempt:
            return
        except Failure as failure:
            self._put_ended(session, codec.ended_by_refusal(message.attempt, message.record_version, failure))
            return
        if wanted.is_extra:
            self._extra_attempts.add(now)
        self._flush()

    # The queue

    def _advance(self, now: float) -> None:
        """Something has happened that may let others start, or time has passed."""
        self.ledger.advance(now)
        self._flush()
        if self.doors.have_changed(self.ledger, now):
            self.ask_loads()
        due = self.ledger.next_due()
        if due == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at, self._timer = due, None
        if due < math.inf:
            delay_s = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._advance(time.monotonic())

    def _flush(self) -> None:
        """Carry out what the ledger has decided: give attempts to engines, tell of those that ended in the queue."""
        for attempt in self.ledger.take_ready():
            request, tokens = attempt.payload
            attempt.payload = None
            request["credit"] = attempt.credit_limit  # which may have risen meanwhile
            self._engines[attempt.replica].generate(
                request, tokens, input_bytes=attempt.input_bytes, budget=attempt.budget
            )
        for ended in self.ledger.take_ended():
            if ended.attempt.cancel_asked_at is not None:
                self.counts.cancel_to_confirmed.observe(0.0)
            self._tell_end(ended.attempt, queue_codec.ended_here(ended))

    # Engines

    def open_engine(self, book: WorkerBook, engine: EngineClient) -> None:
        """A worker is READY; from now on attempts may be sent to it."""
        self.ledger.open_worker(book)
        self.overload.open(book.replica)
        self._engines[book.replica] = engine
        self._looks[book.replica] = Reconciler(opened_at=time.monotonic())
        self.ask_loads()

    def close_engine(self, replica: str, *, drained: bool) -> None:
        """A worker is gone, or at the end of its drain: each of its attempts ends, now and truthfully."""
        for attempt, had_output in self.ledger.close_worker(replica):
            self._tell_end(attempt, codec.ended_by_loss(attempt, had_output=had_output, drained=drained))
        self.overload.close(replica)
        self._engines.pop(replica, None)
        self._looks.pop(replica, None)
        self._ends.pop(replica, None)
        self.kv.forget(replica)
        self._advance(time.monotonic())
        self.ask_loads()

    async def wait_idle(self, replica: str) -> None:
        """Return once no attempt of this worker is left. Waits for ever: the caller holds the deadline."""
        while not self.ledger.is_idle((replica,)):
            ended = self._ends.setdefault(replica, asyncio.Event())
            ended.clear()
            await ended.wait()

    def cut_engine(self, replica: str) -> None:
        """The grace of a drain is over: ask the engine to end what still runs there."""
        now = time.monotonic()
        self._cancel(replica, self.ledger.cancel_worker(replica, Cause.DRAINED, now), Cause.DRAINED)
        self._advance(now)

    def on_batch(self, replica: str, incarnation: int, batch: StepBatch) -> None:
        """Carry one response of an engine to the sessions that own what is in it."""
        counts = self.counts
        counts.messages += 1
        counts.steps += batch.steps
        book = self.ledger.current(replica, incarnation)
        if book is None:
            self._drop(batch)
            return
        if batch.seqs:
            self.overload.stepped(replica, batch.steps, batch.ended_ns, time.monotonic())
        closing: list[Mapping[str, Any]] | None = None
        if batch.events:
            closing = self._take_events(book, batch.events)
        if batch.seqs:
            counts.tokens += len(batch.token_ids)
            self._forward(book, batch)
        if closing:
            for event in closing:
                if event["type"] == "sequences":
                    self._reconcile(book, event.get("seqs") or ())
                else:
                    self._finish(incarnation, event)
        if batch.events:
            self._advance(time.monotonic())

    def on_refused(self, incarnation: int, seqs: Sequence[int], error: Mapping[str, Any]) -> None:
        """An engine refused sequences before it began with them."""
        failure = codec.engine_failure(error)
        for seq in seqs:
            attempt = self.ledger.finish(seq, incarnation)
            if attempt is not None:
                self._confirm(attempt, time.monotonic())
                self._tell_end(attempt, codec.ended_by_refusal(seq, attempt.record_version, failure))
        self._advance(time.monotonic())

    def _drop(self, batch: StepBatch) -> None:
        """Count what a run of an engine says that does not serve (any more); signs of life are no news of anybody."""
        self.counts.tokens += len(batch.token_ids)
        self.counts.dropped_tokens += len(batch.token_ids)
        if batch.seqs or any("seq" in event for event in batch.events):
            self.ledger.counts.stale_incarnation += 1

    def _forward(self, book: WorkerBook, batch: StepBatch) -> None:
        ledger = self.ledger
        if len(book.sessions) == 1 and book.attempts.keys() >= set(batch.seqs):
            # The usual case: one Router, nothing foreign. The columns pass through untouched.
            (number,) = book.sessions
            session = self.sessions.get(number)
            if session is None:
                self.counts.dropped_tokens += len(batch.token_ids)
                return
            ledger.outputs.update(batch.seqs)
            session.put_output(batch)
            return
        for number, part in split_by_owner(batch, book.session_of).items():
            session = self.sessions.get(number)
            if session is None:
                self.counts.dropped_tokens += len(part.token_ids)
            else:
                ledger.outputs.update(part.seqs)
                session.put_output(part)

    def _take_events(self, book: WorkerBook, events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Keep the books and tell of admissions now; return what is to be told after the columns.

        The books do not depend on the columns, so what is kept in them is taken in the order of the events.
        """
        closing = []
        ledger, now, incarnation = self.ledger, time.monotonic(), book.incarnation
        for event in events:
            kind = event.get("type")
            if kind == "alive":
                self.kv.take(book.replica, book.revision, event.get("stats") or {})
            elif kind == "admitted":
                attempt = ledger.admit(event["seq"], incarnation, event.get("prompt_tokens", 0), now)
                session = self.sessions.get(attempt.session) if attempt is not None else None
                if attempt is not None:
                    self.counts.queue_wait[attempt.priority].observe(now - attempt.received_at)
                if attempt is not None and session is not None:
                    session.put_admitted(codec.admitted_message(event, attempt))
            elif kind == "preempted":
                ledger.preempt(event["seq"], incarnation, event.get("preemptions", 0))
            elif kind == "resumed":
                ledger.resume(event["seq"], incarnation, event.get("preemptions", 0))
            elif kind in ("finished", "refused", "sequences"):
                closing.append(event)
        return closing

    def _finish(self, incarnation: int, event: Mapping[str, Any]) -> None:
        seq = event["seq"]
        if event["type"] == "refused":
            self.on_refused(incarnation, (seq,), event.get("error") or {})
            return
        attempt = self.ledger.finish(seq, incarnation)
        if attempt is not None:
            now = time.monotonic()
            self._confirm(attempt, now)
            measured = queue_codec.served(event, attempt)
            if measured is not None:
                self.ledger.measure(attempt, measured, now)
            if event.get("reason") in ("stop", "length") and not attempt.is_extra:
                self._successes.add(now)
            is_local = self._engines[attempt.replica].is_local
            self._tell_end(attempt, codec.ended_by_engine(event, attempt, confirmed_at=now, is_local=is_local))

    def _reconcile(self, book: WorkerBook, live: Sequence[int]) -> None:
        """The engine has told which sequences it runs: cancel those of nobody, end attempts that it does not know."""
        found = self._looks[book.replica].compare(book.attempts, live, time.monotonic())
        if not found.orphans and not found.unknown:
            return
        log = get_logger().bind(replica=book.replica)
        log.warning("books_differ", orphans=len(found.orphans), unknown=len(found.unknown))
        if found.orphans:
            self.counts.orphans += len(found.orphans)
            self._engines[book.replica].cancel(found.orphans)
        for token in found.unknown:
            had_output = token in self.ledger.outputs
            attempt = self.ledger.finish(token, book.incarnation)
            if attempt is not None:
                self.counts.unknown += 1
                self._tell_end(attempt, codec.ended_by_loss(attempt, had_output=had_output, drained=False))

    def _confirm(self, attempt: Attempt, now: float) -> None:
        """The engine has let go of an attempt; measure how long a cancel of it took."""
        if attempt.cancel_asked_at is not None:
            self.counts.cancel_to_confirmed.observe(now - attempt.cancel_asked_at)

    def _tell_end(self, attempt: Attempt, message: pb.Ended) -> None:
        if self._ends and attempt.replica in self._ends:
            self._ends[attempt.replica].set()
        session = self.sessions.get(attempt.session)
        if session is not None:
            self._put_ended(session, message)
        else:
            self.counts.ended(message)

    def _put_ended(self, session: Session, message: pb.Ended) -> None:
        self.counts.ended(message)
        session.put_ended(message)

    def _cancel(self, replica: str, tokens: Sequence[int], cause: Cause) -> None:
        engine = self._engines.get(replica)
        if engine is not None and tokens:
            engine.cancel(tokens, _CANCEL.get(cause, "cancelled"))

    # Load and time

    @property
    def load_version(self) -> int:
        """Rises whenever a load may have changed."""
        return self.ledger.version

    def load_report(self) -> pb.LoadReport:
        """How busy the workers are."""
        now = time.monotonic()
        report = pb.LoadReport(
            routers=len({session.router for session in self.sessions.values()}),
            successes=self._successes.total(now),
            extra_attempts=self._extra_attempts.total(now),
        )
        for replica in self.ledger.workers:
            load = self.ledger.load(replica, now)
            if load is not None:
                self.kv.tell(encoded := queue_codec.replica_load(replica, load))
                report.replicas.append(encoded)
        return report

    def ask_loads(self) -> None:
        """Send the load to every session now."""
        for session in self.sessions.values():
            session.ask_load()

    def tick(self, now: float) -> None:
        """Once a second: loads, so that their age is known; late attempts; engines that hang; looks at the books."""
        self.overload.tick(now)
        self.ask_loads()
        self.ledger.look_again()
        self._advance(now)
        for attempt in self.ledger.overdue(now, OVERDUE_S):
            assert attempt.cause is not None
            self._cancel(attempt.replica, [attempt.token], attempt.cause)
        for replica in self.ledger.unconfirmed(now - CANCEL_CONFIRM_S):
            self.counts.hung += 1
            self._engines[replica].condemn(f"the engine did not confirm a cancel within {CANCEL_CONFIRM_S:g} s")
        for replica, look in self._looks.items():
            if look.ask(now):
                self._engines[replica].list_sequences()

    def totals(self) -> tuple[int, int]:
        """Frames written and wake-ups of all sessions, those that are over included."""
        sessions = tuple(self.sessions.values())  # the reader is in another thread
        frames = self.counts.frames_out + sum(s.writes for s in sessions)
        wakeups = self.counts.wakeups + sum(s.wakeups for s in sessions)
        return frames, wakeups
