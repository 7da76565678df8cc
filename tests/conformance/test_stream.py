"""The event stream itself: who speaks, in which order, and what an operator can ask."""

from __future__ import annotations

import pytest

from conformance.providers import CELLS, CONTEXT, SETTINGS, SLOTS, Running
from conformance.session import Session, ask, ask_raw, run_alone
from conformance.watch import assert_error

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="package")]

STATS = {
    "active",
    "waiting",
    "paused",
    "preempted",
    "slots",
    "kv_cells",
    "kv_reserved",
    "kv_cached",
    "kv_stored",
    "kv_removed",
    "kv_events_lost",
    "buffered_tokens",
    "steps",
    "generated_tokens",
    "prompt_tokens",
    "cached_tokens",
    "preemptions",
    "reprefilled_tokens",
}


MAY_BE_UNTOLD = {"kv_stored", "kv_removed", "kv_events_lost"}
"""-1 where an engine does not tell."""


async def test_the_hello_says_what_runs(session: Session) -> None:
    provider, hello = session.engine.provider, session.hello
    assert hello["kind"] == provider.kind
    assert hello["revision"] == SETTINGS["revision"]
    assert (hello["context_tokens"], hello["slots"], hello["kv_cells"]) == (CONTEXT, SLOTS, CELLS)
    assert hello["pause"] == ("run_ahead" if provider.run_ahead else "native")
    assert hello["vocabulary"] > 0
    assert all(isinstance(version, str) for version in hello["versions"].values())
    assert {"model", "digest"} <= hello.keys()


async def test_an_idle_engine_says_every_second_that_it_lives(session: Session) -> None:
    await session.watch.until(lambda: len(session.watch.alive) >= 2, 3)
    assert set(session.watch.alive[-1]) >= STATS


async def test_stats_are_numbers_and_count_on(session: Session) -> None:
    before = await session.stats()
    assert set(before) >= STATS
    lowest = {name: -1 if name in MAY_BE_UNTOLD else 0 for name in STATS}
    assert all(isinstance(before[name], int) and before[name] >= lowest[name] for name in STATS)
    assert len({before[name] == -1 for name in MAY_BE_UNTOLD}) == 1, "an engine tells all of them or none"
    heard = await session.answer(session.engine.provider.counting, max_tokens=5)
    after = await session.until_stats(generated_tokens=lambda n: n >= before["generated_tokens"] + 5)
    assert after["prompt_tokens"] == before["prompt_tokens"] + heard.finished["usage"]["prompt"]
    assert after["steps"] > before["steps"]


async def test_a_ping_says_how_old_the_news_is(session: Session) -> None:
    assert 0 <= (await session.client.ping())["loop_age_ms"] < 3000


async def test_a_list_holds_what_lives(session: Session) -> None:
    live = session.submit(session.engine.provider.counting, max_tokens=200, credit=2)
    done = await session.answer(session.engine.provider.counting, max_tokens=1)
    session.client.list_sequences()
    await session.watch.until(lambda: bool(session.watch.sequences))
    assert session.watch.sequences.pop() == [live.seq]
    assert done.is_over
    session.cancel(live)
    await session.over(live)


async def test_run_streams_one_sequence_and_ends_with_final(engine: Running) -> None:
    batches = await run_alone(engine.target, {"seq": 1, **engine.provider.counting, "max_tokens": 6})
    assert sum(len(batch.token_ids) for batch in batches) == 6
    assert [batch.final for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert batches[-1].events[-1]["type"] == "finished"


def element(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize(
    ("op", "document"),
    [
        (b"dance", b"{}"),
        (b"\xff\xfe", b"{}"),
        (b"generate", b"{\xff"),
        (b"generate", b"[]"),
        (b"generate", b'{"requests":[]}'),
        (b"generate", b'{"requests":[{"prompt":"x"}]}'),
        (b"generate", b'{"requests":[{"seq":1,"prompt_tokens":9}]}'),
        (b"credit", b'{"limits":[[1]]}'),
        (b"credit", b'{"limits":[[-1,5]]}'),
        (b"cancel", b'{"seqs":[1],"reason":"bored"}'),
        (b"run", b'{"seq":1}'),
    ],
)
async def test_an_operation_of_another_form_is_refused_in_one_sentence(
    session: Session, op: bytes, document: bytes
) -> None:
    inputs = [("op", "BYTES", [1], element(op)), ("request", "BYTES", [1], element(document))]
    reply = await ask_raw(session.engine.target, inputs)
    assert reply["ok"] is False
    assert_error(reply["error"])
    assert reply["error"]["reason"] == "INVALID_REQUEST"
    assert (await ask(session.engine.target, "ping"))["ok"] is True
