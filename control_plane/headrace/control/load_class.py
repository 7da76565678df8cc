"""Load classes: requests that cost about the same, so that what was measured of one tells something of the next.

    class = revision x effort in force x bucket of the prompt's length x bucket of the output limit

Buckets grow by four, so their number is small whatever is asked: 6 x 5 for each revision and effort.

Sans-io.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

PROMPT_BOUNDS = (64, 256, 1024, 4096, 16384)
"""Tokens of a prompt, up to and with the bound; longer ones are the last bucket."""
OUTPUT_BOUNDS = (32, 128, 512, 2048)
"""Output tokens that a request may generate."""
SHORT_PROMPT = 256
SHORT_OUTPUT = 128
BYTES_PER_TOKEN = 4
"""Bytes of text in one token, until the engine has counted: right for English, too many for most other scripts."""


@dataclass(frozen=True, slots=True)
class LoadClass:
    """Requests of like cost."""

    revision: str
    effort: str
    """Reasoning effort in force; empty where the revision knows none."""
    prompt_bound: int
    """Longest prompt of the class, tokens; 0: no bound."""
    output_bound: int
    """Highest output limit of the class, tokens; 0: no bound."""

    @property
    def is_short(self) -> bool:
        """Whether its requests give their slot back soon."""
        return 0 < self.prompt_bound <= SHORT_PROMPT and 0 < self.output_bound <= SHORT_OUTPUT


NO_CLASS = LoadClass("", "", 0, 0)
"""Of what is not known."""


def load_class(revision: str, effort: str, prompt_tokens: int, max_tokens: int) -> LoadClass:
    """The class of a request with so long a prompt, which may generate so many tokens."""
    return LoadClass(revision, effort, _bound(PROMPT_BOUNDS, prompt_tokens), _bound(OUTPUT_BOUNDS, max_tokens))


def tokens_of_bytes(size: int) -> int:
    """Tokens that a text of so many bytes may have; at least one."""
    return max(1, -(-size // BYTES_PER_TOKEN))


def _bound(bounds: tuple[int, ...], value: int) -> int:
    place = bisect_left(bounds, value)
    return bounds[place] if place < len(bounds) else 0
