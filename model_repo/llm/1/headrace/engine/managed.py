"""What the host needs of an engine that schedules by itself: TensorRT-LLM, vLLM, SGLang, later others.

A managed engine takes requests, batches them as it likes, and says what each generated; it cannot pause one. The host
(`managed_loop.py`) speaks the contract for it: admission, credit (by bounded run-ahead), text and stop strings, limits
of time, continuation, owners. So an adapter is one file that says how its engine starts, takes, aborts and ends.

    submit --> delta, delta, ... --> delta with an end
                cancel ---------------^

Every request that was submitted ends exactly once, cancelled or not: **its end means that slot and KV are free**.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.engine.backend import Detail, ModelFacts
from headrace.engine.kv_events import KvCounts
from headrace.engine.request import Guided, Sampling


class EngineDead(RuntimeError):
    """The engine as a whole is gone; no request of it will ever end. The message is for the log."""


class End(enum.Enum):
    """How the engine ended a request."""

    STOP = "stop"
    """One of its `end_tokens` was generated."""
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"
    """This request failed in the engine; others go on."""
    REFUSED = "refused"
    """The engine did not take what it was to be guided by."""


@dataclass(frozen=True, slots=True)
class ManagedRequest:
    """One stay in the engine: of a sequence that was preempted, and comes back, there are several.

    `id` is unique while the engine lives. `prompt` includes what a sequence has said so far, the last `said` of its
    tokens; `max_tokens` is what may follow. `end_tokens` end it, and nothing else does: the model's own are among them
    unless the caller wants them ignored. `priority` is from 0 to 1, higher comes first; who names none has 0.5.
    """

    id: str
    prompt: Sequence[int]
    said: int
    max_tokens: int
    sampling: Sampling
    end_tokens: frozenset[int]
    top_logprobs: int | None = None
    cache_salt: str = ""
    priority: float = 0.5
    guided: Guided | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one request. `details` has one entry for each token where logprobs were asked, else none.

    `cached` is how many tokens of the prompt the engine found in its KV, -1: not said. `proposed` counts the draft
    tokens of this delta. With `end`, nothing follows. A STOP whose token is not among `tokens`, because the engine
    trims it, names it in `end_token`.
    """

    id: str
    tokens: Sequence[int] = ()
    details: Sequence[Detail] = ()
    cached: int = -1
    proposed: int = 0
    end: End | None = None
    end_token: int | None = None


@dataclass(frozen=True, slots=True)
class ManagedStats:
    """What the engine says of itself; -1 or None where it does not say. KV is counted in tokens.

    `extra` is for the log of the worker: names of the engine's own.
    """

    running: int = -1
    queued: int = -1
    kv_tokens: int = -1
    kv_used_tokens: int = -1
    kv_events: KvCounts | None = None
    extra: Mapping[str, float] = field(default_factory=dict)


class ManagedEngine(Protocol):
    """All methods but `tokenize`, `piece`, `check` and `check_guided`, which any thread may use, are called by one
    thread; none but `start` and `shutdown` may block.
    """

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model; only after `start`."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """Loads the model; returns when requests can be submitted. `wake` is called from any thread when `events` has
        something. Raises `ConfigError` with one sentence where the engine cannot be had as it was asked for.
        """
        ...

    def tokenize(self, text: str) -> list[int]:
        """Text as tokens, with the begin token where the model wants one and `text` has none."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; none for control tokens."""
        ...

    def check(self, sampling: Sampling, top_logprobs: int | None) -> None:
        """Raises `RefusalError` for what this engine cannot do; any thread may call it."""
        ...

    def check_guided(self, guided: Guided) -> None:
        """As `check`, for a kind of guided decoding that `facts` names."""
        ...

    def submit(self, request: ManagedRequest) -> None:
        """Hands a request over. What is wrong with it is told as an end, FAILED."""
        ...

    def events(self) -> list[Delta]:
        """Everything since the last call, in order for each request."""
        ...

    def cancel(self, request_id: str) -> None:
        """Asks for an early end; one that has ended already is ignored. The end is told as any other."""
        ...

    def stats(self) -> ManagedStats:
        """What the engine last said of itself."""
        ...

    def health(self) -> str | None:
        """Why the engine is gone, for the log; None while it lives. `wake` is called when that changes."""
        ...

    def shutdown(self) -> None:
        """Gives everything back; also after a `start` that failed. Nothing may be called afterwards."""
        ...
