"""What is counted of KV events: each form, what is lost, what is strange; and through the adapters over their FAKES."""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.harness import Hand, prepared
from headrace.engine.config import MANAGED_ENGINES, ConfigError
from headrace.engine.kv_events import READ_MAX, BufferedEvents, KvCounts, ZmqEvents
from support import fake_model
from support.fake_kv_events import MSGSPEC, Publisher
from support.fake_vllm import install_modules
from support.served_adapter import Served, own_environment


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    with own_environment():
        yield


class Wire:
    """Both ends of a socket."""

    def __init__(self, engine: str = "vllm", block: int = 32) -> None:
        install_modules(MSGSPEC)
        self.events = ZmqEvents(block, engine)
        self.publisher = Publisher(engine, self.events.endpoint)

    def counted(self, *expected: int) -> None:
        """(stored, removed, lost), as soon as all has come; nothing is read twice."""
        deadline = time.monotonic() + 5
        while (found := self.now()) != expected:
            assert time.monotonic() < deadline, found
            time.sleep(0.005)

    def now(self) -> tuple[int, int, int]:
        self.events.read()
        return self.events.counts.stored, self.events.counts.removed, self.events.counts.lost

    def close(self) -> None:
        self.publisher.close()
        self.events.close()


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    up: list[Wire] = []

    def start(*of: Any) -> Wire:
        up.append(Wire(*of))
        return up[-1]

    yield start
    for one in up:
        one.close()


@pytest.mark.parametrize(("engine", "block"), [("vllm", 32), ("sglang", 1)])
def test_blocks_are_counted_in_tokens(wire: Callable[..., Wire], engine: str, block: int) -> None:
    ends = wire(engine, block)
    ends.publisher.publish("BlockStored", 5, block)
    ends.publisher.publish("BlockRemoved", 2)
    ends.counted(5 * block, 2 * block, 0)
    ends.publisher.publish("AllBlocksCleared")
    ends.counted(5 * block, 5 * block, 0)


def test_other_places_and_other_groups_of_layers_are_not_counted(wire: Callable[..., Wire]) -> None:
    ends = wire()
    ends.publisher.publish("BlockStored", 3, 32, medium="CPU")
    ends.publisher.publish("BlockStored", 3, 32, group_idx=1)
    ends.publisher.publish("BlockStored", 1, 32, group_idx=0)
    ends.counted(32, 0, 0)


def test_older_releases_send_arrays(wire: Callable[..., Wire]) -> None:
    ends = wire()
    ends.publisher.send([0.0, [["BlockStored", [1, 2], None, [0] * 64, 32, None], ["BlockRemoved", [1]]]])
    ends.publisher.send({"ts": 0.0, "events": [{"type": "BlockStored", "block_hashes": [3], "block_size": 32}]})
    ends.publisher.send([0.0, [["AllBlocksCleared"]]])
    ends.counted(96, 96, 0)


def test_what_did_not_come_and_what_is_strange_is_lost_and_counted(wire: Callable[..., Wire]) -> None:
    ends = wire()
    ends.publisher.publish("BlockStored", 1, 32)
    ends.publisher.drop = 3
    for _ in range(3):
        ends.publisher.publish("BlockStored", 1, 32)
    ends.publisher.publish("BlockRemoved", 3)  # two of them were never told of
    ends.publisher.send(7)
    ends.publisher.send([0.0, [{"block_hashes": [1]}]])
    ends.counted(32, 32, 5)


