"""What the loop needs of an engine that is driven step by step: llama.cpp, the synthetic engine, later others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from headrace.engine.request import Guided, Sampling


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a backend says of its model. `context_tokens_max` is what the model was trained for (0: no limit).

    `guided` are the kinds of guided decoding that it can do.
    """

    kind: str
    model: str
    vocabulary: int
    end_tokens: frozenset[int]
    context_tokens_max: int = 0
    chat_template: str | None = None
    begin_text: str = ""
    end_text: str = ""
    guided: frozenset[str] = frozenset()
    versions: Mapping[str, str] = field(default_factory=dict)


class Prefill(NamedTuple):
    """The next `tokens` of a prompt, beginning at `position`. With `is_last`, a token is drawn after them."""

    lane: int
    position: int
    tokens: Sequence[int]
    is_last: bool


class Detail(NamedTuple):
    """The natural logarithm of a token's probability before any sampling setting, and the likeliest others."""

    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(slots=True)
class Sampled:
    """The tokens of one step: first those of the decoding lanes, then those of the last prefills, in order.

    -1 stands for a lane whose guide allows none.

    `details` has an entry, by index into `tokens`, for each lane that asked for logprobs.
    """

    tokens: list[int]
    details: Mapping[int, Detail] = field(default_factory=dict)


class Backend(Protocol):
    """Driven by one thread, except for `facts`, `tokenize`, `piece` and `compile`, which any thread may use.

    A lane's life: `begin`, perhaps after `copy_prefix` into it; `step` with prefills, then with decodes; `free`, or
    nothing at all while its KV is retained. Any exception from these methods means that the engine has failed.
    """

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Text as tokens, with the begin token where the model wants one and `text` has none."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; none for control tokens."""
        ...

    def compile(self, guided: Guided) -> Any:
        """What `begin` takes for it, of a kind that `facts` names; in bounded time. Raises `RefusalError`."""
        ...

    def warm_up(self) -> None:
        """Runs the shapes that serving will use, once."""
        ...

    def begin(
        self,
        lane: int,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
        top_logprobs: int | None,
        guide: Any = None,
    ) -> None:
        """A sequence begins in `lane`, or goes on there with the answer so far; its KV may hold a copied prefix.

        The first draw is the token after `generated`, as if this lane had drawn them all; both are prefilled first.
        With a `guide`, only what it allows is drawn.
        """
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Makes the first `length` tokens in the KV of `source` those of `target`, an empty lane, too."""
        ...

    def truncate(self, lane: int, length: int) -> None:
        """Keeps only the first `length` tokens of the KV of `lane`."""
        ...

    def step(self, decode: Sequence[int], prefill: Sequence[Prefill]) -> Sampled:
        """One step: the next token of each lane in `decode`, and some of the prompts of others."""
        ...

    def end(self, lane: int) -> None:
        """The sequence in `lane` ended; its KV stays until `free`."""
        ...

    def free(self, lane: int) -> None:
        """Forgets the KV of `lane`."""
        ...

    def close(self) -> None:
        """Gives everything back. Nothing may be called afterwards."""
        ...
