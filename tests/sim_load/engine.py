"""The model of a continuous-batching engine: the only part of a worker that is not the production's.

    time of a step = BASE_S + SLOPE_S x sequences that decode + PREFILL_S x prompt tokens of the chunk in it

All sequences that decode get one token a step; one sequence's prompt is computed at a time, a chunk a step, beside
them. Sequences begin between two steps, where a slot and their KV cells are free. Steps in which nothing changes are
taken at once: what happens, and when, is the same as step by step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.control.resources import Engine as EngineKind
from headrace.control.resources import Execution, Revision
from sim_load.clock import Clock

SLOTS = 8
KV_CELLS = 24_576
CONTEXT = 12_288
CHUNK = 512
BASE_S = 0.020
SLOPE_S = 0.003
PREFILL_S = 1 / 6_000
KEPT_TOKENS = 12_000
"""Beginnings of prompts that an engine keeps, those used longest ago go first."""
FAILS_AFTER_S = 0.02
REVISION = Revision("m", "", "", Execution(EngineKind.SYNTHETIC, CONTEXT, SLOTS, KV_CELLS))
"""What all of them serve."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt, as the engine has it."""

    token: int
    prompt: int
    output: int
    """Tokens after which it is at its end."""
    cells: int
    prefix: int = 0
    """Which shared beginning it has; 0: none."""
    prefix_tokens: int = 0
    cached: int = 0
    admitted_at: float = 0.0
    first_at: float = 0.0
    to_compute: int = 0
    generated: int = 0
    is_cancelled: bool = False


class Listener(Protocol):
    """Who hears what the engine says."""

    def admitted(self, engine: Engine, sequence: Sequence) -> None: ...

    def first_token(self, engine: Engine, sequence: Sequence) -> None: ...

    def finished(self, engine: Engine, sequence: Sequence) -> None: ...

    def failed(self, engine: Engine, sequence: Sequence) -> None: ...

    def responded(self, engine: Engine, steps: int) -> None: ...

    def settled(self, engine: Engine) -> None: ...


@dataclass(slots=True)
class Kept:
    """Beginnings of prompts, by number; tokens."""

    prefixes: OrderedDict[int, int] = field(default_factory=OrderedDict)
    tokens: int = 0

    def use(self, prefix: int, tokens: int) -> int:
        """Tokens that need not be computed; from now on they are kept."""
        if not prefix:
            return 0
        found = self.prefixes.pop(prefix, 0)
        self.prefixes[prefix] = tokens
        self.tokens += tokens - found
        while self.tokens > KEPT_TOKENS and len(self.prefixes) > 1:
            self.tokens -= self.prefixes.popitem(last=False)[1]
        return found


class Engine:
    """One run of one worker's engine."""

    def __init__(self, clock: Clock, replica: str, incarnation: int, listener: Listener) -> None:
        self.replica = replica
        self.incarnation = incarnation
        self.slowness = 1.0
        """How many times longer its steps take."""
        self.is_failing: Callable[[], bool] = lambda: False
        self.is_dead = False
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.decoding: list[Sequence] = []
        self.cells = 0
        self.kept = Kept()
        self._clock = clock
        self._listener = listener
        self._began_at = 0.0
        self._step_s = 0.0
        self._steps = 0
        """How many are under way; 0: it stands."""
        self._plan_number = 0

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.prefilling or self.decoding)

    def submit(self, sequence: Sequence) -> None:
        """It begins as soon as it can."""
        if self.is_dead:
            return
        if self.is_failing():
            self._clock.after(FAILS_AFTER_S, self._fail, sequence)
            return
        self.waiting.append(sequence)
        self._look()

    def cancel(self, token: int) -> None:
        """It ends between two steps."""
        for sequence in (*self.waiting, *self.prefilling, *self.decoding):
            if sequence.token == token:
                sequence.is_cancelled = True
                self._look()

    def kill(self) -> None:
        """It is gone, and says nothing any more."""
        self.is_dead = True
        self._plan_number += 1

    def _fail(self, sequence: Sequence) -> None:
        if not self.is_dead:
            self._listener.failed(self, sequence)

    def _look(self) -> None:
        """Something is new: after the step that is under way, it counts."""
        if not self._steps:
            self._plan()
            return
        done = max(1, -(-(self._clock.now - self._began_at) // self._step_s))
        if done < self._steps:
            self._steps = int(done)
            self._plan_number += 1
            self._clock.at(self._began_at + self._steps * self._step_s, self._stepped, self._plan_number)

    def _plan(self) -> None:
        """Between two steps: end what is cancelled, begin what can begin, and go on until something changes."""
        self._end_cancelled()
        self._begin()
        chunk, steps = 0, 1 << 30
        if self.prefilling:
            left = self.prefilling[0].to_compute
            chunk = min(CHUNK, left)
            steps = left // chunk
        if self.decoding:
            steps = min(steps, *(s.output - s.generated for s in self.decoding))
        elif not self.prefilling:
            self._steps = 0
            return
        self._began_at = self._clock.now
        self._step_s = (BASE_S + SLOPE_S * len(self.decoding) + PREFILL_S * chunk) * self.slowness
        self._steps = steps
        self._plan_number += 1
        self._clock.at(self._began_at + steps * self._step_s, self._stepped, self._plan_number)

    def _begin(self) -> None:
        while self.waiting and len(self.prefilling) + len(self.decoding) < SLOTS:
            first = self.waiting[0]
            if self.cells + first.cells > KV_CELLS and self.cells:
                return
            self.waiting.popleft()
            first.admitted_at = self._clock.now
            first.cached = self.kept.use(first.prefix, first.prefix_tokens)
            first.to_compute = max(1, first.prompt - first.cached)
            self.cells += first.cells
            self.prefilling.append(first)
            self._listener.admitted(self, first)

    def _end_cancelled(self) -> None:
        for sequence in [s for s in (*self.waiting, *self.prefilling, *self.decoding) if s.is_cancelled]:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            else:
                self._free(sequence)
            self._listener.finished(self, sequence)

    def _free(self, sequence: Sequence) -> None:
        (self.decoding if sequence.first_at else self.prefilling).remove(sequence)
        self.cells -= sequence.cells

    def _stepped(self, number: int) -> None:
        if number != self._plan_number:
            return
        steps, now = self._steps, self._clock.now
        self._listener.responded(self, steps)
        ended = []
        for sequence in self.decoding:
            sequence.generated += steps
            if sequence.generated >= sequence.output:
                ended.append(sequence)
        if self.prefilling:
            first = self.prefilling[0]
            first.to_compute -= steps * min(CHUNK, first.to_compute)
            if first.to_compute <= 0:
                self.prefilling.popleft()
                self.decoding.append(first)
                first.first_at, first.generated = now, 1
                self._listener.first_token(self, first)
                if first.output <= 1:
                    ended.append(first)
        for sequence in ended:
            self._free(sequence)
            self._listener.finished(self, sequence)
        self._steps = 0
        self._listener.settled(self)
        if not self._steps and not self.is_dead:
            self._plan()
