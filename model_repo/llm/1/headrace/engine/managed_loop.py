"""The loop over an engine that schedules by itself: the same contract, the same decisions, other steps.

A *stay* is one request in the engine; a sequence that was preempted and came back has had several. A slot is given
back only when the engine has confirmed the stay's end, so `finished` means here, too, that slot and KV are free:

    submitted --deltas--> ended by the engine
        |
        +--cancel, stop string, deadline, too far ahead--> leaving --end--> finished, or preempted

The engine cannot pause a sequence, so it always runs ahead of the credit, and is aborted where it is too far ahead.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from headrace.engine.backend import Detail, ModelFacts
from headrace.engine.loop import EngineLoop
from headrace.engine.managed import Delta, End, EngineDead, ManagedEngine, ManagedRequest
from headrace.engine.pieces import PieceTable
from headrace.engine.request import ENGINE_FAILED, PRIORITY_MAX, Guided, RefusalError, Sampling, invalid
from headrace.engine.sequence import Sequence


class Abort(enum.Enum):
    """When the engine is asked to end a request early."""

    ON = "on"
    AFTER_FIRST_TOKEN = "after_first_token"  # noqa: S105
    """Not while its prompt is computed: some releases do not survive that."""
    OFF = "off"
    """Never: it runs to its own end, and what was cancelled holds its slot until then."""


DEFAULT_ABORT = {"tensorrt_llm": "after_first_token", "vllm": "on", "sglang": "on"}
"""TensorRT-LLM: ending a prefill early was switched off elsewhere for being unreliable; docs/engines.md says more."""


class _Ending(NamedTuple):
    reason: str
    stop: dict[str, Any] | None = None
    error: RefusalError | None = None


@dataclass(slots=True, eq=False)
class _Stay:
    """`ending` is what will be told of the sequence; without one, a leaving stay is a preemption."""

    id: str
    sequence: Sequence
    is_leaving: bool = False
    is_abort_asked: bool = False
    is_over: bool = False
    has_spoken: bool = False
    ending: _Ending | None = None


class ManagedLoop(EngineLoop):
    """`engine` has been started; see `EngineLoop` for the rest."""

    def __init__(
        self, engine: ManagedEngine, *, abort: Abort, run_ahead_tokens: int, clock: Callable[[], int], **common: Any
    ) -> None:
        if run_ahead_tokens < 1:
            raise ValueError("an engine that cannot pause needs run_ahead_tokens")
        common["lanes"] = common["slots"]  # nothing is retained here: the engine has a prefix cache of its own
        super().__init__(HostedBackend(engine), run_ahead_tokens=run_ahead_tokens, clock=clock, **common)
        self._engine = engine
        self._abort = abort
        self._pieces = PieceTable(engine.piece, engine.facts.end_tokens)
        self._stays: dict[str, _Stay] = {}
        self._stay_of: dict[int, _Stay] = {}
        self._submitted = 0

    @property
    def _has_step(self) -> bool:
        return False  # the engine wakes the loop

    def stats(self) -> dict[str, Any]:
        """The `stats` of the contract; where the engine says how full its KV is, what is not reserved is cached."""
        stats = super().stats()
        told = self._engine.stats()
        if told.kv_used_tokens >= 0:
            stats["kv_cached"] = max(0, min(told.kv_used_tokens, stats["kv_cells"]) - stats["kv_reserved"])
        # Of the ledger's own lanes nothing is ever retained: without the engine's word nothing is known.
        stats |= {"kv_stored": -1, "kv_removed": -1, "kv_events_lost": -1}
        if told.kv_events is not None:
            events = told.kv_events
            stats |= {"kv_stored": events.stored, "kv_removed": events.removed, "kv_events_lost": events.lost}
        return stats

    def close(self) -> None:
        """Ends everything without waiting for the engine, which is shut down next."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "cancelled", touch_backend=False)
        super().close()

    def _step(self) -> int:
        """Takes what the engine has said. Raises `EngineDead`, which fails the loop."""
        before = self._stepper.generated
        for delta in self._engine.events():
            stay = self._stays.get(delta.id)
            if stay is not None:
                self._hear(stay, delta)
        gone = self._engine.health()
        if gone is not None:
            raise EngineDead(gone)
        if self._stepper.generated == before:
            return 0
        self._stepper.steps += 1
        return 1

    def _hear(self, stay: _Stay, delta: Delta) -> None:
        sequence = stay.sequence
        stay.is_over = delta.end is not None
        if delta.cached >= 0 and not stay.has_spoken:
            self._note_cached(sequence, delta.cached)
        if delta.tokens and not stay.has_spoken:
            stay.has_spoken = True
            if stay.ending is None:  # what comes later is nobody's
                sequence.first_token_ns = sequence.first_token_ns or self._clock()
            sequence.position = len(sequence.prefix)
            self._running.decode(sequence)
        if stay.ending is None:
            self._take_tokens(stay, delta)
        if delta.end is not None:
            self._part(stay, delta)
        elif stay.is_leaving:
            self._ask_abort(stay)

    def _note_cached(self, sequence: Sequence, cached: int) -> None:
        """It was admitted with nothing known of it; the counts are put right once the engine has said."""
        if sequence.preemptions == 0:
            prompt = len(sequence.request.prompt)
            sequence.cached = min(cached, prompt)
            self._cached += sequence.cached
            self._reprefilled -= max(0, cached - prompt)
        else:
            self._reprefilled -= min(cached, len(sequence.prefix))

    def _take_tokens(self, stay: _Stay, delta: Delta) -> None:
        sequence = stay.sequence
        details: list[Detail | None] = list(delta.details) if delta.details else [None] * len(delta.tokens)
        sequence.proposed += delta.proposed
        for token, detail in zip(delta.tokens, details, strict=True):
            self._stepper.generated += 1
            is_ended = not self._go_straight(sequence, token) and self._stepper.accept(sequence, token, detail)
            if not is_ended and sequence.generated >= sequence.limit:
                self._use_up(sequence)
            if stay.ending is not None:
                return

    def _go_straight(self, sequence: Sequence, token: int) -> bool:
        """The fast path of `Stepper.step`."""
        piece = self._pieces[token]
        if piece is None or not sequence.is_fast:
            return False
        sequence.ids.append(token)
        sequence.generated += 1
        owner = sequence.owner
        owner.seqs.append(sequence.id)
        owner.counts.append(1)
        owner.ids.append(token)
        owner.lengths.append(len(piece))
        owner.texts.append(piece)
        return True

    def _start(self, sequence: Sequence, now: int) -> None:
        super()._start(sequence, now)
        request = sequence.request
        said = len(sequence.ids)
        self._submitted += 1
        # Of one length: SGLang aborts every request whose id begins with the one named.
        stay = _Stay(f"headrace-{self._submitted:016x}", sequence)
        self._stays[stay.id] = self._stay_of[sequence.id] = stay
        end_tokens = frozenset() if request.ignore_eos else self._engine.facts.end_tokens
        self._engine.submit(
            ManagedRequest(
                id=stay.id,
                prompt=sequence.prefix,
                said=said,
                max_tokens=sequence.max_tokens - sequence.generated,
                sampling=_go_on(request.sampling, said),
                end_tokens=request.stop_token_ids | end_tokens,
                top_logprobs=request.top_logprobs,
                cache_salt=request.cache_salt,
                guided=request.guide,
                priority=(request.priority - 1) / PRIORITY_MAX,
            )
        )

    def _make_room(self, head: Sequence, now: int) -> None:
        """Nobody is paused, so there is nobody to preempt."""
        self._queue.block(0)

    def _preempt(self, sequence: Sequence) -> None:
        """Too far ahead of its credit. Where an abort would cost more than memory, it runs on instead.

        Engines count presence and frequency over what they generated in one stay only, and a guide begins with it.
        """
        sampling = sequence.request.sampling
        if (
            self._abort is Abort.OFF
            or sequence.request.guide is not None
            or sampling.presence_penalty
            or sampling.frequency_penalty
        ):
            return
        self._leave(self._stay_of[sequence.id])

    def _expire(self, now: int) -> None:
        """One that is leaving has met its end already."""
        staying = [one for one in self._sequences.values() if not self._is_ending(one)]
        for sequence in staying:
            self._end_if_overdue(sequence, now)
        self._limits.restart(one for one in self._sequences.values() if not self._is_ending(one))

    def _is_ending(self, sequence: Sequence) -> bool:
        stay = self._stay_of.get(sequence.id)
        return stay is not None and stay.ending is not None

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        *,
        stop: dict[str, Any] | None = None,
        error: RefusalError | None = None,
        keep: bool = False,
        touch_backend: bool = True,
    ) -> None:
        """One that is in the engine leaves it first; `touch_backend` False: there is no engine to wait for."""
        stay = self._stay_of.get(sequence.id)
        if stay is None or not touch_backend:
            if stay is not None:
                self._forget(stay)
            super()._finish(sequence, reason, stop=stop, error=error, keep=False, touch_backend=touch_backend)
        elif stay.ending is None:
            sequence.stopped_ns = self._clock()
            stay.ending = _Ending(reason, stop, error)
            self._leave(stay)

    def _leave(self, stay: _Stay) -> None:
        stay.is_leaving = True
        self._ask_abort(stay)

    def _ask_abort(self, stay: _Stay) -> None:
        if stay.is_over or stay.is_abort_asked or self._abort is Abort.OFF:
            return
        if self._abort is Abort.AFTER_FIRST_TOKEN and not stay.has_spoken:
            return
        stay.is_abort_asked = True
        self._engine.cancel(stay.id)

    def _part(self, stay: _Stay, delta: Delta) -> None:
        """The engine is done with it: slot and KV are free."""
        sequence = stay.sequence
        self._forget(stay)
        if stay.ending is not None:
            reason, stop, error = stay.ending
            super()._finish(sequence, reason, stop=stop, error=error, keep=False)
        elif delta.end is End.STOP:
            super()._finish(sequence, "stop", stop=_unseen_stop(sequence, delta), keep=False)
        elif delta.end is End.LENGTH:
            super()._finish(sequence, "length", keep=False)
        elif delta.end is End.ABORTED and stay.is_leaving:
            self._go_out(sequence)
        elif delta.end is End.REFUSED:
            error = invalid(
                "guided", "was refused by the engine: it is faulty, or has what the engine does not support"
            )
            super()._finish(sequence, "error", error=error, keep=False)
        else:
            error = RefusalError(ENGINE_FAILED, "The engine could not go on with this request.")
            super()._finish(sequence, "error", error=error, keep=False)

    def _go_out(self, sequence: Sequence) -> None:
        super()._preempt(sequence)
        if sequence.can_go_on:
            self._requeue(sequence)

    def _forget(self, stay: _Stay) -> None:
        del self._stays[stay.id]
        del self._stay_of[stay.sequence.id]


