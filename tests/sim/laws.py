"""What has to hold, after every step and at the end. Laws are checked against what was seen, not against what is said.

A broken law raises Violation with the law's name; a test of mutations asks for those names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.control.attempt_book import Dispatched
from headrace.control.credit import Reader
from headrace.control.errors import Reason
from headrace.control.holdings import ENGINE_SIDE, Resource
from headrace.control.request import CONFIRM_S, Step
from headrace.engine.sequence import Phase
from sim.model import text_of, truth
from sim.router import Event, Session
from sim.scheduler import Admitted, Ended, Output, ToRouter
from sim.track import Track
from sim.violation import Violation

if TYPE_CHECKING:
    from sim.client import Call, Client
    from sim.engine import Engine
    from sim.world import World

STOPS_WITHIN_S = 0.5
"""From an end that was asked for to the confirmation, while nothing is broken that nobody knows of."""
WAITING_MAX = 16
TIMER_S = 0.06
"""Timers of the Router are looked at this often."""


class Laws:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tracks: dict[Session, Track] = {}
        self.open: list[Track] = []
        self.granted: dict[int, int] = {}
        """Most that the Router allowed, by attempt."""
        self.dispatches = 0
        self.transit_ns = (world.scenario.delay_ms + 3) * 1e6
        """Time counts from the arrival of a message: so much may be lost on the way."""
        self.owner: dict[int, Session] = {}
        self.ended_at: dict[int, float] = {}
        """When the Router heard that an attempt is over, or lost it."""

    def need(self, holds: object, law: str, what: str) -> None:
        if not holds:
            raise Violation(law, what)

    # Told by the Router

    def on_session(self, session: Session) -> None:
        track = Track(session)
        self.tracks[session] = track
        self.open.append(track)

    def on_dispatch(self, session: Session, wanted: Dispatched) -> None:
        track, machine, now = self.tracks[session], session.machine, self.world.time.now
        self.need(track.is_ended, "one_attempt", "an attempt starts while another may hold something")
        arrived = machine.record.output_tokens
        self.need(not arrived or session.ask.continues, "retry", "an attempt after output")
        self.need(track.through[-1] == arrived, "retry", "what arrived was not told before another attempt")
        charged = machine.record.attempts - machine.record.attempts_free
        self.need(charged <= self.world.scenario.attempts_max, "retry", f"{charged} attempts")
        assert wanted.remaining_s is not None
        self.need(now + wanted.remaining_s <= machine.budget.deadline_at + 1e-9, "deadline", "a hop got a fresh one")
        allowed = max(track.granted if arrived else 0, track.through[track.known] + session.ask.window)
        self.need(wanted.credit_limit <= allowed, "credit", "more than a window to start with")
        held = machine.holdings._held & set(ENGINE_SIDE)
        self.need(held == {Resource.ENGINE_WORK}, "released_early", "a new attempt has what the old one held")
        track.held = frozenset(machine.holdings._held)
        track.attempt, track.attempt_version = wanted.token, wanted.record_version
        track.is_ended = track.is_admitted = False
        track.is_unannounced = arrived > 0
        track.granted = self.granted[wanted.token] = wanted.credit_limit
        self.owner[wanted.token] = session
        self.dispatches += 1

    def on_attached(self, session: Session, kind: Reader, after: int) -> None:
        track = self.tracks[session]
        track.reader, track.written, track.known = kind, after, after
        self._confirm(track)

    def on_detached(self, session: Session) -> None:
        track = self.tracks[session]
        if session.log is not None:
            track.reader, track.known = Reader.NONE, len(track.through) - 1

    def on_told(self, session: Session, step: Step, event: Event) -> None:
        track = self.tracks[session]
        sequence, _, ids, text, finish, _ = json.loads(event.data)
        self.need(not track.is_told, "terminal_last", f"{step.name} after the end")
        self.need(sequence == len(track.through), "no_gap", f"event {sequence} after {len(track.through) - 1}")
        self.need(track.steps or step is Step.ACCEPTED, "no_gap", f"{step.name} comes first")
        track.steps.append(step)
        self.need(step is not Step.CONTINUED or track.is_unannounced, "notice", "a continuation that is none")
        track.is_unannounced &= step is not Step.CONTINUED
        self.need(not (ids and track.is_unannounced), "notice", "output of a continuation that was not announced")
        track.ids += ids
        track.text += text
        track.through.append(track.through[-1] + len(ids))
        ask = session.ask
        answer = truth(ask.answer, ask.prompt, ask.prompt_seed)
        whole = answer[: ask.max_tokens]
        self.need(tuple(track.ids) == whole[: len(track.ids)], "truth", "these are not the model's tokens")
        self.need(track.text == text_of(track.ids), "truth", "text and tokens do not agree")
        if step is Step.TERMINAL:
            self.need(
                session.machine.record.reason is not Reason.SEQUENCE_GAP, "no_gap", "a hop lost or repeated output"
            )
            self.world.counts[f"finish_{finish}"] += 1
            self.world.counts["told_unconfirmed"] += session.machine.is_running
            self.world.counts[f"reason_{getattr(session.machine.record.reason, 'name', None)}".lower()] += 1
            if finish in ("stop", "length"):
                self.need(tuple(track.ids) == whole, "truth", f"{finish} after {len(track.ids)} of {len(whole)} tokens")
                self.world.counts["continued_whole"] += Step.CONTINUED in track.steps
                is_stop = len(answer) < ask.max_tokens
                self.need((finish == "stop") == is_stop, "truth", f"{finish}, and the answer is another")

    def on_refused(self, session: Session) -> None:
        track = self.tracks[session]
        self.need(not track.is_told and not track.steps, "one_terminal", "refused after events, or twice")
        track.is_refused = True
        self.world.counts["refused"] += 1
        self.world.counts[f"reason_{getattr(session.machine.record.reason, 'name', None)}".lower()] += 1

    def on_written(self, session: Session, sequence: int) -> None:
        track = self.tracks[session]
        track.written = sequence
        if track.reader is not Reader.EXPLICIT:
            track.known = sequence

    def on_acknowledged(self, session: Session, sequence: int) -> None:
        track = self.tracks[session]
        if track.reader is Reader.EXPLICIT:
            track.known = max(track.known, min(sequence, track.written))
            self._confirm(track)

    def _confirm(self, track: Track) -> None:
        if track.reader is Reader.EXPLICIT:
            track.confirmed = max(track.confirmed, track.through[track.known])

    def on_granted(self, session: Session, limit: int) -> None:
        track = self.tracks[session]
        self.need(limit > track.granted, "credit", f"the limit falls from {track.granted} to {limit}")
        allowed = track.through[track.known] + session.ask.window
        self.need(limit <= allowed, "credit", f"{limit} granted, the reader's window ends at {allowed}")
        track.granted = self.granted[track.attempt] = limit
        self.world.counts["granted"] += 1

    def on_closed(self, session: Session) -> None:
        track = self.tracks[session]
        self.open.remove(track)
        machine = session.machine
        self.need(len(machine.holdings) == 0, "references", "closed, and something is held")
        self.need(track.is_ended, "released_early", "closed before the engine confirmed")
        self.need(session.log is None or track.is_told, "one_terminal", "no end in the log")
        for resource in (Resource.KV, Resource.SLOT):
            self.need(self.world.resources.held[resource] >= 0, "released_once", resource.name)

    @contextmanager
    def late_changes_nothing(self, session: Session, message: ToRouter) -> Iterator[None]:
        """Decide here whether a message still counts; if not, it must leave no trace."""
        track, machine = self.tracks[session], session.machine
        is_late = message.token != track.attempt or track.is_ended
        if isinstance(message, Admitted | Ended):
            is_late |= message.version != track.attempt_version
        if isinstance(message, Admitted):
            is_late |= track.is_admitted or machine.record.finish is not None
        if isinstance(message, Output):
            is_late |= machine.record.finish is not None
        before = self._signature(session) if is_late else None
        yield
        if is_late:
            self.world.counts[f"late_{type(message).__name__.lower()}"] += 1
            self.need(self._signature(session) == before, "stale", f"a late {type(message).__name__} changed something")
        elif isinstance(message, Admitted):
            track.is_admitted = True
        elif isinstance(message, Ended):
            track.is_ended = True
            self.ended_at[message.token] = self.world.time.now

    def _signature(self, session: Session) -> object:
        machine = session.machine
        held = frozenset(resource for resource in Resource if resource in machine.holdings)
        window = machine.window
        counts = (window.produced, window.granted, window.taken, window.sent, window.acknowledged)
        return (repr(machine.record), machine.pending, machine.sequence, machine.is_running, counts, held)

    # Told by clients

    def on_read(self, client: Client, call: Call, event: Event) -> None:
        sequence = event.sequence
        self.need(sequence == call.last + 1, "no_gap", f"the client read {sequence} after {call.last}")
        known = client.datas.setdefault(sequence, event.data)
        self.need(known == event.data, "same_bytes", f"event {sequence} is another one than before")

    def on_resumed(self, client: Client, after: int) -> None:
        self.world.counts["resume_live"] += client.session is not None and client.session.machine.record.finish is None

    def on_status(self, client: Client, call: Call, status: str) -> None:
        if status != "told" or client.session is None:
            return
        track = self.tracks[client.session]
        if track.is_refused:
            self.need(call.last == 0, "one_terminal", "events, then a plain status")
        else:
            is_end = call.last == len(track.through) - 1 and track.is_told
            self.need(is_end, "no_gap", "the call ended before its last event")

    # Told by Scheduler and engines

    def on_dispatched(self, wanted: Dispatched, engine: Engine) -> None:
        self.need(wanted.epoch == engine.epoch, "stale", f"epoch {wanted.epoch} runs on epoch {engine.epoch}")

    @contextmanager
    def changes_nothing_in_ledger(self) -> Iterator[None]:
        before = self._books()
        yield
        self.need(
            self._books() == before, "stale", "what an engine said that does not serve any more has changed the books"
        )

    def _books(self) -> object:
        ledger = self.world.scheduler.ledger
        books = [(b.waiting, b.active, b.preempted, b.kv_cells_reserved, *b.attempts) for b in ledger.workers.values()]
        return (sorted(ledger.attempts), books)

    def after_turn(self, engine: Engine) -> None:
        """An engine has made a step."""
        ahead, now = self.world.scenario.run_ahead, self.world.time.now
        for sequence in engine.loop._sequences.values():
            allowed = self.granted[sequence.id]
            self.need(sequence.emitted <= allowed, "credit", f"{sequence.emitted} handed out of {allowed}")
            within = sequence.generated <= allowed + ahead
            self.need(within, "credit", f"{sequence.generated} generated of {allowed} and {ahead} ahead")
            deadline_ns = self.owner[sequence.id].machine.budget.deadline_at * 1e9 + self.transit_ns
            self.need(sequence.request.deadline_ns <= deadline_ns, "deadline", "the engine has a later one")
            lost_at = self.ended_at.get(sequence.id, now)
            self.need(now - lost_at <= STOPS_WITHIN_S, "orphan", "an attempt that nobody waits for goes on")
            if sequence.phase is Phase.PAUSED:
                self.world.counts["paused"] += 1
            self.world.counts["ran_ahead"] += sequence.buffered > 0
        ledger = engine.loop._lanes.ledger
        self.need(ledger.active <= ledger.slots, "buffers", "more slots than there are")
        self.need(ledger.reserved_cells + ledger.retained_cells <= ledger.cells, "buffers", "more KV than there is")

    # After every step

    def check(self) -> None:
        now = self.world.time.now
        for track in self.open:
            self._check_session(track, now)
        self._check_scheduler()
        self._check_references()

    def _check_session(self, track: Track, now: float) -> None:
        session, machine = track.session, track.session.machine
        record, window = machine.record, machine.window
        counts = (window.produced, window.sent, window.acknowledged, machine._pending, machine.dropped)
        state = (*counts, record.version, record.finish, len(track.through), track.granted)
        if state != track.state:
            track.state = state
            self._check_counts(track)
        if session.log is not None:
            kept = session.log.retention
            if len(session.log._events) > kept.events_max or session.log.size > kept.bytes_max:
                raise Violation("buffers", "the log keeps too much")
        if machine.holdings._held != track.held:
            self._check_holdings(track)
        if record.finish is None:
            self._check_live(track, now)
        elif machine._is_running and record.asked_at is not None and now - record.asked_at > STOPS_WITHIN_S:
            self._check_unconfirmed(track, now, record.asked_at)

    def _check_unconfirmed(self, track: Track, now: float, asked_at: float) -> None:
        session = track.session
        engine = self.world.scheduler.engines.get(session.machine.record.tried[-1])
        if engine is not None and not engine.is_dead and now - max(asked_at, engine.started_at) > STOPS_WITHIN_S:
            raise Violation("liveness", "the engine does not stop")
        waits = not track.is_told and session.log is not None and session.reader is None
        if waits and now - asked_at > CONFIRM_S + TIMER_S:
            raise Violation("liveness", "the end is not told, though nobody confirms it")

    def _check_counts(self, track: Track) -> None:
        session, machine, need = track.session, track.session.machine, self.need
        record, window = machine.record, machine.window
        need(record.version >= track.version, "versions", f"from {track.version} to {record.version}")
        need(track.finish is None or record.finish is track.finish, "one_terminal", "the end has changed")
        need(record.finish is not None or not track.is_told, "one_terminal", "told, and not decided")
        need(window.acknowledged <= window.sent <= window.produced, "counts", "acknowledged, sent, produced")
        need(window.produced <= track.granted, "credit", f"{window.produced} arrived, {track.granted} granted")
        need(window.sent >= track.sent, "counts", "sent falls")
        need(window.acknowledged >= track.acknowledged, "counts", "acknowledged falls")
        need(window.acknowledged <= track.confirmed, "counts", "acknowledged, and the reader has not said so")
        told = track.through[-1]
        is_whole = told + machine.pending + machine.dropped == record.output_tokens == window.produced
        need(is_whole, "counts", "what arrived is not what is told, waits or was dropped")
        need(machine.pending <= window.window, "buffers", f"{machine.pending} tokens wait")
        is_logged = session.log is None or session.log.last == len(track.through) - 1
        need(is_logged, "no_gap", "the log is not what was told")
        track.version, track.finish = record.version, record.finish
        track.sent, track.acknowledged = window.sent, window.acknowledged

    def _check_holdings(self, track: Track) -> None:
        held = track.session.machine.holdings._held
        gone = track.held - held
        if gone and held:
            first = min(track.held & held, default=max(gone))
            self.need(max(gone) <= first, "release_order", f"{max(gone).name} is free before {first.name}")
        is_held = Resource.ENGINE_WORK in held
        self.need(is_held or track.is_ended, "released_early", "engine work is free, and nobody said so")
        self.need(not is_held or not track.is_ended, "references", "engine work is held after the confirmation")
        track.held = frozenset(held)

    def _check_live(self, track: Track, now: float) -> None:
        session, machine = track.session, track.session.machine
        budget = machine.budget
        if now > budget.deadline_at + TIMER_S:
            raise Violation("deadline", "passed, and the request goes on")
        if session.reader is None:
            if session.log is None:
                raise Violation("orphan", "nobody reads it, nobody may come back, and it goes on")
        else:
            since = machine.stalled_since
            if since is not None and now - since > self.world.scenario.slow_consumer_ms / 1_000 + TIMER_S:
                raise Violation("slow_consumer", "it may wait for ever")
        if machine._is_running:
            if track.granted <= track.through[track.known] + machine.window.low:
                raise Violation("progress", "the reader has read, and nothing is granted")
            waits = machine.record.admitted_at is None and budget.queue_s is not None
            if waits and now > budget.received_at + (budget.queue_s or 0) + 0.2:
                raise Violation("deadline", "the longest wait has passed, and the request waits on")

    def _check_scheduler(self) -> None:
        scheduler, link = self.world.scheduler, self.world.link
        ledger = scheduler.ledger
        for replica, engine in scheduler.engines.items():
            book = ledger.workers[replica]
            if not engine.is_dead and not engine.loop._sequences.keys() <= book.attempts.keys():
                raise Violation("released_early", "the engine still has what the Scheduler has forgotten")
            if book.waiting > WAITING_MAX + book.slots:
                raise Violation("buffers", "too many attempts wait")
            if book.waiting < 0 or book.active < 0 or book.preempted < 0:
                raise Violation("released_once", "a book below zero")
        if link.is_up:
            for attempt in ledger.attempts.values():
                if attempt.session == link.number:
                    machine = self.owner[attempt.token].machine
                    if not machine._is_running or machine.record.attempt != attempt.token:
                        raise Violation("released_early", "the Router has forgotten what the Scheduler still has")

    def _check_references(self) -> None:
        held = self.world.resources.held
        total = 0
        for count in held.values():
            if count < 0:
                raise Violation("released_once", "below zero")
            total += count
        for track in self.open:
            total -= len(track.held)
        if total:
            raise Violation("references", "do not add up")

    # At the end

    def finish(self) -> None:
        """Nothing happens any more."""
        self.need(not self.open, "liveness", "a request was never closed")
        for client in self.world.clients:
            self.need(client.call is None, "liveness", "a client waits for ever")
        for session, track in self.tracks.items():
            self.need(track.finish or session.machine.record.finish, "one_terminal", "a request without an end")
            self.need(session.machine.window.overrun == 0, "credit", "an engine ran over its credit")
            self.need(track.steps.count(Step.TERMINAL) + track.is_refused <= 1, "one_terminal", "two ends")
        released = self.world.resources.released
        self.need(self.world.resources.references == 0, "references", "not zero at the end")
        sessions = len(self.tracks)
        expected = {Resource.SEND_BUFFER: sessions, Resource.TRACE: sessions, Resource.ENGINE_WORK: self.dispatches}
        for resource, times in expected.items():
            self.need(
                released[resource] == times, "released_once", f"{resource.name}: {released[resource]}, not {times}"
            )
        self.need(released[Resource.KV] == released[Resource.SLOT], "released_once", "KV and slots do not agree")
        ledger = self.world.scheduler.ledger
        self.need(not ledger.attempts and not ledger._waiting_bytes, "references", "attempts in the Scheduler")
        for replica, engine in self.world.scheduler.engines.items():
            book, stats = ledger.workers[replica], engine.loop.stats()
            left = (book.waiting, book.active, book.preempted, book.kv_cells_reserved, len(book.sessions))
            self.need(not any(left), "references", f"{replica}'s book: {left}")
            left = tuple(stats[name] for name in ("active", "waiting", "paused", "preempted", "kv_reserved"))
            self.need(engine.is_dead or not any(left), "references", f"{replica}'s engine: {left}")
