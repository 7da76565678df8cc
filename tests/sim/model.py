"""A language model of a few lines whose next token follows from all that is in its KV, and from nothing else.

So KV that is mixed up, lost or computed twice shows in the output. The first token of a prompt says how long the
answer is, the second how long the prompt is. It checks how lanes are used, as a real backend would only suffer it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.backend import ModelFacts, Prefill, Sampled
from headrace.engine.request import Sampling

END = 0
_WORDS = [f" {letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
_EMOJI = ("🌊", "💧", "🐟", "🛶")
_FIRST_HALF = 1 + len(_WORDS)
PIECES: list[bytes] = [b"", *(word.encode() for word in _WORDS)]
for _emoji in _EMOJI:
    PIECES += [_emoji.encode()[:2], _emoji.encode()[2:]]
_FACTS = ModelFacts(kind="simulated", model="simulated", vocabulary=len(PIECES), end_tokens=frozenset({END}))


def prompt_of(answer: int, length: int, seed: int) -> list[int]:
    """A prompt whose answer has `answer` tokens."""
    return [answer, length, *((seed + place * 7) % 50 for place in range(length - 2))]


def text_of(tokens: Sequence[int]) -> str:
    """The text of tokens; an emoji that is cut at the end is shown as the replacement character."""
    return b"".join([PIECES[token] for token in tokens]).decode(errors="replace")


def _mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) & 0xFFFF_FFFF


def _draw(state: int, newest: int, answer: int, position: int) -> int:
    if position >= answer:
        return END
    if position and newest >= _FIRST_HALF and not (newest - _FIRST_HALF) % 2:
        return newest + 1
    choice = (state >> 7) % (len(_WORDS) + len(_EMOJI))
    return 1 + choice if choice < len(_WORDS) else _FIRST_HALF + 2 * (choice - len(_WORDS))


@functools.cache
def truth(answer: int, length: int, seed: int) -> tuple[int, ...]:
    """The whole answer, without the end token."""
    state, newest = 0, 0
    for token in prompt_of(answer, length, seed):
        state, newest = _mix(state, token), token
    said: list[int] = []
    while (token := _draw(state, newest, answer, len(said))) != END:
        said.append(token)
        state, newest = _mix(state, token), token
    return tuple(said)


@dataclass(slots=True)
class _Lane:
    kv: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    """Of the model, behind each token of the KV."""
    wanted: list[int] = field(default_factory=list)
    drawn: int | None = None
    is_active: bool = False

    def store(self, token: int) -> None:
        self.kv.append(token)
        self.states.append(_mix(self.states[-1] if self.states else 0, token))

    def draw(self) -> int:
        answer, length = self.kv[0], self.kv[1]
        self.drawn = _draw(self.states[-1], self.kv[-1], answer, len(self.kv) - length)
        return self.drawn


class SimulatedBackend:
    """See `headrace.engine.backend.Backend`."""

    facts = _FACTS

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    def piece(self, token: int) -> bytes:
        return PIECES[token]

    def warm_up(self) -> None:
        pass

    def begin(
        self,
        lane: int,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
        top_logprobs: int | None,
        guide: object = None,
    ) -> None:
        assert guide is None, "no request has one here"
        one = self._lanes.setdefault(lane, _Lane())
        assert not one.is_active, f"KV: lane {lane} is in use"
        one.wanted = [*prompt, *generated]
        assert one.kv == one.wanted[: len(one.kv)], f"KV: lane {lane} begins with another prompt's KV"
        one.is_active, one.drawn = True, None

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        there, here = self._lanes[source], self._lanes.setdefault(target, _Lane())
        assert not here.kv, f"KV: lane {target} is not empty"
        assert length <= len(there.kv), f"KV: lane {source} holds fewer tokens"
        here.kv, here.states = there.kv[:length], there.states[:length]

    def truncate(self, lane: int, length: int) -> None:
        one = self._lanes[lane]
        assert length <= len(one.kv), f"KV: lane {lane} holds fewer tokens"
        del one.kv[length:], one.states[length:]

    def step(self, decode: Sequence[int], prefill: Sequence[Prefill]) -> Sampled:
        tokens = []
        for number in decode:
            lane = self._lanes[number]
            assert lane.is_active, f"KV: a step for lane {number}, which nobody holds"
            assert lane.drawn is not None, f"KV: lane {number} decodes before its prompt is prefilled"
            lane.store(lane.drawn)
            tokens.append(lane.draw())
        for chunk in prefill:
            lane = self._lanes[chunk.lane]
            assert lane.is_active, f"KV: a prefill for lane {chunk.lane}, which nobody holds"
            assert chunk.position == len(lane.kv), f"KV: lane {chunk.lane} has a gap or an overlap"
            for token in chunk.tokens:
                lane.store(token)
            assert lane.kv == lane.wanted[: len(lane.kv)], f"KV: lane {chunk.lane} prefills something else"
            if chunk.is_last:
                assert len(lane.kv) == len(lane.wanted), f"KV: lane {chunk.lane} draws before its prefill is done"
                tokens.append(lane.draw())
        return Sampled(tokens)

    def end(self, lane: int) -> None:
        assert self._lanes[lane].is_active, f"KV: lane {lane} ends twice"
        self._lanes[lane].is_active = False

    def free(self, lane: int) -> None:
        assert not self._lanes[lane].is_active, f"KV: lane {lane} is freed while in use"
        self._lanes[lane] = _Lane()

    def close(self) -> None:
        self._lanes.clear()
