"""What requests have taken, by load class, and what the next one may be expected to take.

    class known        its own times
    class not known    those of its revision, scaled by tokens
    nothing known      a prior, which is good for hints; nobody is refused for it (`is_measured` is false)

Averages are geometric and forget: a reader who stood still for a minute does not make a class slow, and what is
`STALE_S` old counts as not known. So a class whose requests are all refused is tried again.

Times are the engine's own, taken once at the end of an attempt; nothing is done for a token. Sans-io.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from headrace.control.load_class import LoadClass

SAMPLES_MIN = 8
"""Measurements before an average is believed."""
MEMORY = 32
"""Measurements after which an old one has lost two thirds of its weight."""
STALE_S = 60.0
SPREAD_MAX = 1.0
"""No reader who stood still makes a mean more than 1.65 times the average."""
CLASSES_MAX = 1024
PRIOR_HOLD_S = 2.0
"""How long a request has its slot, where nothing is known."""


@dataclass(frozen=True, slots=True)
class Served:
    """What one attempt took. None: not known, or not a measure of anything (it was cut short)."""

    prompt_tokens: int
    """Tokens of its prompt that were computed, not taken from the cache."""
    prefill_s: float | None
    """From its slot to its first token."""
    token_s: float | None
    """For one token after the first."""
    output_tokens: int | None
    """What it generated, where it came to its own end."""
    hold_s: float | None
    """From its slot to its slot's release, where it came to its own end."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What an attempt may take, in seconds from the moment that it gets its slot."""

    prefill_s: float | None
    """To the first token; None: not known."""
    token_s: float | None
    """For one token after it; None: not known."""
    output_tokens: float
    """Tokens that it will generate; its limit where nothing is known."""
    hold_s: float
    """For which it has its slot; a prior where nothing is known."""
    is_measured: bool
    """Whether `hold_s` was measured."""

    def end_s(self, output_tokens: float) -> float | None:
        """To the last of so many tokens; None: not known."""
        if self.prefill_s is None or self.token_s is None:
            return None
        return self.prefill_s + self.token_s * max(0.0, output_tokens - 1)


@dataclass(slots=True)
class Average:
    """A geometric mean that forgets."""

    log: float = 0.0
    samples: int = 0
    at: float = -math.inf
    spread: float = 0.0
    """Variance of the logarithms."""

    def add(self, value: float, now: float) -> None:
        """Take one measurement; what is not above zero is taken as very little."""
        self.samples += 1
        off, share = math.log(max(value, 1e-6)) - self.log, 1 / min(self.samples, MEMORY)
        self.log += off * share
        self.spread += (off * off * (1 - share) - self.spread) * share
        self.at = now

    def mean(self, now: float) -> float | None:
        """The arithmetic mean of what is spread as it is: what many take together, each. None as with `value`."""
        value = self.value(now)
        return None if value is None else value * math.exp(min(self.spread, SPREAD_MAX) / 2)

    def value(self, now: float) -> float | None:
        """The average; None while it is not to be believed."""
        if self.samples < SAMPLES_MIN or now - self.at > STALE_S:
            return None
        return math.exp(self.log)


@dataclass(slots=True)
class _Times:
    prefill_s: Average = field(default_factory=Average)
    prefill_token_s: Average = field(default_factory=Average)
    token_s: Average = field(default_factory=Average)
    output_tokens: Average = field(default_factory=Average)
    hold_s: Average = field(default_factory=Average)
    output_share: Average = field(default_factory=Average)
    """Output tokens, for each that the class may generate."""
    prompt_ratio: Average = field(default_factory=Average)
    """Tokens of a prompt that the engine counted, for one that its bytes told."""

    def add(self, kind: LoadClass, served: Served, now: float) -> None:
        if served.prefill_s is not None:
            self.prefill_s.add(served.prefill_s, now)
            self.prefill_token_s.add(served.prefill_s / max(1, served.prompt_tokens), now)
        if served.token_s is not None:
            self.token_s.add(served.token_s, now)
        if served.output_tokens is not None:
            self.output_tokens.add(max(1, served.output_tokens), now)
            if kind.output_bound:
                self.output_share.add(max(1, served.output_tokens) / kind.output_bound, now)
        if served.hold_s is not None:
            self.hold_s.add(served.hold_s, now)


