"""The cursor against a dumb model of a store: whatever happens on the way, the reader ends up with what is stored."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.watch_cursor import Change, Doubt, News, Relist, WatchCursor

KEYS = ("a", "b", "c")


@dataclass
class Item:
    key: str
    value: bytes
    version: int
    create_revision: int


@dataclass
class ModelStore:
    """What etcd does, without the parts that are hard."""

    incarnation: str = "i0"
    revision: int = 1
    compacted: int = 0
    items: dict[str, Item] = field(default_factory=dict)
    log: list[Change] = field(default_factory=list)

    def write(self, puts: dict[str, bytes], deletes: set[str]) -> None:
        gone = [key for key in deletes if key in self.items and key not in puts]
        if not puts and not gone:
            return
        self.revision += 1
        for key, value in puts.items():
            old = self.items.get(key)
            item = Item(key, value, old.version + 1 if old else 1, old.create_revision if old else self.revision)
            self.items[key] = item
            self.log.append(Change(key, self.revision, value, item.create_revision, item.version))
        for key in gone:
            del self.items[key]
            self.log.append(Change(key, self.revision, None))

    def view(self) -> dict[str, bytes]:
        return {key: item.value for key, item in self.items.items()}


class Reader:
    """The adapter's loop, one step at a time, over the model."""

    def __init__(self) -> None:
        self.cursor = WatchCursor()
        self.view: dict[str, bytes] = {}
        self.handed: set[tuple[str, int]] = set()
        self.position: int | None = None
        """Revision from which the open stream still has to send; None means no stream."""

    def list(self, store: ModelStore) -> None:
        self.view, self.handed = store.view(), set()
        self.cursor.listed(store.incarnation, store.revision, store.items.values())

    def connect(self, store: ModelStore) -> None:
        if self.cursor.needs_list:
            self.list(store)
        start = self.cursor.start_revision
        if start < store.compacted:
            assert isinstance(self.cursor.delivered(store.revision, compact_revision=store.compacted), Relist)
            return
        if self.cursor.checked(store.incarnation, store.revision) is None:
            self.position = start

    def receive(self, store: ModelStore, header: int, changes: tuple[Change, ...]) -> None:
        before = (self.cursor.incarnation, self.cursor.applied)
        decision = self.cursor.delivered(header, changes)
        if isinstance(decision, News):
            for change in decision.changes:
                assert change.mod_revision > before[1], "applied twice, or back in time"
                assert (change.key, change.mod_revision) not in self.handed
                self.handed.add((change.key, change.mod_revision))
                if change.value is None:
                    self.view.pop(change.key, None)
                else:
                    self.view[change.key] = change.value
            assert self.cursor.applied >= before[1]
        elif isinstance(decision, Relist) or self.cursor.checked(store.incarnation, store.revision) is not None:
            self.position = None

    def pending(self, store: ModelStore) -> list[Change]:
        assert self.position is not None
        return [change for change in store.log if change.mod_revision >= self.position]


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(5, 80))
def test_the_reader_converges_whatever_is_cut_repeated_lost_or_wiped(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    store, reader = ModelStore(), Reader()
    for step in range(steps):
        act = rng.choices(
            ("write", "connect", "deliver", "duplicate", "shuffle", "lose", "cut", "compact", "wipe", "restore"),
            (30, 10, 25, 5, 5, 4, 6, 4, 2, 1),
        )[0]
        if act == "write":
            touched = rng.sample(KEYS, rng.randint(1, 2))
            store.write(
                {key: f"{step}".encode() for key in touched if rng.random() < 0.7},
                {key for key in touched if rng.random() < 0.5},
            )
        elif act == "compact":
            store.compacted = rng.randint(store.compacted, store.revision)
            store.log = [change for change in store.log if change.mod_revision > store.compacted]
            if reader.position is not None and reader.position < store.compacted:
                reader.cursor.delivered(store.revision, compact_revision=store.compacted)
                reader.position = None
        elif act in ("wipe", "restore"):  # both take the connections with them
            incarnation = store.incarnation if act == "restore" else f"i{step}"
            store = ModelStore(incarnation=incarnation, revision=rng.randint(1, max(1, store.revision - 1)))
            reader.position = None
        elif act == "cut":
            reader.position = None
        elif act == "connect" and reader.position is None:
            reader.connect(store)
        elif reader.position is not None:
            pending = reader.pending(store)
            revisions = sorted({change.mod_revision for change in pending})
            batch = revisions[: rng.randint(0, len(revisions))]
            changes = [change for change in pending if change.mod_revision in batch]
            if act == "duplicate":
                changes = changes + changes
            if act == "shuffle":
                rng.shuffle(changes)
            if act == "lose" and changes:
                reader.position = batch[-1] + 1  # gone on the way: only a version that jumps can tell
                continue
            reader.receive(store, store.revision, tuple(changes))
            if reader.position is not None and batch and act != "duplicate":
                reader.position = batch[-1] + 1
    # Every key is written once more, so that a lost event shows; then the reader follows undisturbed.
    for key in KEYS:
        store.write({key: b"last"}, set())
    for _ in range(4):
        if reader.position is None:
            reader.connect(store)
        if reader.position is not None:
            reader.receive(store, store.revision, tuple(reader.pending(store)))
    for key in KEYS:
        store.write({key: b"really"}, set())
    for _ in range(4):
        if reader.position is None:
            reader.connect(store)
        if reader.position is not None:
            reader.receive(store, store.revision, tuple(reader.pending(store)))
    assert reader.view == store.view()
    assert (reader.cursor.incarnation, reader.cursor.applied) == (store.incarnation, store.revision)


def following(revision: int = 5, incarnation: str = "i") -> WatchCursor:
    cursor = WatchCursor()
    cursor.listed(incarnation, revision, [Item("a", b"", 2, 1)])
    return cursor


def test_the_head_in_a_header_never_moves_where_to_resume() -> None:
    cursor = following(5)
    cursor.delivered(3001, (Change("a", 7, b"x", 1, 3),))
    assert cursor.start_revision == 7


def test_a_transaction_is_handed_on_whole() -> None:
    cursor = following(5)
    decision = cursor.delivered(6, (Change("a", 6, b"x", 1, 3), Change("b", 6, b"y", 6, 1), Change("c", 6, b"", 6, 1)))
    assert isinstance(decision, News)
    assert [change.key for change in decision.changes] == ["a", "b", "c"]


def test_events_out_of_order_in_one_response_are_put_in_order() -> None:
    decision = following(5).delivered(8, (Change("a", 8, b"2", 1, 4), Change("a", 7, b"1", 1, 3)))
    assert isinstance(decision, News)
    assert [change.mod_revision for change in decision.changes] == [7, 8]


def test_a_known_event_is_dropped_and_counted() -> None:
    cursor = following(5)
    assert cursor.delivered(5, (Change("a", 5, b"x", 1, 2),)) == News()
    assert cursor.duplicates == 1


def test_a_jump_in_a_keys_version_is_a_lost_event() -> None:
    assert following().delivered(9, (Change("a", 9, b"x", 1, 4),)) == Relist("event_lost")


def test_a_header_behind_us_is_only_a_doubt_since_a_member_may_lag() -> None:
    cursor = following(5)
    assert cursor.delivered(4) == Doubt()
    assert cursor.checked("i", 5) is None
    assert not cursor.needs_list


@pytest.mark.parametrize(
    ("incarnation", "revision", "reason"),
    [("other", 900, "wiped"), ("", 1, "wiped"), ("i", 4, "went_back")],
    ids=["another store that is ahead", "a store with no incarnation yet", "a restored backup"],
)
def test_another_or_an_older_store_is_listed_again(incarnation: str, revision: int, reason: str) -> None:
    cursor = following(5)
    assert cursor.checked(incarnation, revision) == Relist(reason)
    assert cursor.needs_list
