"""The engine loop: one thread owns slots, lanes, sequences and streams, and turns operations into steps.

Each turn: take what is in the inbox, look after owners and deadlines, admit, run one step of the backend, hand its
tokens out. No clock, thread or queue is read here except through the arguments, so tests turn it by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.engine.backend import Backend, Detail, Prefill
from headrace.engine.events import admitted, finished, hello, refused
from headrace.engine.ledger import Ledger
from headrace.engine.operations import Cancel, Grant, OpenStream, Operation, Submit
from headrace.engine.owner import Owner, Sink
from headrace.engine.pieces import PieceTable
from headrace.engine.prefix_cache import MATCH_MIN, PrefixIndex
from headrace.engine.request import DEADLINE_EXCEEDED, ENGINE_FAILED, OVERLOADED, RefusalError, Rejected
from headrace.engine.running import Running
from headrace.engine.sequence import Phase, Prepared, Sequence

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
        clock: Callable[[], int],
    ) -> None:
        self._backend = backend
        self._identity = identity
        self._incarnation = incarnation
        self._max_waiting = max_waiting
        self._prefill_chunk = prefill_chunk
        self._clock = clock
        self._ledger = Ledger(slots=slots, cells=kv_cells, lanes=lanes)
        self._index = PrefixIndex()
        self._pieces = PieceTable(backend.piece, backend.facts.end_tokens)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running = Running()
        self._owner: Owner | None = None
        self._one_shots: list[Owner] = []
        self._is_blocked = False  # the head of the queue did not fit, and nothing was given back since
        self._next_deadline_ns = 0
        self._next_alive_ns = 0
        self._steps = self._generated = self._prompted = self._cached = 0
        self.failure: str | None = None

    def turn(self, operations: list[Operation]) -> None:
        """Takes `operations` in order, then runs at most one step. Never raises for what a request causes."""
        for operation in operations:
            self._take(operation)
        now = self._clock()
        self._end_lost_owners()
        if self._next_deadline_ns and now >= self._next_deadline_ns:
            self._expire(now)
        self._admit(now)
        steps = self._step()
        self._flush(steps)

    def wait_s(self) -> float:
        """How long the loop may sleep on its inbox: 0 when there is a step to run or someone to admit."""
        if self._running.has_step or (self._waiting and not self._is_blocked):
            return 0.001 if self._is_congested() else 0.0
        now = self._clock()
        until = self._next_alive_ns
        if self._next_deadline_ns:
            until = min(until, self._next_deadline_ns)
        # Lost streams and superseded ones show within this time even when nothing else happens.
        longest = 0.05 if self._sequences else 1.0
        return min(max(until - now, 0) / SECOND_NS, longest)

    def stats(self) -> dict[str, Any]:
        """The `stats` of the contract."""
        return {
            "active": self._ledger.active,
            "waiting": len(self._waiting),
            "paused": len(self._running.paused),
            "slots": self._ledger.slots,
            "kv_cells": self._ledger.cells,
            "kv_reserved": self._ledger.reserved_cells,
            "kv_cached": self._ledger.retained_cells,
            "steps": self._steps,
            "generated_tokens": self._generated,
            "prompt_tokens": self._prompted,
            "cached_tokens": self._cached,
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
        for owner in [*self._one_shots, *([self._owner] if self._owner else [])]:
            owner.sink.close(owner.take(0, self._clock()))
        self._one_shots, self._owner = [], None

    def _take(self, operation: Operation) -> None:
        match operation:
            case OpenStream(sink):
                self._open(sink)
            case Submit(entries, sink):
                self._submit(entries, sink)
            case Grant(limits):
                for seq, limit in limits:
                    self._grant(seq, limit)
            case Cancel(seqs, reason):
                for seq in seqs:
                    if seq in self._sequences:
                        self._finish(self._sequences[seq], reason)

    def _open(self, sink: Sink) -> None:
        if self._owner is not None:
            self._end_owner(self._owner)
            self._owner.tell(self._alive())  # FINAL must ride on a response, so there has to be one
            self._owner.sink.close(self._owner.take(0, self._clock()))
        self._owner = Owner(sink)
        self._owner.tell(hello(self._identity, self._incarnation))

    def _submit(self, entries: tuple[Prepared | Rejected, ...], sink: Sink | None) -> None:
        owner = self._owner
        if sink is not None:
            owner = Owner(sink, is_one_shot=True)
            self._one_shots.append(owner)
        if owner is None:
            return  # its owner was lost on the way here
        now = self._clock()
        for entry in entries:
            if entry.seq in self._sequences:
                # The same attempt again (a receipt was lost): it is running already.
                if owner.is_one_shot:
                    owner.tell(refused(entry.seq, RefusalError("INVALID_REQUEST", "seq is in use.", "seq")))
                continue
            if isinstance(entry, Rejected):
                owner.tell(refused(entry.seq, entry.error))
                continue
            sequence = Sequence.of(entry, owner)
            self._sequences[entry.seq] = sequence
            self._waiting.append(sequence)
            if entry.deadline_ns and (not self._next_deadline_ns or entry.deadline_ns < self._next_deadline_ns):
                self._next_deadline_ns = entry.deadline_ns
            self._admit(now)
            if len(self._waiting) > self._max_waiting:
                last = self._waiting.pop()
                self._refuse(last, RefusalError(OVERLOADED, "The engine's queue is full."))

    def _grant(self, seq: int, limit: int) -> None:
        sequence = self._sequences.get(seq)
        if sequence is None:
            return
        sequence.grant(limit)
        if sequence.phase is Phase.PAUSED and sequence.generated < sequence.limit:
            self._running.decode(sequence)

    def _end_lost_owners(self) -> None:
        if self._owner is not None and self._owner.sink.is_lost:
            self._end_owner(self._owner)
            self._owner.sink.close(None)
            self._owner = None
        for owner in [owner for owner in self._one_shots if owner.sink.is_lost]:
            self._end_owner(owner)
            owner.sink.close(None)
            self._one_shots.remove(owner)

    def _end_owner(self, owner: Owner) -> None:
        for sequence in [sequence for sequence in self._sequences.values() if sequence.owner is owner]:
            self._finish(sequence, "cancelled")

    def _expire(self, now: int) -> None:
        for sequence in list(self._sequences.values()):
            deadline = sequence.request.deadline_ns
            if deadline and deadline <= now:
                if sequence.phase is Phase.WAITING:
                    self._waiting.remove(sequence)
                    self._refuse(sequence, RefusalError(DEADLINE_EXCEEDED, "The deadline passed in the queue."))
                else:
                    self._finish(sequence, "deadline")
        deadlines = [s.request.deadline_ns for s in self._sequences.values() if s.request.deadline_ns]
        self._next_deadline_ns = min(deadlines, default=0)

    def _refuse(self, sequence: Sequence, error: RefusalError) -> None:
        del self._sequences[sequence.id]
        sequence.phase = Phase.FINISHED
        self._is_blocked = False
        sequence.owner.tell(refused(sequence.id, error))

    def _admit(self, now: int) -> None:
        """First come, first served: a big request at the head is never overtaken, so it cannot starve."""
        while self._waiting and not self._is_blocked:
            sequence = self._waiting[0]
            prompt = sequence.request.prompt
            match = self._index.match(prompt)
            reservation = self._ledger.reserve(sequence.cells, match.lane if match else None)
            if reservation is None:
                self._is_blocked = True
                return
            self._waiting.popleft()
            for lane in reservation.evicted:
                self._forget(lane)
            lane = sequence.lane = reservation.lane
            if match is not None and match.lane not in reservation.evicted:
                sequence.cached = sequence.position = match.length
                if reservation.adopted:
                    self._backend.truncate(lane, match.length)
                else:
                    self._backend.copy_prefix(match.lane, lane, match.length)
            self._backend.begin(lane, prompt, sequence.request.sampling, sequence.request.top_logprobs)
            self._index.put(lane, prompt, sequence.position)
            sequence.admitted_ns = now
            self._running.start(sequence)
            self._prompted += len(prompt)
            self._cached += sequence.cached
            sequence.owner.tell(admitted(sequence))

    def _forget(self, lane: int) -> None:
        self._index.remove(lane)
        self._backend.free(lane)

    def _is_congested(self) -> bool:
        return (self._owner is not None and self._owner.sink.is_congested) or any(
            owner.sink.is_congested for owner in self._one_shots
        )

    def _step(self) -> int:
        plan = self._running.plan(self._prefill_chunk)
        decoding = self._running.decoding
        if (not plan and not decoding) or self._is_congested():
            return 0
        sampled = self._backend.step(self._running.lanes, [chunk for _, chunk in plan])
        self._steps += 1
        tokens, details = sampled.tokens, sampled.details
        self._generated += len(tokens)
        pieces = self._pieces
        full: list[Sequence] = []
        slow: list[tuple[Sequence, int, int]] = []
        # The fast path: about half a microsecond a token. What it leaves out is in `_accept`.
        for index, sequence in enumerate(decoding):
            token = tokens[index]
            piece = pieces[token]
            if piece is None or not sequence.is_fast:
                slow.append((sequence, token, index))
                continue
            sequence.ids.append(token)
            sequence.generated = generated = sequence.generated + 1
            owner = sequence.owner
            owner.seqs.append(sequence.id)
            owner.counts.append(1)
            owner.ids.append(token)
            owner.lengths.append(len(piece))
            owner.texts.append(piece)
            if generated >= sequence.limit:
                full.append(sequence)
        first = self._advance(plan, len(decoding))
        for sequence, index in first:
            slow.append((sequence, tokens[index], index))
        for sequence, token, index in slow:
            if not self._accept(sequence, token, details.get(index)) and sequence.generated >= sequence.limit:
                full.append(sequence)
        for sequence in full:
            self._pause_or_end(sequence)
        return 1

    def _advance(self, plan: list[tuple[Sequence, Prefill]], index: int) -> list[tuple[Sequence, int]]:
        """Notes what was prefilled; returns the sequences that drew their first token, with its index."""
        first = []
        now = self._clock() if plan else 0
        for sequence, chunk in plan:
            sequence.position += len(chunk.tokens)
            self._index.grow(sequence.lane, sequence.position)
            if chunk.is_last:
                sequence.first_token_ns = now
                self._running.decode(sequence)
                first.append((sequence, index))
                index += 1
        return first

    def _accept(self, sequence: Sequence, token: int, detail: Detail | None) -> bool:
        """One token with everything that can come of it; whether it ended the sequence."""
        request = sequence.request
        sequence.generated += 1
        sequence.ids.append(token)
        stop: dict[str, Any] | None = None
        if token in request.stop_token_ids:
            stop = {"kind": "token", "value": token}
        elif token in self._backend.facts.end_tokens and not request.ignore_eos:
            stop = {"kind": "eos", "value": token}
        if stop is not None:
            sequence.withheld += 1
            self._finish(sequence, "stop", stop=stop)
            return True
        release = sequence.joiner.push(token, self._backend.piece(token), detail)
        sequence.owner.add(sequence.id, release, has_logprobs=request.top_logprobs is not None)
        sequence.is_fast = sequence.is_plain and sequence.joiner.is_empty
        if release.stop is None:
            return False
        sequence.withheld += release.dropped
        self._finish(sequence, "stop", stop={"kind": "string", "value": release.stop})
        return True

    def _pause_or_end(self, sequence: Sequence) -> None:
        if sequence.generated >= sequence.max_tokens:
            self._finish(sequence, "length")
        else:
            self._running.pause(sequence)

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
        """The one way to the end of an accepted sequence: slot and cells first, then the event."""
        del self._sequences[sequence.id]
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._release(sequence, keep=keep, touch_backend=touch_backend)
        sequence.phase = Phase.FINISHED
        self._is_blocked = False
        if not sequence.joiner.is_empty:
            has_logprobs = sequence.request.top_logprobs is not None
            sequence.owner.add(sequence.id, sequence.joiner.flush(), has_logprobs=has_logprobs)
        sequence.owner.tell(finished(sequence, reason, self._clock(), stop=stop, error=error))

    def _release(self, sequence: Sequence, *, keep: bool, touch_backend: bool) -> None:
        lane, stored = sequence.lane, sequence.stored
        if touch_backend:
            self._backend.end(lane)
        if keep and touch_backend and stored >= MATCH_MIN:
            self._ledger.retain(lane, stored)
            self._index.put(lane, sequence.tokens(), stored)
            return
        self._ledger.release(lane)
        self._index.remove(lane)
        if touch_backend:
            self._backend.free(lane)

    def _alive(self) -> dict[str, Any]:
        return {"type": "alive", "stats": self.stats()}

    def _flush(self, steps: int, *, alive: bool = True) -> None:
        """Hands over what has gathered. `alive` also goes out while tokens flow: it carries the stats."""
        now = self._clock()
        owner = self._owner
        if alive and now >= self._next_alive_ns:
            self._next_alive_ns = now + ALIVE_EVERY_NS
            if owner is not None:
                owner.tell(self._alive())
        if owner is not None:
            batch = owner.take(steps, now)
            if batch is not None:
                owner.sink.put(batch)
        for one in list(self._one_shots):
            is_over = not any(sequence.owner is one for sequence in self._sequences.values())
            batch = one.take(steps, now)
            if is_over:
                one.sink.close(batch)
                self._one_shots.remove(one)
            elif batch is not None:
                one.sink.put(batch)
