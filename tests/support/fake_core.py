"""What the three fakes share: requests that are generated token by token, aborted, and may die together."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support import fake_model

STEP_S = float(os.environ.get("HEADRACE_FAKE_STEP_S", "0.001"))
_BLOCK = 32


def guide(given: Mapping[str, Any], grammar: str) -> Sequence[str]:
    """What a guide lets through, as far as a fake knows: the choices. It does not take a regex that is none.

    `grammar` is the name of what holds one.
    """
    if given.get("regex") is not None:
        try:
            re.compile(given["regex"])
        except re.error:
            raise ValueError("a guide that is none (secret)") from None
    if given.get(grammar) is not None:
        assert given[grammar].startswith("root ::= ")
        return [json.loads(one) for one in given[grammar].removeprefix("root ::= ").split(" | ")]
    return given.get("choice") or ()


@dataclass
class Spoken:
    """`finish` is stop, length, abort, or None; `stop_token` is the token that stopped it."""

    tokens: list[int]
    finish: str | None = None
    stop_token: int | None = None


@dataclass
class FakeCore:
    """Generates for every request that is under way. `is_dead` ends them all with an error, `is_failing` each alone.

    A request is not known, and cannot be aborted, before `intake_s` have passed.
    """

    is_dead: bool = False
    is_failing: bool = False
    intake_s: float = 0.0
    aborted: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    submitted: int = 0
    kv_blocks: int = 1_000_000
    """Whole blocks of prompts that are kept, those of 32 tokens; the oldest go first."""
    tell_kv: Callable[[str, int], None] = lambda _kind, _blocks: None
    """Told how many blocks are stored and removed: "BlockStored", "BlockRemoved"."""
    _kept: int = 0
    _known: dict[str, list[list[int]]] = field(default_factory=dict)

    def cached(self, prompt: Sequence[int], salt: str) -> int:
        """Tokens that an earlier prompt of this salt began with, in whole blocks."""
        best = 0
        for one in self._known.setdefault(salt, []):
            common = next(
                (i for i, (a, b) in enumerate(zip(prompt, one, strict=False)) if a != b), min(len(prompt), len(one))
            )
            best = max(best, min(common, len(prompt) - 1) // _BLOCK * _BLOCK)
        self._known[salt] = [*self._known[salt][-15:], list(prompt)]
        self._keep(len(prompt) // _BLOCK - best // _BLOCK)
        return best

    def _keep(self, blocks: int) -> None:
        if blocks:
            self.tell_kv("BlockStored", blocks)
        self._kept += blocks
        if self._kept > self.kv_blocks:
            self.tell_kv("BlockRemoved", self._kept - self.kv_blocks)
            self._kept = self.kv_blocks

    async def generate(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        ends: frozenset[int],
        seed: int | None,
        choices: Sequence[str] = (),
    ) -> AsyncIterator[Spoken]:
        """One token a step, the last with `finish`; an abort takes effect between two steps."""
        await asyncio.sleep(self.intake_s)
        self.running.add(name)
        self.submitted += 1
        try:
            said = [*fake_model.tokenize(choices[0]), fake_model.END] if choices else fake_model.Answer(prompt, seed)
            for count, token in enumerate(said, 1):
                await asyncio.sleep(STEP_S)
                if self.is_failing:
                    raise ValueError(f"cannot generate for {list(prompt)} (secret)")
                if self.is_dead:
                    raise RuntimeError("the fake engine is dead")
                if name in self.aborted:
                    yield Spoken([], "abort")
                    return
                is_stop = token in ends
                finish = "stop" if is_stop else "length" if count >= max_tokens else None
                yield Spoken([token], finish, token if is_stop else None)
                if finish is not None:
                    return
        finally:
            self.running.discard(name)
            self.aborted.discard(name)
