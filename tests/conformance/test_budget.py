"""The KV budget and limits of time: what can never fit is refused, what does not fit yet waits, within its limits."""

from __future__ import annotations

import asyncio

import pytest

from conformance.providers import CELLS, CONTEXT, SLOTS
from conformance.session import Session
from conformance.test_cancel import end, occupy

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]


async def test_cells_are_reserved_for_the_whole_answer(session: Session) -> None:
    session.engine.provider.needs("kv_budget")
    # Not held by its credit: one that runs ahead instead would be preempted, and hold nothing, before anybody looks.
    heard = session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64)
    await session.tokens(heard, 2)
    stats = await session.until_stats(active=1)
    assert heard.admitted is not None
    assert heard.admitted["prompt_tokens"] + CONTEXT - 64 <= stats["kv_reserved"] <= CELLS
    await end(session, heard)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"prompt": "long, " * CONTEXT, "max_tokens": 5}, "prompt"),
    ],
    ids=["an answer as long as the context", "an answer longer than any", "a prompt longer than the context"],
)
async def test_what_can_never_fit_is_refused_with_what_it_would_take(
    session: Session, fields: dict[str, object], field: str
) -> None:
    heard = session.submit({**session.engine.provider.counting, **fields})
    await session.over(heard)
    assert heard.refused is not None
    assert (heard.refused["reason"], heard.refused["field"]) == ("CONTEXT_LENGTH_EXCEEDED", field)
    assert heard.refused["metadata"]["limitTokens"] == CONTEXT
    assert heard.refused["metadata"]["requestedTokens"] > CONTEXT


async def test_what_does_not_fit_yet_waits_in_its_order(session: Session) -> None:
    long = await occupy(session)
    first = session.submit(session.engine.provider.counting, max_tokens=300)
    small = session.submit(session.engine.provider.counting, max_tokens=4)
    await session.until_stats(waiting=2)
    assert first.admitted is None
    assert small.admitted is None, "a small one overtook the one that waits for cells"
    await end(session, long[0])
    await session.admitted(first)
    await session.over(small)
    await end(session, first, long[1])


async def test_there_are_never_more_than_the_slots(session: Session) -> None:
    many = [
        session.submit(session.engine.provider.counting, max_tokens=5 * session.engine.provider.many)
        for _ in range(3 * SLOTS)
    ]
    most = 0
    while not all(one.is_over for one in many):
        stats = await session.stats()
        assert stats["active"] <= SLOTS
        assert stats["kv_reserved"] <= CELLS
        most = max(most, stats["active"])
        await asyncio.sleep(0.005)
    assert most > 1
    assert {one.reason for one in many} == {"length"}


async def test_a_deadline_that_passes_in_the_queue_refuses(session: Session) -> None:
    long = await occupy(session)
    heard = session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64, deadline_ms=150)
    await session.over(heard, timeout_s=10)
    assert heard.refused is not None
    assert heard.refused["reason"] == "DEADLINE_EXCEEDED"
    await end(session, *long)


async def test_a_wait_that_is_too_long_refuses(session: Session) -> None:
    long = await occupy(session)
    heard = session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64, queue_ms=150, deadline_ms=60_000)
    await session.over(heard, timeout_s=10)
    assert heard.refused is not None
    assert heard.refused["reason"] == "QUEUE_TIMEOUT"
    assert 150 <= heard.refused["metadata"]["waitedMs"] < 3000
    await end(session, *long)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"deadline_ms": 300}, "deadline"),
        ({"execution_ms": 300}, "timeout"),
        ({"deadline_ms": 300, "execution_ms": 300}, "deadline"),
    ],
    ids=["a deadline", "an execution's limit", "both"],
)
@pytest.mark.parametrize("credit", [-1, 2], ids=["while it runs", "while it is held back"])
async def test_a_limit_of_time_ends_what_has_begun(
    session: Session, limits: dict[str, int], reason: str, credit: int
) -> None:
    heard = session.submit(session.engine.provider.counting, max_tokens=CONTEXT - 64, credit=credit, **limits)
    await session.over(heard, timeout_s=5)
    assert heard.refused is None
    assert heard.reason == reason
    timing = heard.finished["timing_ns"]
    assert 250_000_000 <= timing["finished"] - timing["received"] < 2_500_000_000


async def test_limits_that_do_not_pass_end_nothing(session: Session) -> None:
    limits = {"deadline_ms": 60_000, "queue_ms": 60_000, "execution_ms": 60_000}
    heard = await session.answer(session.engine.provider.counting, max_tokens=5, **limits)
    assert heard.reason == "length"


async def test_a_shared_beginning_is_computed_once_for_one_salt(session: Session) -> None:
    session.engine.provider.needs("prefix_cache")
    request = {"prompt": "A beginning that several requests share, and it is long enough to be worth it. " * 3}
    cached = []
    for salt in ("tenants/a", "tenants/a", "tenants/b"):
        heard = await session.answer(request, max_tokens=3, ignore_eos=True, cache_salt=salt)
        cached.append(heard.finished["usage"]["cached"])
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[2] == 0, "the KV of another tenant was reused"