class HostedBackend:
    """`backend.Backend` as far as the loop's books need one: an engine that schedules by itself fills its own lanes."""

    def __init__(self, engine: ManagedEngine) -> None:
        self._engine = engine

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model."""
        return self._engine.facts

    def tokenize(self, text: str) -> list[int]:
        """See `ManagedEngine`."""
        return self._engine.tokenize(text)

    def piece(self, token: int) -> bytes:
        """See `ManagedEngine`."""
        return self._engine.piece(token)

    def compile(self, guided: Guided) -> Guided:
        """See `ManagedEngine.check_guided`."""
        self._engine.check_guided(guided)
        return guided

    def warm_up(self) -> None:
        """`start` has done it."""

    def begin(self, *_: object) -> None:
        """The loop submits."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The engine has a prefix cache of its own."""
        raise AssertionError("no prefix of a managed engine is known")

    def truncate(self, lane: int, length: int) -> None:
        """See `copy_prefix`."""
        raise AssertionError("no prefix of a managed engine is known")

    def step(self, *_: object) -> Any:
        """The engine steps by itself."""
        raise AssertionError("a managed engine is not stepped")

    def end(self, lane: int) -> None:
        """The engine has said so itself."""

    def free(self, lane: int) -> None:
        """See `end`."""

    def close(self) -> None:
        """Shuts the engine down."""
        self._engine.shutdown()


def _unseen_stop(sequence: Sequence, delta: Delta) -> dict[str, Any]:
    """The stop that the engine met and the host did not: its token was trimmed, or it is the model's alone."""
    if delta.end_token is None:
        return {"kind": "eos", "value": sequence.ids[-1] if sequence.ids else -1}
    sequence.generated += 1
    sequence.withheld += 1
    sequence.ids.append(delta.end_token)
    is_asked = delta.end_token in sequence.request.stop_token_ids
    return {"kind": "token" if is_asked else "eos", "value": delta.end_token}


def _go_on(sampling: Sampling, said: int) -> Sampling:
    """After a preemption, or behind a lost engine's tokens: other random numbers of the same seed."""
    seed = sampling.seed or 0
    if said:
        digest = blake2b(f"{seed}/{said}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    # What every engine takes: 63 bits, without a sign.
    return replace(sampling, seed=seed & (2**63 - 1))