def test_a_look_reads_no_more_than_it_may(wire: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    assert READ_MAX >= 1000
    monkeypatch.setattr("headrace.engine.kv_events.READ_MAX", 3)
    ends = wire()
    for _ in range(5):
        ends.publisher.publish("BlockStored", 1, 32)
    deadline = time.monotonic() + 5
    seen = []
    while ends.events.counts.stored < 160:
        seen.append(ends.now()[0])
        assert time.monotonic() < deadline
    steps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    assert max(steps) <= 96


def test_only_its_owner_can_listen_and_nothing_is_left_behind(wire: Callable[..., Wire]) -> None:
    ends = wire()
    folder = Path(ends.events.endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    ends.close()
    assert not folder.exists()


def test_without_msgspec_it_is_one_sentence() -> None:
    install_modules(MSGSPEC)
    sys.modules["msgspec.msgpack"] = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"kv_events needs msgspec.* comes with vllm"):
        ZmqEvents(32, "vllm")


def event(number: int, **data: Any) -> dict[str, Any]:
    return {"event_id": number, "window_size": 512, "data": data}


def test_a_buffer_s_documents_are_counted() -> None:
    events = BufferedEvents(32)
    blocks = [{"block_hash": 1, "cache_level": 0}, {"block_hash": 2, "cache_level": 1}, {"block_hash": 3}]
    events.take([
        event(0, type="created", num_blocks_per_cache_level=[9, 0]), None, event(1, type="stored", blocks=blocks),
        json.dumps(event(2, type="removed", block_hashes=[1])), event(3, type="updated", block_hash=3),
    ])  # fmt: skip
    assert (events.counts.stored, events.counts.removed, events.counts.lost) == (64, 32, 0)
    events.take([event(7, type="removed", block_hashes=[3]), {"event_id": 8}, "no document"])
    assert (events.counts.stored, events.counts.removed, events.counts.lost) == (64, 64, 5)


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "clear"]), st.integers(0, 50))))
def test_never_more_goes_than_came_and_neither_count_falls(calls: list[tuple[str, int]]) -> None:
    counts = KvCounts()
    for call, tokens in calls:
        before = counts.stored, counts.removed
        counts.clear() if call == "clear" else getattr(counts, call)(tokens)
        assert 0 <= counts.removed <= counts.stored
        assert before <= (counts.stored, counts.removed)


@pytest.mark.parametrize("kind", MANAGED_ENGINES)
def test_an_engine_s_stats_tell_what_its_cache_stored_and_removed(kind: str, tmp_path: Path) -> None:
    served = Served(kind, fake_model.write_folder(tmp_path), kv_events=True)
    try:
        served.library.core.kv_blocks = 3
        prompt = " the hot" * 40  # 80 tokens: two whole blocks
        for seq, salt in enumerate("aab", 1):  # the second finds both
            served.answer(seq, prompt=prompt, max_tokens=1, cache_salt=salt)
        deadline = time.monotonic() + 10
        while (stats := served.ask("stats", {})["stats"])["kv_removed"] != 32:
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        assert (stats["kv_stored"], stats["kv_events_lost"]) == (128, 0)
    finally:
        served.engine.stop()
    endpoint = {
        "vllm": lambda args: args.kv_events_config.endpoint,
        "sglang": lambda args: json.loads(args.kv_events_config)["endpoint"],
    }.get(kind)
    if endpoint is not None:
        assert not Path(endpoint(served.library.args).removeprefix("ipc://")).parent.exists()


@pytest.mark.parametrize("kind", MANAGED_ENGINES)
def test_where_they_are_off_nothing_is_said(kind: str, tmp_path: Path) -> None:
    served = Served(kind, fake_model.write_folder(tmp_path))
    try:
        served.answer(1, prompt=" the hot" * 40, max_tokens=1)
        stats = served.ask("stats", {})["stats"]
        assert [stats[name] for name in ("kv_stored", "kv_removed", "kv_events_lost")] == [-1] * 3
    finally:
        served.engine.stop()


def test_an_engine_that_is_stepped_counts_what_it_retains_and_what_it_evicts_for_others() -> None:
    hand = Hand(slots=1, kv_cells=200)
    backend = hand.backend

    def counts() -> tuple[int, int, int]:
        stats = hand.loop.stats()
        return stats["kv_stored"], stats["kv_removed"], stats["kv_cached"]

    def run(seq: int, words: str, tokens: int) -> int:
        hand.submit(prepared(backend, seq, words, max_tokens=tokens))
        hand.run()
        return len(backend.tokenize(words))

    first = run(1, "the " * 20, 2) + 1  # the last token that was drawn is in nobody's KV
    assert counts() == (first, 0, first)
    second = run(2, "of " * 20, 2) + 1
    assert counts() == (first + second, 0, first + second)
    third = run(3, "in " * 20, 160) + 159  # needs the room of both
    assert counts() == (first + second + third, first + second, third)
    hand.assert_idle()


def test_a_prompt_that_goes_on_where_another_ended_stores_only_what_is_new() -> None:
    hand = Hand(slots=1, kv_cells=120)
    hand.submit(prepared(hand.backend, 1, "the " * 40, max_tokens=2))
    hand.run()
    before = hand.loop.stats()
    hand.submit(prepared(hand.backend, 2, "the " * 50, max_tokens=60))  # its own beginning, and no room beside it
    hand.run()
    after = hand.loop.stats()
    assert after["cached_tokens"] > 0
    assert after["kv_stored"] - after["kv_removed"] == after["kv_cached"]
    reused = after["cached_tokens"]
    assert after["kv_stored"] - before["kv_stored"] == after["kv_cached"] - reused
    assert after["kv_removed"] == before["kv_cached"] - reused
