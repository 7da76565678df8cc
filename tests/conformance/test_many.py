"""Two hundred at once, with everything that can happen to one of them, and all rules kept."""

from __future__ import annotations

import random

import pytest

from conformance.providers import CELLS, SLOTS
from conformance.session import Session
from conformance.watch import Heard

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]

COUNT = 200


async def test_two_hundred_at_once(session: Session) -> None:
    provider = session.engine.provider
    dice = random.Random(7)
    before = await session.stats()
    plain, held, cancelled, faulty = [], [], [], []
    for _ in range(COUNT):
        tokens = dice.randint(1, provider.many)
        changes: dict[str, object] = {"max_tokens": tokens}
        if "logprobs" in provider.features and dice.random() < 0.2:
            changes["top_logprobs"] = 2
        match dice.choice(["plain", "plain", "held", "cancelled", "faulty"]):
            case "plain":
                plain.append((session.submit(provider.counting, **changes), tokens))
            case "held":
                changes["credit"] = dice.randint(0, tokens)
                held.append((session.submit(provider.counting, **changes), tokens))
            case "cancelled":
                cancelled.append(session.submit(provider.counting, **changes))
            case _:
                faulty.append(session.submit(provider.counting, **{**changes, "max_tokens": 0}))
    session.cancel(*cancelled)
    for heard, _ in held:
        session.credit(heard, -1)
    every: list[Heard] = [heard for heard, _ in plain + held] + cancelled + faulty
    await session.over(*every, timeout_s=90)
    for heard, tokens in plain + held:
        assert (heard.reason, len(heard.ids)) == ("length", tokens)
    assert all(one.reason in ("cancelled", "length") for one in cancelled)
    assert all(one.refused is not None and one.refused["reason"] == "INVALID_REQUEST" for one in faulty)
    stats = await session.until_stats(active=0, waiting=0, kv_reserved=0)
    generated = sum(one.finished["usage"]["generated"] for one in every if one.finished)
    assert stats["generated_tokens"] - before["generated_tokens"] == generated
    assert stats["kv_cached"] <= CELLS
    assert stats["slots"] == SLOTS
    if "repeats" in provider.features:
        longest = max((heard for heard, _ in plain), key=lambda heard: len(heard.ids))
        assert all(heard.ids == longest.ids[: len(heard.ids)] for heard, _ in plain + held)