class ServiceTimes:
    """Measured times of one Scheduler's workers. Bounded: the class that was not measured for longest is forgotten."""

    def __init__(self) -> None:
        self._classes: OrderedDict[LoadClass, _Times] = OrderedDict()
        self._revisions: OrderedDict[str, _Times] = OrderedDict()

    def __len__(self) -> int:
        return len(self._classes)

    def add(self, kind: LoadClass, served: Served, now: float) -> None:
        """An attempt has ended."""
        for times in self._of(kind):
            times.add(kind, served, now)

    def counted(self, kind: LoadClass, guess: int, tokens: int, now: float) -> None:
        """The engine has counted the tokens of a prompt whose bytes told `guess`."""
        for times in self._of(kind):
            times.prompt_ratio.add(tokens / max(1, guess), now)

    def prompt_tokens(self, kind: LoadClass, guess: int) -> int:
        """Tokens of a prompt whose bytes tell `guess`: scripts and templates differ, and that does not grow old."""
        for times in (self._classes.get(kind, _EMPTY), self._revisions.get(kind.revision, _EMPTY)):
            ratio = times.prompt_ratio.value(times.prompt_ratio.at)
            if ratio is not None:
                return max(1, math.ceil(guess * ratio - 1e-6))
        return guess

    def estimate(self, kind: LoadClass, *, prompt_tokens: int, max_tokens: int, now: float) -> Expected:
        """What a request of that class, of that size, may take."""
        own, whole = self._classes.get(kind, _EMPTY), self._revisions.get(kind.revision, _EMPTY)
        prefill_s = own.prefill_s.value(now)
        if prefill_s is None:
            per_token_s = whole.prefill_token_s.value(now)
            # One that mixes long and short prompts says too much of a long one; no more than the whole average's.
            whole_s = whole.prefill_s.value(now)
            prefill_s = None if per_token_s is None or whole_s is None else min(per_token_s * prompt_tokens, whole_s)
        token_s = own.token_s.value(now)
        if token_s is None:
            token_s = whole.token_s.value(now)
        output = own.output_tokens.value(now)
        hold_s = own.hold_s.mean(now)
        if hold_s is None:
            hold_s = self._borrowed_s(whole, prefill_s, token_s, max_tokens, now)
        return Expected(
            prefill_s=prefill_s,
            token_s=token_s,
            output_tokens=float(max_tokens) if output is None else min(output, float(max_tokens)),
            hold_s=PRIOR_HOLD_S if hold_s is None else hold_s,
            is_measured=hold_s is not None,
        )

    def _borrowed_s(
        self, whole: _Times, prefill_s: float | None, token_s: float | None, max_tokens: int, now: float
    ) -> float | None:
        """For how long one of a class that was not measured has its slot."""
        share = whole.output_share.value(now)
        if prefill_s is None or token_s is None or share is None:
            return whole.hold_s.mean(now)
        return prefill_s + token_s * share * max_tokens

    def _of(self, kind: LoadClass) -> tuple[_Times, _Times]:
        """What is kept of a class and of its revision, made where there is nothing yet."""
        times = self._classes.setdefault(kind, _Times())
        self._classes.move_to_end(kind)
        if len(self._classes) > CLASSES_MAX:
            self._classes.popitem(last=False)
        whole = self._revisions.setdefault(kind.revision, _Times())
        self._revisions.move_to_end(kind.revision)
        if len(self._revisions) > CLASSES_MAX:
            self._revisions.popitem(last=False)
        return times, whole

    def hold_s(self, revision: str, now: float) -> float | None:
        """How long a request of middling size has its slot; None: not known."""
        times = self._revisions.get(revision)
        return None if times is None else times.hold_s.mean(now)

    def prefill_tokens_per_s(self, revision: str, now: float) -> int:
        """Prompt tokens a second of one prefill; 0: not known."""
        times = self._revisions.get(revision)
        token_s = None if times is None else times.prefill_token_s.value(now)
        return 0 if not token_s else max(1, round(1 / token_s))


_EMPTY = _Times()
