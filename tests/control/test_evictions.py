"""What engines removed, and what a Router still believes: never more than they can have kept, whoever filled them."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.evictions import Evictions
from headrace.control.filters import Demand
from headrace.control.load_view import ReplicaReport
from headrace.control.prefix_index import BLOCK_BYTES, PrefixIndex, salt, text_blocks
from support.fleets import REVISION, Fleet, replica

SALT = salt("tenants/t", "models/m/revisions/0")


def prompt(*blocks: int) -> tuple[bytes, ...]:
    return text_blocks([n.to_bytes(4, "big") * (BLOCK_BYTES // 4) for n in blocks], SALT)


@pytest.mark.parametrize(
    ("reports", "gone"),
    [
        ([(100, 0)], [0]),
        ([(100, 40)], [0]),  # what went before the first word, this Router never believed in
        ([(100, 0), (100, 50)], [0, 50]),
        ([(100, 0), (200, 100)], [0, 50]),
        ([(100, 60), (100, 80)], [0, 50]),
        ([(100, 0), (100, 100)], [0, 100]),
        ([(100, 0), (100, 0)], [0, 0]),
        ([(100, 50), (10, 5), (10, 10)], [0, 0, 100]),  # another engine has begun
        ([(0, 0), (0, 0)], [0, 0]),  # nothing is told
        ([(1000, 0), (1000, 4), (1000, 8), (1000, 12)], [0, 0, 0, 1]),  # less than a block is owed
    ],
    ids=str,
)
def test_the_share_that_was_removed_is_the_share_to_go(reports: list[tuple[int, int]], gone: list[int]) -> None:
    evictions = Evictions()
    assert [evictions.take("a", stored, removed, 100) for stored, removed in reports] == gone


def test_replicas_are_apart_and_one_that_is_forgotten_begins_again() -> None:
    evictions = Evictions()
    for name in "ab":
        evictions.take(name, 100, 0, 10)
    assert evictions.take("a", 100, 50, 10) == 5
    evictions.forget("a")
    assert evictions.take("a", 100, 80, 10) == 0
    assert evictions.take("b", 100, 50, 10) == 5


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=20), st.integers(0, 50))
def test_never_more_than_there_is_and_everything_once_all_is_gone(steps: list[tuple[int, int]], blocks: int) -> None:
    evictions = Evictions()
    stored, removed, left = 1, 0, blocks
    evictions.take("a", stored, removed, left)
    for more, less in steps:
        stored += more
        removed = min(stored, removed + less)
        gone = evictions.take("a", stored, removed, left)
        assert 0 <= gone <= left
        left -= gone
    assert evictions.take("a", stored, stored, left) == left or removed == stored


def test_the_oldest_of_a_replica_fade_and_no_other_replica_s() -> None:
    index = PrefixIndex()
    for name in "ab":
        index.keep(name, prompt(1, 2))
        index.keep(name, prompt(3))
    assert index.size("a") == 3
    index.fade("a", 2)
    assert [index.depth("a", prompt(*blocks)) for blocks in ((1, 2), (3,))] == [0, 1]
    assert index.depth("b", prompt(1, 2)) == 2
    assert index.keeper(prompt(1, 2)) == "b"
    index.fade("a", 9)
    index.fade("nobody", 9)
    assert (index.size("a"), index.size("nobody"), len(index)) == (0, 0, 3)


def test_a_report_of_evictions_lowers_what_routing_believes() -> None:
    fleet = Fleet(replica("a"), replica("b"))
    demand = Demand(prompt_size=4 * BLOCK_BYTES, blocks=prompt(1, 2, 3, 4))
    token = fleet.send("a", demand)
    fleet.routing.admitted(token, 256, 0, 0.0)
    fleet.routing.report("replicas/a", ReplicaReport(slots=4, kv_stored=1000), 1.0)
    assert fleet.routing.prefixes.depth("replicas/a", demand.blocks) == 4
    fleet.routing.report("replicas/a", ReplicaReport(slots=4, kv_stored=1000, kv_removed=500), 2.0)
    assert fleet.routing.prefixes.depth("replicas/a", demand.blocks) == 2
    fleet.apply(replica("a", epoch=8), replica("b"))  # another process: it has nothing, and counts from 0
    fleet.routing.dispatched(99, "replicas/a", 8, REVISION.name, demand, 3.0)
    fleet.routing.admitted(99, 256, 0, 3.0)
    fleet.routing.report("replicas/a", ReplicaReport(slots=4, kv_stored=1100, kv_removed=900), 3.0)
    assert fleet.routing.prefixes.size("replicas/a") == 4
    fleet.routing.report("replicas/unknown", ReplicaReport(slots=4, kv_stored=1), 4.0)
    assert fleet.routing.evictions.take("replicas/unknown", 1, 1, 5) == 0, "nothing was kept of it"


class Engine:
    """A cache that removes what was used longest ago, in blocks; prompts are chains of them."""

    def __init__(self, blocks: int) -> None:
        self.kept: OrderedDict[bytes, None] = OrderedDict()
        self.stored = self.removed = 0
        self._blocks = blocks

    def run(self, chain: tuple[bytes, ...]) -> int:
        found = next((n for n, block in enumerate(chain) if block not in self.kept), len(chain))
        for block in reversed(chain):
            self.stored += block not in self.kept
            self.kept[block] = None
            self.kept.move_to_end(block)
        while len(self.kept) > self._blocks:
            self.kept.popitem(last=False)
            self.removed += 1
        return found


def beliefs(*, listens: bool) -> tuple[float, float]:
    """Blocks that were believed in and gone, of those believed in; and those that were there and believed in, of those
    that were there. Others fill the cache as well.
    """
    dice, engine, index, evictions = random.Random(3), Engine(400), PrefixIndex(), Evictions()
    believed = wrong = there = 0
    for turn in range(4000):
        if turn % 4:  # of another Router, which this one never hears of
            engine.run(prompt(*range(turn * 10, turn * 10 + 4)))
        else:
            first = 1_000_000 * (1 + dice.randrange(60))
            chain = prompt(*range(first, first + 4))
            depth = index.depth("a", chain)
            found = engine.run(chain)
            believed, wrong, there = believed + depth, wrong + max(0, depth - found), there + found
            index.keep("a", chain)
        if listens and turn % 20 == 0:
            index.fade("a", evictions.take("a", engine.stored, engine.removed, index.size("a")))
    return wrong / believed, (believed - wrong) / there


def test_who_listens_is_wrong_less_often() -> None:
    (deaf, _), (listening, known) = beliefs(listens=False), beliefs(listens=True)
    assert deaf > 0.5
    assert listening < 0.05
    assert known > 0.9, "and still believes in what is there"
