"""The synthetic engine: every token is a function of prompt, seed and position, at a set pace.

For tests and measurements of everything around an engine. Its vocabulary is bytes, some words of several scripts,
and emoji cut in two tokens, so that UTF-8 has to be joined. Two things in a prompt steer it: `[[end=N]]` ends the
answer after N tokens, `[[say=TEXT]]` makes it say TEXT, then end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from headrace.engine.backend import Detail, ModelFacts, Prefill, Sampled
from headrace.engine.request import Guided, Sampling

END_TOKEN = 256
_WORDS = (
    " the of and to in is that it for was on are as with they be at one have this from or had by hot but some what"
    " there we can out other were all your when up use word how said an each she which do their time if will way"
    " about many then them would write like so these her long make thing see him two has look more day could go"
    " come did my sound no most number who over know water than call first people may down side been now find any"
    " new work part take get place made live where after back little only round man year came show every good me"
    " give our under name very through just form much great think say help low line before turn cause same mean"
    " differ move right boy old too does tell sentence set three want air well also play small end put home read"
    " hand port large spell add even land here must big high such follow act why ask men change went light kind off"
    " need house picture try us again animal point mother world near build self earth father head stand own page"
)
_OTHERS = (" água", " über", " вода", " река", " νερό", " 水", " 川", " 물", " पानी", " ماء", ".", ",", ":", "\n")
_EMOJI = ("🌊", "💧", "🚰", "⛲", "🏞", "🐟", "🛶", "⚙")
_TABLE = [
    *(bytes([value]) for value in range(256)),
    b"",
    *(f" {word}".encode() for word in _WORDS.split()),
    *(word.encode() for word in _OTHERS),
]
_FIRST_WORD = END_TOKEN + 1
_FIRST_HALF = len(_TABLE)
for _emoji in _EMOJI:
    _bytes = _emoji.encode()
    _TABLE += [_bytes[:2], _bytes[2:]]
_LONGEST_FIRST = sorted(range(_FIRST_WORD, _FIRST_HALF), key=lambda token: -len(_TABLE[token]))
_SPLIT = re.compile(b"|".join(re.escape(_TABLE[token]) for token in _LONGEST_FIRST) + b"|.", re.DOTALL)
_ID = {_TABLE[token]: token for token in (*range(256), *range(_FIRST_WORD, _FIRST_HALF))}
_DIRECTIVE = re.compile(r"\[\[(?:end=(\d{1,9})|say=(.*?))\]\]", re.DOTALL)

# One token in so many begins an emoji; the rest are whole words, so that the loop's fast path is the common one.
_EMOJI_EVERY = 32
_AHEAD = 256

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(slots=True)
class _Lane:
    state: int
    script: list[int]
    end_at: int
    top_logprobs: int | None
    produced: int = 0
    ahead: list[int] = field(default_factory=list)


class SyntheticBackend:
    """`prefill_rate` and `decode_rate` are tokens per second of one sequence; 0 is as fast as it can.

    `clock` and `sleep` (seconds) are arguments so that tests need not wait.
    """

    def __init__(
        self,
        *,
        prefill_rate: float = 0,
        decode_rate: float = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._prefill_rate = prefill_rate
        self._decode_rate = decode_rate
        self._clock = clock
        self._sleep = sleep
        self._due = 0.0
        self._lanes: dict[int, _Lane] = {}

    @property
    def facts(self) -> ModelFacts:
        """The vocabulary and the one end token."""
        return ModelFacts(
            kind="synthetic",
            model="synthetic",
            vocabulary=len(_TABLE),
            end_tokens=frozenset({END_TOKEN}),
            chat_template=_TEMPLATE,
            guided=frozenset({"choice"}),
            versions={"synthetic": "1"},
        )

    def tokenize(self, text: str) -> list[int]:
        """Known words, and bytes for everything else; `b"".join(pieces)` is the text again."""
        return [_ID[piece] for piece in _SPLIT.findall(text.encode())]

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        return _TABLE[token]

    def compile(self, guided: Guided) -> Guided:
        """A choice is drawn as a whole, by prompt and seed; nothing else could be held to: it has no language."""
        return guided

    def warm_up(self) -> None:
        """Nothing to warm."""

    def begin(
        self,
        lane: int,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
        top_logprobs: int | None,
        guide: Guided | None = None,
    ) -> None:
        """Draws the sequence's state from its prompt and, unless greedy, its seed; of the answer only length counts."""
        seed = 0 if sampling.temperature == 0 else (sampling.seed or 0)
        digest = blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8, salt=seed.to_bytes(8, "little"))
        state = int.from_bytes(digest.digest(), "little")
        text = b"".join([_TABLE[token] for token in prompt]).decode(errors="replace")
        script: list[int] = []
        end_at = -1
        directives = list(_DIRECTIVE.finditer(text))
        if directives:
            end, say = directives[-1].groups()
            script = self.tokenize(say) if say is not None else []
            end_at = len(script) if end is None else int(end)
        if guide is not None:
            script = self.tokenize(guide.choices[state % len(guide.choices)])
            end_at = len(script)
        lane_state = _Lane(state, script, end_at, top_logprobs, produced=len(generated))
        offset = len(generated) % _AHEAD
        if offset:  # otherwise the first step does it
            lane_state.ahead = _tokens(lane_state, len(generated) - offset)
        self._lanes[lane] = lane_state

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Nothing is stored."""

    def truncate(self, lane: int, length: int) -> None:
        """Nothing is stored."""

    def step(self, decode: Sequence[int], prefill: Sequence[Prefill]) -> Sampled:
        """The next token of each lane, after as much time as the rates want."""
        tokens = []
        details = {}
        lanes = self._lanes
        last = [chunk.lane for chunk in prefill if chunk.is_last]
        for index, number in enumerate([*decode, *last] if last else decode):
            lane = lanes[number]
            produced = lane.produced
            offset = produced % _AHEAD
            if not offset:
                lane.ahead = _tokens(lane, produced)
            token = lane.ahead[offset]
            lane.produced = produced + 1
            tokens.append(token)
            if lane.top_logprobs is not None:
                details[index] = _detail(token, lane.top_logprobs)
        self._pace(bool(decode), prefill)
        return Sampled(tokens, details)

    def _pace(self, decodes: bool, prefill: Sequence[Prefill]) -> None:
        """Waits on an absolute schedule, so that neither our own work nor late wake-ups slow the rate down."""
        longest = max((len(chunk.tokens) for chunk in prefill), default=0)
        wanted = longest / self._prefill_rate if self._prefill_rate else 0.0
        if decodes and self._decode_rate:
            wanted = max(wanted, 1 / self._decode_rate)
        if not wanted:
            return
        now = self._clock()
        # More than a step behind means that the engine was idle (or starved): start the schedule anew.
        self._due = (self._due if self._due > now - wanted else now) + wanted
        if self._due > now:
            self._sleep(self._due - now)

    def end(self, lane: int) -> None:
        """Forgets the sequence."""
        self._lanes.pop(lane, None)

    def free(self, lane: int) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """Nothing to give back."""
        self._lanes.clear()


def _tokens(lane: _Lane, start: int) -> list[int]:
    """The tokens at positions start to start + 256: a block boundary never cuts an emoji."""
    positions = np.arange(start, start + _AHEAD, dtype=np.uint64)
    mixed = (positions + np.uint64(lane.state)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    tokens = _FIRST_WORD + (mixed % np.uint64(_FIRST_HALF - _FIRST_WORD)).astype(np.int64)
    halves = np.flatnonzero((mixed >> np.uint64(40)) % np.uint64(_EMOJI_EVERY) == 0)
    halves = halves[(halves % 2 == 0) & (halves < _AHEAD - 1)]
    emoji = _FIRST_HALF + 2 * (mixed[halves] % np.uint64(len(_EMOJI))).astype(np.int64)
    tokens[halves] = emoji
    tokens[halves + 1] = emoji + 1
    said = lane.script[start : start + _AHEAD]
    tokens[: len(said)] = said
    if start <= lane.end_at < start + _AHEAD:
        tokens[lane.end_at - start] = END_TOKEN
    return [int(token) for token in tokens]


def _detail(token: int, alternatives: int) -> Detail:
    others = [(token + 1 + rank) % _FIRST_HALF for rank in range(max(0, alternatives - 1))]
    ranked = [(token, -0.25), *((other, -2.0 - rank) for rank, other in enumerate(others))]
    return Detail(-0.25, ranked[:alternatives])
