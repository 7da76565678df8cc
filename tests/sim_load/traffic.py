"""What callers ask for: tenants, kinds of requests, when they come. Drawn once, the same for whatever is compared."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.control.filters import Demand
from headrace.control.load_class import BYTES_PER_TOKEN
from headrace.control.prefix_index import salt, text_blocks
from headrace.control.priority import Priority
from sim_load.engine import CONTEXT, REVISION

TENANTS = tuple(f"tenants/t{n}" for n in range(10))
GREEDY = TENANTS[0]
PREFIXES = 48
PREFIX_TOKENS = 1_536
PRIORITIES: Mapping[Priority, float] = {
    Priority.CRITICAL: 0.05,
    Priority.STANDARD: 0.75,
    Priority.BATCH: 0.15,
    Priority.SHEDDABLE: 0.05,
}
ONE_PRIORITY: Mapping[Priority, float] = {Priority.STANDARD: 1.0}


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind; tokens."""

    name: str
    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    max_tokens: int
    deadline_s: float


CHAT = Kind("chat", 0.65, (30, 400), (20, 200), 256, 30.0)
LOOKUP = Kind("lookup", 0.25, (20, 200), (10, 60), 64, 15.0)
DOCUMENT = Kind("document", 0.10, (2_000, 8_000), (80, 400), 512, 90.0)
USUAL = (CHAT, LOOKUP, DOCUMENT)
SHORT = (CHAT, LOOKUP)
PREFIXED = (Kind("assistant", 1.0, (20, 200), (10, 120), 128, 30.0),)
"""Each behind one of PREFIXES beginnings."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request of a caller."""

    number: int
    at: float
    tenant: str
    kind: str
    prompt: int
    output: int
    max_tokens: int
    priority: Priority
    deadline_s: float
    router: int
    prefix: int = 0

    @property
    def work(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt + self.output

    @property
    def demand(self) -> Demand:
        """As the Router sees it: text, and an output limit."""
        return Demand(
            prompt_size=self.prompt * BYTES_PER_TOKEN,
            output_tokens=min(self.max_tokens, CONTEXT),
            blocks=prefix_blocks(self.tenant, self.prefix) if self.prefix else (),
            priority=self.priority,
        )


@functools.cache
def prefix_blocks(tenant: str, prefix: int) -> tuple[int, ...]:
    """Hashes of a shared beginning."""
    text = f"{prefix:08d}".encode() * (PREFIX_TOKENS * BYTES_PER_TOKEN // 8)
    return text_blocks((text,), salt(tenant, REVISION.name))


class Traffic:
    """Draws calls.

    Args:
        seed: of all draws.
        kinds: what is asked for.
        priorities: shares of what is asked for.
        routers: how many the callers spread over.
    """

    def __init__(
        self,
        seed: int,
        kinds: tuple[Kind, ...] = USUAL,
        priorities: Mapping[Priority, float] = PRIORITIES,
        routers: int = 4,
    ) -> None:
        self._rng = random.Random(seed)
        self._kinds = kinds
        self._priorities = priorities
        self._routers = routers

    def calls(self, rate: float, seconds: float, share_of: Callable[[str, float], float]) -> list[Call]:
        """All calls up to then.

        Args:
            rate: of all tenants together, a second, where each has its usual share.
            seconds: how long they come.
            share_of: how many times its usual share a tenant asks for, at a time; at most 10.
        """
        found = []
        for tenant in TENANTS:
            at, most = 0.0, max(1.0, *(share_of(tenant, n * seconds / 64) for n in range(64)))
            while True:
                at += self._rng.expovariate(most * rate / len(TENANTS))
                if at >= seconds:
                    break
                if self._rng.random() * most < share_of(tenant, at):
                    found.append((at, tenant))
        found.sort()
        return [self.call(number, at, tenant) for number, (at, tenant) in enumerate(found, 1)]

    def call(self, number: int, at: float, tenant: str) -> Call:
        """One call."""
        rng = self._rng
        (kind,) = rng.choices(self._kinds, [k.share for k in self._kinds])
        (priority,) = rng.choices(tuple(self._priorities), tuple(self._priorities.values()))
        prefix = 0
        prompt = self._between(*kind.prompt)
        if self._kinds is PREFIXED:
            prefix = 1 + TENANTS.index(tenant) * PREFIXES + int(PREFIXES / 10 * rng.random() ** 2)
            prompt += PREFIX_TOKENS
        output = min(self._between(*kind.output), kind.max_tokens)
        router = rng.randrange(self._routers)
        return Call(
            number, at, tenant, kind.name, prompt, output, kind.max_tokens, priority, kind.deadline_s, router, prefix
        )

    def _between(self, low: int, high: int) -> int:
        """More small ones than large ones."""
        return low + int((high - low) * self._rng.betavariate(1.5, 2.5))
