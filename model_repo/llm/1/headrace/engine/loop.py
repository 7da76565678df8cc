"""The engine loop: one thread owns slots, lanes, sequences and streams, and turns operations into steps.

Each turn: take what is in the inbox, look after owners and limits of time, admit (and preempt for it), run one step of
the backend. Each kind of decision has a module of its own. No clock, thread or queue is read here except through the
arguments, so tests turn it by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.engine.admission import AdmissionQueue
from headrace.engine.backend import Backend
from headrace.engine.booking import book_step
from headrace.engine.events import admitted, finished, hello, preempted, refused, resumed, sequences
from headrace.engine.lanes import Lanes
from headrace.engine.limits import LimitWatch, passed, refusal
from headrace.engine.operations import Cancel, Enumerate, Grant, OpenStream, Operation, Submit
from headrace.engine.owner import Owner, Sink
from headrace.engine.preemption import Paused, choose, next_look_ns
from headrace.engine.request import ENGINE_FAILED, OVERLOADED, RefusalError, Rejected
from headrace.engine.running import Running
from headrace.engine.sequence import Phase, Prepared, Sequence
from headrace.engine.stepper import Stepper, hand_out, stuck
from headrace.engine.streams import Streams
from headrace.engine.text import Release

SECOND_NS = 1_000_000_000
# The contract says one second at most; what is left is for the sender and a slow step.
ALIVE_EVERY_NS = 700_000_000


class EngineLoop:
    """The state of one engine and its turn. `clock` is CLOCK_MONOTONIC in ns."""

    def __init__(
        self,
        backend: Backend,
        *,
        identity: dict[str, Any],
        incarnation: str,
        slots: int,
        kv_cells: int,
        lanes: int,
        max_waiting: int,
        prefill_chunk: int,
        preempt_after_ns: int,
        run_ahead_tokens: int,
        kv_over_commit: float = 1.0,
        clock: Callable[[], int],
    ) -> None:
        self._identity = identity
        self._incarnation = incarnation
        self._max_waiting = max_waiting
        self._prefill_chunk = prefill_chunk
        self._preempt_after_ns = preempt_after_ns
        self._run_ahead_tokens = run_ahead_tokens
        self._clock = clock
        self._lanes = Lanes(backend, slots=slots, cells=kv_cells, lanes=lanes, over_commit=kv_over_commit)
        self._sequences: dict[int, Sequence] = {}
        self._queue = AdmissionQueue()
        self._limits = LimitWatch()
        self._accepted = 0
        self._preempted: set[int] = set()
        self._running = Running()
        self._stepper = Stepper(
            backend, self._running, self._lanes, end=self._end, use_up=self._use_up, pause=self._pause, clock=clock
        )
        self._streams = Streams()
        self._next_alive_ns = self._prompted = self._cached = self._preemptions = self._reprefilled = 0
        self.failure: str | None = None

    def turn(self, operations: list[Operation]) -> None:
        """Takes `operations` in order, then runs at most one step. Never raises for what a request causes."""
        for operation in operations:
            self._take(operation)
        now = self._clock()
        for owner in self._streams.take_lost():
            self._end_owner(owner)
        if 0 < self._limits.next_ns <= now:
            self._expire(now)
        self._queue.reopen_at(now)
        self._admit(now)
        if self._streams.has_events:
            self._flush(0)  # whoever cancelled, or waits for a beginning, does not wait for a step of others as well
        if self._streams.is_congested:
            self._flush(0)
        else:
            self._flush(self._step())

    def _step(self) -> int:
        """One step if there is anything to do; how many it ran."""
        book_step(self._running, self._lanes, self._give_way)
        return self._stepper.step(self._prefill_chunk)

    def wait_s(self) -> float:
        """How long the loop may sleep on its inbox: 0 when there is a step to run or someone to admit."""
        if self._has_step or self._queue.head is not None:
            return 0.001 if self._streams.is_congested else 0.0
        now = self._clock()
        moments = (self._limits.next_ns, self._queue.relief_ns)
        until = min([self._next_alive_ns, *(at for at in moments if at)])
        # Lost streams show within this time even when nothing else happens.
        return min(max(until - now, 0) / SECOND_NS, 0.05 if self._sequences else 1.0)

    @property
    def _has_step(self) -> bool:
        return self._running.has_step

    def stats(self) -> dict[str, Any]:
        """The `stats` of the contract."""
        return {
            **self._lanes.ledger.stats(),
            "waiting": len(self._queue),
            "paused": len(self._running.paused),
            "preempted": len(self._preempted),
            "buffered_tokens": sum(one.buffered for one in self._sequences.values() if one.ahead),
            "steps": self._stepper.steps,
            "generated_tokens": self._stepper.generated,
            "prompt_tokens": self._prompted,
            "cached_tokens": self._cached,
            "preemptions": self._preemptions,
            "reprefilled_tokens": self._reprefilled,
        }

    def fail(self, error_id: str) -> None:
        """The backend is unusable: every sequence ends, and nothing is said afterwards."""
        self.failure = error_id
        error = RefusalError(ENGINE_FAILED, "The engine failed.", metadata={"errorId": error_id})
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "error", error=error, keep=False, touch_backend=False)
        self._flush(0, alive=False)

    def close(self) -> None:
        """Ends every sequence as cancelled and every stream with FINAL."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "cancelled", keep=False, touch_backend=self.failure is None)
        self._streams.close(self._clock())

    def _take(self, operation: Operation) -> None:
        match operation:
            case OpenStream(sink, goes_on):
                self._open(sink, goes_on)
            case Submit(entries, sink):
                self._submit(entries, sink)
            case Grant(limits):
                for seq, limit in limits:
                    self._grant(seq, limit)
            case Cancel(seqs, reason):
                for seq in seqs:
                    if seq in self._sequences:
                        self._finish(self._sequences[seq], reason)
            case Enumerate():
                owner = self._streams.owner
                if owner is not None:
                    owner.tell(sequences(one.id for one in self._sequences.values() if one.owner is owner))

    def _open(self, sink: Sink, goes_on: bool) -> None:
        if not goes_on and self._streams.owner is not None:
            self._end_owner(self._streams.owner)
        owner = self._streams.open(sink, self._alive(), self._clock() if goes_on else None)
        owner.tell(hello(self._identity, self._incarnation))

    def _submit(self, entries: tuple[Prepared | Rejected, ...], sink: Sink | None) -> None:
        owner = self._streams.owner if sink is None else self._streams.open_one_shot(sink)
        if owner is None:
            return  # its owner was lost on the way here
        now = self._clock()
        for entry in entries:
            if entry.seq in self._sequences:
                # The same attempt again (a receipt was lost): it is running already.
                if owner.is_one_shot:
                    owner.tell(refused(entry.seq, RefusalError("INVALID_REQUEST", "seq is in use.", "seq")))
            elif isinstance(entry, Rejected):
                owner.tell(refused(entry.seq, entry.error))
            else:
                self._accept_request(entry, owner, now)

    def _accept_request(self, request: Prepared, owner: Owner, now: int) -> None:
        """Into the queue, and out of it if there is room; those without a slot are bounded, whatever they wait for."""
        sequence = Sequence.of(request, owner, self._accepted, self._run_ahead_tokens)
        self._accepted += 1
        if sequence.is_known_whole:
            self._conclude_known(sequence, now)
            return
        is_full = self._slotless > self._max_waiting
        self._sequences[sequence.id] = sequence
        self._queue.put(sequence)
        self._limits.watch(sequence)
        if not is_full:
            self._admit(now)
            is_full = self._slotless > self._max_waiting
        if is_full and sequence.phase is Phase.WAITING:
            self._refuse(sequence, RefusalError(OVERLOADED, "The engine's queue is full."))

    def _conclude_known(self, sequence: Sequence, now: int) -> None:
        """What a lost engine generated is the whole answer: there is nothing to wait for, and nothing to compute."""
        known = sequence.request.known
        assert known is not None
        self._sequences[sequence.id] = sequence
        sequence.phase = Phase.DRAINING
        self._tell_admitted(sequence, now)
        self._finish(sequence, "length" if known.stop is None else "stop", stop=known.stop)

    @property
    def _slotless(self) -> int:
        return len(self._sequences) - self._lanes.ledger.active

    def _grant(self, seq: int, limit: int) -> None:
        sequence = self._sequences.get(seq)
        if sequence is None:
            return
        sequence.grant(limit)
        if sequence.ahead is not None:
            self._drain(sequence)
        elif sequence.generated < sequence.limit:
            if sequence.phase is Phase.PAUSED:
                self._running.go_on(sequence)
            elif sequence.phase is Phase.PREEMPTED:
                self._requeue(sequence)

    def _drain(self, sequence: Sequence) -> None:
        """There may be credit for what was generated ahead."""
        hand_out(sequence, Release())
        if sequence.phase is Phase.DRAINING and not sequence.buffered:
            self._bury(sequence)
        elif sequence.phase is Phase.PREEMPTED and sequence.may_resubmit:
            self._requeue(sequence)
        sequence.settle()

    def _requeue(self, sequence: Sequence) -> None:
        """Back to its place: before everybody who was accepted later."""
        self._preempted.remove(sequence.id)
        sequence.phase = Phase.WAITING
        self._queue.put(sequence)

    def _end_owner(self, owner: Owner) -> None:
        for sequence in [sequence for sequence in self._sequences.values() if sequence.owner is owner]:
            self._finish(sequence, "cancelled")

    def _expire(self, now: int) -> None:
        for sequence in list(self._sequences.values()):
            self._end_if_overdue(sequence, now)
        self._limits.restart(self._sequences.values())

    def _end_if_overdue(self, sequence: Sequence, now: int) -> bool:
        limit = passed(sequence, now)
        if limit is None:
            return False
        if sequence.is_begun:
            self._finish(sequence, limit.value)
        else:
            self._refuse(sequence, refusal(limit, sequence, now))
        return True

    def _refuse(self, sequence: Sequence, error: RefusalError) -> None:
        del self._sequences[sequence.id]
        self._queue.remove(sequence)
        sequence.phase = Phase.FINISHED
        sequence.owner.tell(refused(sequence.id, error))

    def _admit(self, now: int) -> None:
        """First come, first served: a big request at the head is never overtaken, so it cannot starve."""
        while (sequence := self._queue.head) is not None:
            if self._end_if_overdue(sequence, now):
                continue
            if self._lanes.give(sequence):
                self._queue.remove(sequence)
                self._start(sequence, now)
            else:
                self._make_room(sequence, now)

    def _start(self, sequence: Sequence, now: int) -> None:
        cached = sequence.position
        if not sequence.is_begun:
            prompt = len(sequence.request.prompt)
            sequence.cached = min(cached, prompt)
            self._prompted += prompt
            self._cached += sequence.cached
            self._reprefilled += len(sequence.prefix) - max(cached, prompt)
            self._tell_admitted(sequence, now)
            self._limits.watch(sequence)
        else:
            self._reprefilled += len(sequence.prefix) - cached
            sequence.owner.tell(resumed(sequence))
        self._running.start(sequence)
        if cached >= sequence.prefill_end:
            self._pause(sequence, now)

    def _tell_admitted(self, sequence: Sequence, now: int) -> None:
        sequence.is_begun = True
        sequence.admitted_ns = now
        sequence.owner.tell(admitted(sequence))
        known = sequence.request.known
        if known is not None:
            hand_out(sequence, Release(text=known.text))

    def _make_room(self, head: Sequence, now: int) -> None:
        """Preempts paused sequences if that lets the head of the queue in; otherwise the queue is blocked."""
        slots, cells = self._lanes.missing(head)
        paused = [Paused(o.id, o.cells, o.paused_ns, o.request.priority) for o in self._running.paused.values()]
        ripe = now - self._preempt_after_ns
        chosen = choose(paused, slots=slots, cells=cells, ripe_ns=ripe)
        for seq in chosen:
            self._preempt(self._sequences[seq])
        if not chosen:
            self._queue.block(next_look_ns(paused, ripe_ns=ripe, after_ns=self._preempt_after_ns))

    def _preempt(self, sequence: Sequence) -> None:
        """Lane and batch are lost, the sequence is not."""
        self._running.remove(sequence)
        self._lanes.take_back(sequence, keep=True, touch_backend=True)
        sequence.phase = Phase.PREEMPTED
        sequence.preemptions += 1
        self._preemptions += 1
        self._preempted.add(sequence.id)
        self._queue.reopen()
        sequence.owner.tell(preempted(sequence))

    def _give_way(self, sequence: Sequence) -> None:
        """Its cells are needed by one that was accepted earlier."""
        self._preempt(sequence)
        if sequence.can_go_on:
            self._requeue(sequence)

    def _pause(self, sequence: Sequence, now: int) -> None:
        self._running.pause(sequence, now)
        self._queue.hear_of_relief(now + self._preempt_after_ns)

    def _use_up(self, sequence: Sequence) -> None:
        """It has generated as much as it may for now."""
        if sequence.generated >= sequence.max_tokens:
            self._finish(sequence, "length")
        elif sequence.ahead is None:
            self._pause(sequence, self._clock())
        else:
            sequence.settle()
            if sequence.must_abort:
                self._preempt(sequence)

    def _end(self, sequence: Sequence, stop: dict[str, Any] | None) -> None:
        reason, error = ("stop", None) if stop is not None else ("error", stuck())
        self._finish(sequence, reason, stop=stop, error=error)

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        *,
        stop: dict[str, Any] | None = None,
        error: RefusalError | None = None,
        keep: bool = True,
        touch_backend: bool = True,
    ) -> None:
        """The one way to the end of an accepted sequence: slot and cells first, then the event.

        Where the engine ran ahead, the event of an answer that is complete follows its last token.
        """
        sequence.stopped_ns = sequence.stopped_ns or self._clock()
        if sequence.phase is Phase.WAITING:
            self._queue.remove(sequence)
        elif sequence.has_lane:
            self._running.remove(sequence)
            self._lanes.take_back(sequence, keep=keep, touch_backend=touch_backend)
            self._queue.reopen()
        self._preempted.discard(sequence.id)
        if not sequence.joiner.is_empty:
            hand_out(sequence, sequence.rest(reason))
        sequence.freed_ns = sequence.freed_ns or self._clock()
        is_complete = reason in ("stop", "length")
        if sequence.ahead is not None and not is_complete:
            sequence.withheld += sequence.ahead.drop()
        sequence.ending = finished(sequence, reason, stop=stop, error=error)
        sequence.phase = Phase.DRAINING
        if not sequence.buffered:
            self._bury(sequence)

    def _bury(self, sequence: Sequence) -> None:
        assert sequence.ending is not None
        del self._sequences[sequence.id]
        sequence.phase = Phase.FINISHED
        sequence.owner.tell(sequence.ending)

    def _alive(self) -> dict[str, Any]:
        return {"type": "alive", "stats": self.stats()}

    def _flush(self, steps: int, *, alive: bool = True) -> None:
        """Hands over what has gathered. `alive` also goes out while tokens flow: it carries the stats."""
        now = self._clock()
        if alive and now >= self._next_alive_ns:
            self._next_alive_ns = now + ALIVE_EVERY_NS
            if self._streams.owner is not None:
                self._streams.owner.tell(self._alive())
        self._streams.flush(steps, now, self._is_busy)

    def _is_busy(self, owner: Owner) -> bool:
        return any(one.owner is owner for one in self._sequences.values())
