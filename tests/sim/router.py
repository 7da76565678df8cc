"""The Router: the real RequestMachine and EventLog, and what `headrace.router.session` does around them."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from headrace.control.attempt_book import Cause, Dispatched
from headrace.control.attempt_log import AttemptCause
from headrace.control.continuation import KnownAnswer
from headrace.control.credit import CreditWindow, Reader
from headrace.control.deadlines import Budget
from headrace.control.errors import Reason
from headrace.control.event_log import EventLog, EventsExpired, LoggedEvent, Retention, UnknownSequence
from headrace.control.lifecycle import Finish
from headrace.control.request import AttemptEnd, RequestMachine, Step, Terms
from headrace.engine.request import Continuation
from sim.model import prompt_of
from sim.scheduler import REVISION, Admitted, CancelAttempt, Credit, Dispatch, Ended, Output, ToRouter

if TYPE_CHECKING:
    from sim.client import Call
    from sim.scenario import Ask
    from sim.world import World

TICK_MS = 50
KNOWN_MAX = 40
LINGER_S = 1.0
"""How long the end of a request waits for a write that its reader holds up."""
CAUSE_OF = {
    Finish.DEADLINE_EXCEEDED: Cause.DEADLINE_EXCEEDED,
    Finish.SLOW_CONSUMER: Cause.SLOW_CONSUMER,
}


class Event(NamedTuple):
    """One event as the reader gets it; `data` is all that it holds."""

    sequence: int
    data: bytes
    tokens: int


class Session:
    """One request, over all its attempts and readers."""

    def __init__(self, world: World, number: int, ask: Ask) -> None:
        now = world.time.now
        self.world = world
        self.number = number
        self.ask = ask
        resume_s = ask.resume_ms / 1_000 or None
        budget = Budget(
            now, now + ask.deadline_ms / 1_000, ask.queue_ms / 1_000 or None, ask.execution_ms / 1_000 or None
        )
        known_max = KNOWN_MAX if ask.continues else 0
        terms = Terms(world.scenario.attempts_max, world.scenario.slow_consumer_ms / 1_000, resume_s, known_max)
        self.known = KnownAnswer(known_max)
        self.machine = RequestMachine(budget, CreditWindow(ask.window), terms, world.resources, world.pauses.policy)
        self.log = EventLog(Retention(ask.log_events, 4_000, resume_s)) if resume_s else None
        self.reader: Call | None = None
        self.is_closed = False
        self._text: list[str] = []
        self._ids: list[int] = []
        self._alone_from = 0
        self._alone_bytes = 0
        self._over_at: float | None = None
        world.time.later(ask.deadline_ms, self.tick)
        world.time.later(TICK_MS, self._tick_on)
        world.laws.on_session(self)

    # Attempts

    def start(self) -> bool:
        """Dispatch an attempt; False: nobody can take it."""
        place = self.world.router.place(self.machine.record.tried)
        if place is None or not self.world.pauses.may_start(self):
            return False
        replica, epoch = place
        machine, ask, now = self.machine, self.ask, self.world.time.now
        self.world.attempts += 1
        token = self.world.attempts
        credit = machine.dispatch(token, replica, now=now)
        goes_on = machine.current.cause is AttemptCause.CONTINUATION
        admitted_at, run_s = machine.record.admitted_at, machine.budget.execution_s
        if goes_on and run_s is not None and admitted_at is not None:
            run_s = max(0.001, admitted_at + run_s - now)
        wanted = Dispatched(
            token=token,
            session=self.world.link.number,
            replica=replica,
            revision=REVISION,
            epoch=epoch,
            input_bytes=4 * ask.prompt,
            max_tokens=ask.max_tokens,
            remaining_s=machine.budget.for_next_hop_s(now),
            queue_s=machine.budget.queue_s if goes_on else machine.budget.queue_remaining_s(now),
            execution_s=run_s,
            credit_limit=credit,
            record_version=machine.record.attempt_version,
        )
        self.world.laws.on_dispatch(self, wanted)
        self.world.counts["continue" if goes_on else "retry"] += machine.record.attempts > 1
        known = Continuation(tuple(self.known.token_ids), self.known.text_bytes) if goes_on else None
        self.world.link.running[token] = self
        self.world.link.send(Dispatch(wanted, prompt_of(ask.answer, ask.prompt, ask.prompt_seed), known))
        return True

    # The reader

    def attach(self, reader: Call, kind: Reader, after_sequence: int) -> deque[Event]:
        """As the shell's; raises EventsExpired or UnknownSequence."""
        missed: list[LoggedEvent] = []
        position = 0
        if self.log is not None:
            missed = self.log.after(after_sequence)
            position = self.log.tokens_through(after_sequence)
        previous, self.reader = self.reader, reader
        if previous is not None:
            self.world.counts["takeover"] += 1
            previous.break_off("taken over")
        self.machine.attach(kind, position, self.world.time.now)
        self.world.laws.on_attached(self, kind, after_sequence)
        self._grant()
        return deque(Event(event.sequence, event.data, event.tokens) for event in missed)

    def detach(self, reader: Call) -> None:
        """The call is over, whatever ended it."""
        if self.reader is not reader:
            return
        self.reader = None
        if self.machine.detach(self.world.time.now):
            self._stop_engine()
        self.world.laws.on_detached(self)
        if self.log is not None:
            self._alone_from, self._alone_bytes = self.log.last, 0
            self._grant()
            self._log_on()
        self._close_if_done()

    def take(self) -> Event | None:
        """The next event, to be written; None: nothing now."""
        machine = self.machine
        now = self.world.time.now
        if sequence := machine.tell_output(now):
            return self._event(Step.DELTA, sequence)
        while True:
            step = machine.next(now)
            if step is Step.WAIT or step is Step.OVER:
                self.world.pauses.await_retry(self)
                return None
            if step is Step.RETRY:
                if not self.start():
                    machine.give_up()
                continue
            sequence = machine.take(step)
            machine.writing_since = now
            if step is Step.REFUSED:
                self.world.laws.on_refused(self)
                return None
            return self._event(step, sequence)

    def wrote(self, event: Event) -> None:
        """The transport has taken an event."""
        self.machine.write(event.tokens, event.sequence)
        self.world.laws.on_written(self, event.sequence)
        self._grant()

    def acknowledge(self, sequence: int) -> None:
        self.world.laws.on_acknowledged(self, sequence)
        self.machine.window.acknowledge(min(sequence, self.machine.sequence))
        self._grant()

    def _grant(self) -> None:
        limit = self.machine.grant()
        if limit is not None:
            self.world.laws.on_granted(self, limit)
            self.world.link.send(Credit(self.machine.record.attempt, limit))

    def _event(self, step: Step, sequence: int) -> Event:
        record = self.machine.record
        ids: list[int] = []
        text, finish = "", None
        if step is Step.DELTA:
            ids, text = self._ids[:], "".join(self._text)
            self._clear_output()
        elif step is Step.TERMINAL:
            finish = record.finish.value if record.finish is not None else None
        data = json.dumps([sequence, step.value, ids, text, finish, record.sent_tokens]).encode()
        event = Event(sequence, data, len(ids))
        self.world.laws.on_told(self, step, event)
        if self.log is not None:
            self.log.append(sequence, data, event.tokens)
        return event

    def _clear_output(self) -> None:
        self._text.clear()
        self._ids.clear()

    def _log_on(self) -> None:
        """Without a reader: write to the log what there is, until half of what it keeps is unread."""
        assert self.log is not None
        while (event := self.take()) is not None:
            self._alone_bytes += len(event.data)
            kept, unread = self.log.retention, self.log.last - self._alone_from
            full = self._alone_bytes >= kept.bytes_max // 2 or unread >= kept.events_max // 2
            self.machine.log_is_full = full
            self.world.counts["log_full"] += full
            self.wrote(event)

    # The end

    def cancel(self) -> None:
        """The caller asks for the end."""
        if self.machine.ask_end(Reason.CLIENT_CANCELLED, self.world.time.now):
            self._stop_engine()
        self._proceed()

    def drain(self) -> None:
        """The Router drains: what was generated is still told."""
        if self.machine.wind_down(Reason.DRAINING, self.world.time.now):
            self.world.link.send(CancelAttempt(self.machine.record.attempt, Cause.CANCELLED))
        self._proceed()

    def _tick_on(self) -> None:
        if self.is_closed:
            return
        self.tick()
        self.world.time.later(TICK_MS, self._tick_on)

    def tick(self) -> None:
        """Look at the time."""
        if self.is_closed:
            return
        machine, now = self.machine, self.world.time.now
        if machine.tick(now):
            self._stop_engine()
        if machine.has_notice or (machine.record.finish is not None and not machine.is_told):
            self._proceed()
        since, asked = machine.writing_since, machine.record.asked_at
        is_held_up = since is not None and now - max(since, asked or since) >= LINGER_S
        if is_held_up and self.reader is not None and machine.record.finish is not None:
            self.world.counts["broken_off"] += 1
            self.reader.break_off("held up")
        self._close_if_done()

    def _stop_engine(self) -> None:
        finish = self.machine.record.finish
        assert finish is not None
        self.world.link.send(CancelAttempt(self.machine.record.attempt, CAUSE_OF.get(finish, Cause.CANCELLED)))

    def _proceed(self) -> None:
        """Something changed: the reader looks, or the log goes on."""
        if self.machine.record.finish is not None and not self.machine.pending:
            self._clear_output()
        if self.reader is not None:
            self.reader.wake()
        elif self.log is not None:
            self._log_on()
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Forget the request: at once, or after as long as it may be resumed."""
        now = self.world.time.now
        if self.is_closed or not self.machine.is_over:
            return
        if self._over_at is None:
            self._over_at = now
            self.world.pauses.on_over(self)
        if self.reader is not None:
            return
        if self.log is not None and self.log.retention.window_s > now - self._over_at:
            return
        self.is_closed = True
        if self.log is not None:
            self.log.clear()
        self.machine.close()
        self.world.laws.on_closed(self)

    def look(self) -> None:
        """The time of the next attempt may have come."""
        if not self.is_closed:
            self._proceed()

    # What the link says

    def take_message(self, message: ToRouter) -> None:
        machine, now = self.machine, self.world.time.now
        with self.world.laws.late_changes_nothing(self, message):
            if isinstance(message, Output):
                if machine.output(message.token, len(message.ids), now):
                    self.known.add(message.ids, len(message.text.encode()))
                    self._text.append(message.text)
                    self._ids += message.ids
            elif isinstance(message, Admitted):
                machine.admitted(message.token, message.version, now, cached_tokens=message.cached)
            else:
                if machine.ended(message.token, message.version, message.end, now):
                    self.world.pauses.on_ended(self, message.end)
        self._proceed()

    def take_again(self, message: ToRouter, is_forged: bool) -> None:
        """A message comes a second time, long after; output only once its attempt is over: streams do not repeat.

        A forged one names the attempt that is current then, and only its version tells that it is an old one.
        """
        machine = self.machine
        if self.is_closed:
            return
        if is_forged and not isinstance(message, Output) and message.version != machine.record.attempt_version:
            self.world.counts["old_version"] += 1
            message = message._replace(token=machine.record.attempt)
        if isinstance(message, Output) and machine.is_running and message.token == machine.record.attempt:
            return
        self.take_message(message)

    def on_lost(self, token: int) -> None:
        """The link broke."""
        record = self.machine.record
        if token != record.attempt:
            return
        before = record.first_output_at is None
        end = AttemptEnd(
            Finish.FAILED if before else Finish.INTERRUPTED,
            Reason.WORKER_LOST_BEFORE_OUTPUT if before else Reason.STREAM_INTERRUPTED,
            is_retryable=before,
        )
        self.world.counts["link_lost_before_output" if before else "link_lost_after_output"] += 1
        self.take_message(Ended(token, record.attempt_version, end))


class Router:
    """All sessions, and what is known of workers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions: list[Session] = []
        self.known: dict[str, int] = {}
        """Epoch by replica, perhaps an old one."""

    def place(self, tried: list[str]) -> tuple[str, int] | None:
        """Choose where the next attempt runs."""
        if not self.world.link.is_up:
            return None
        fresh = [replica for replica in self.known if replica not in tried]
        if not fresh and len(tried) < 2 * len(self.known):
            fresh = list(self.known)
        if not fresh:
            return None
        replica = self.world.time.rng.choice(fresh)
        return replica, self.known[replica]

    def ask(self, call: Call, ask: Ask, number: int) -> Session | None:
        """A request arrives; None: nobody can take it."""
        if not self.known or not self.world.link.is_up:
            return None
        session = Session(self.world, number, ask)
        session.attach(call, call.kind, 0)
        self.sessions.append(session)
        assert session.start()
        return session

    def resume(self, call: Call, session: Session, after: int) -> deque[Event] | str:
        """A call wants to go on; a sentence says why it may not."""
        if session.is_closed:
            return "not found"
        if session.log is None:
            return "not resumable"
        try:
            return session.attach(call, call.kind, after)
        except EventsExpired:
            return "expired"
        except UnknownSequence:
            return "unknown sequence"
