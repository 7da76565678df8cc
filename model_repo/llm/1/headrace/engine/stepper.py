"""One step of the backend, and its tokens on the way to their readers.

The fast path is for tokens whose bytes are whole characters, of sequences that nothing can end but a length: it only
appends to the owner's columns. Everything else takes the slow path: stop strings, ends, logprobs, what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.engine.backend import Backend, Detail, Prefill
from headrace.engine.lanes import Lanes
from headrace.engine.pieces import PieceTable
from headrace.engine.request import RefusalError, invalid
from headrace.engine.running import Running
from headrace.engine.sequence import Sequence
from headrace.engine.text import Release, ending_token


class Stepper:
    """Calls `end` for a sequence that met its stop, or without one where its guide allows no token, `use_up` for one at
    its limit, `pause` for one without credit.
    """

    def __init__(
        self,
        backend: Backend,
        running: Running,
        lanes: Lanes,
        *,
        end: Callable[[Sequence, dict[str, Any] | None], None],
        use_up: Callable[[Sequence], None],
        pause: Callable[[Sequence, int], None],
        clock: Callable[[], int],
    ) -> None:
        self._backend = backend
        self._running = running
        self._lanes = lanes
        self._end = end
        self._use_up = use_up
        self._pause = pause
        self._clock = clock
        self._pieces = PieceTable(backend.piece, backend.facts.end_tokens)
        self.steps = self.generated = 0

    def step(self, prefill_chunk: int) -> int:
        """Runs one step if there is anything to do, with at most `prefill_chunk` tokens of prompts; how many it ran."""
        plan = self._running.plan(prefill_chunk)
        decoding = self._running.decoding
        if not plan and not decoding:
            return 0
        sampled = self._backend.step(self._running.lanes, [chunk for _, chunk in plan])
        self.steps += 1
        tokens, details = sampled.tokens, sampled.details
        self.generated += len(tokens)
        pieces = self._pieces
        full: list[Sequence] = []
        slow: list[tuple[Sequence, int, int]] = []
        # The fast path: about half a microsecond a token. What it leaves out is in `accept`.
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
            if not self.accept(sequence, token, details.get(index)) and sequence.generated >= sequence.limit:
                full.append(sequence)
        for sequence in full:
            self._use_up(sequence)
        return 1

    def _advance(self, plan: list[tuple[Sequence, Prefill]], index: int) -> list[tuple[Sequence, int]]:
        """Notes what was prefilled; returns the sequences that drew a token after it, with its index."""
        first = []
        now = self._clock() if plan else 0
        for sequence, chunk in plan:
            sequence.position += len(chunk.tokens)
            self._lanes.grow(sequence)
            if chunk.is_last:
                sequence.first_token_ns = sequence.first_token_ns or now
                self._running.decode(sequence)
                first.append((sequence, index))
                index += 1
            elif sequence.position >= sequence.prefill_end:
                self._pause(sequence, now)
        return first

    def accept(self, sequence: Sequence, token: int, detail: Detail | None) -> bool:
        """One token with everything that can come of it; whether it ended the sequence."""
        request = sequence.request
        if token < 0:
            self.generated -= 1
            self._end(sequence, None)
            return True
        sequence.generated += 1
        sequence.ids.append(token)
        end_tokens = () if request.ignore_eos else self._backend.facts.end_tokens
        stop = ending_token(token, request.stop_token_ids, end_tokens)
        if stop is not None:
            sequence.withheld += 1
            self._end(sequence, stop)
            return True
        release = sequence.fresh(sequence.joiner.push(token, self._backend.piece(token), detail))
        sequence.withheld += release.dropped
        hand_out(sequence, release)
        if release.stop is not None:
            self._end(sequence, {"kind": "string", "value": release.stop})
            return True
        sequence.settle()
        return False


def stuck() -> RefusalError:
    """Why an answer ends whose guide leaves it no way to go on."""
    return invalid("guided", "allows no token here, or could be followed in too many ways")


def hand_out(sequence: Sequence, release: Release) -> None:
    """What may be shown goes out, as far as there is credit for it where the engine runs ahead.

    Text without an id is of tokens that a lost engine handed out: it needs no credit, and nothing is before it.
    """
    if sequence.ahead is not None and (release.ids or not release.text):
        sequence.ahead.push(release)
        release = sequence.ahead.take(sequence.limit - sequence.emitted)
    has_logprobs = sequence.request.top_logprobs is not None
    sequence.owner.add(sequence.id, release, has_logprobs=has_logprobs)
