"""Counted in flight is in flight: one question and its answer, whatever else is on the way."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.control.inventory import Difference, Inventory


def test_both_kinds_of_difference() -> None:
    inventory = Inventory()
    number = inventory.ask({1, 2, 3})
    known = {1, 2, 3, 4}  # 4 was dispatched behind the question
    assert inventory.answer(number, [1, 9], known) == Difference(lost=(2, 3), unknown=(9,))
    assert (inventory.lost, inventory.unknown) == (2, 1)
    assert inventory.answer(number, [], known) == Difference(), "an answer counts once"


def test_what_has_ended_meanwhile_is_not_lost() -> None:
    inventory = Inventory()
    number = inventory.ask({1, 2})
    assert inventory.answer(number, [1], {1}) == Difference()


def test_an_answer_to_an_older_question_or_to_another_session_says_nothing() -> None:
    inventory = Inventory()
    old = inventory.ask({1})
    new = inventory.ask({1, 2})
    assert inventory.answer(old, [], {1, 2}) == Difference()
    inventory.close()
    assert inventory.answer(new, [], {1, 2}) == Difference()


@given(st.sets(st.integers(1, 20)), st.sets(st.integers(1, 20)), st.sets(st.integers(1, 20)))
def test_an_answer_is_exact_and_leaves_no_difference(asked: set[int], known: set[int], there: set[int]) -> None:
    inventory = Inventory()
    found = inventory.answer(inventory.ask(asked), there, known)
    assert set(found.lost) == (asked & known) - there
    assert set(found.unknown) == there - known
    assert (known - set(found.lost)) & asked == (there - set(found.unknown)) & asked


class OrderedPair(RuleBasedStateMachine):
    """Two ends with ordered frames between them; losses of memory at either end are what the questions are for."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.there: set[int] = set()
        self.up: deque[tuple[str, int]] = deque()
        self.down: deque[tuple[str, int, frozenset[int]]] = deque()
        self.inventory = Inventory()
        self.tokens = 0
        self.is_healthy = True
        """Nobody has forgotten anything yet."""

    @rule()
    def dispatch(self) -> None:
        self.tokens += 1
        self.known.add(self.tokens)
        self.up.append(("dispatch", self.tokens))

    @rule()
    def ask(self) -> None:
        self.up.append(("ask", self.inventory.ask(self.known)))

    @rule()
    def scheduler_reads(self) -> None:
        if not self.up:
            return
        kind, value = self.up.popleft()
        if kind == "dispatch":
            self.there.add(value)
        elif kind == "cancel":
            if value in self.there:
                self.there.discard(value)
                self.down.append(("ended", value, frozenset()))
        else:
            self.down.append(("answer", value, frozenset(self.there)))

    @rule(which=st.integers(0, 9))
    def engine_ends_one(self, which: int) -> None:
        if self.there:
            token = sorted(self.there)[which % len(self.there)]
            self.there.discard(token)
            self.down.append(("ended", token, frozenset()))

    @rule(which=st.integers(0, 9))
    def scheduler_forgets(self, which: int) -> None:
        if self.there:
            self.is_healthy = False
            self.there.discard(sorted(self.there)[which % len(self.there)])

    @rule(which=st.integers(0, 9))
    def router_forgets(self, which: int) -> None:
        if self.known:
            self.is_healthy = False
            self.known.discard(sorted(self.known)[which % len(self.known)])

    @rule()
    def router_reads(self) -> None:
        if not self.down:
            return
        kind, value, tokens = self.down.popleft()
        if kind == "ended":
            self.known.discard(value)
            return
        found = self.inventory.answer(value, tokens, self.known)
        if self.is_healthy:
            assert found == Difference(), "nothing differs where nobody forgets"
        self.known -= set(found.lost)
        self.up.extend(("cancel", token) for token in found.unknown)

    def settle(self) -> None:
        while self.up or self.down:
            self.scheduler_reads()
            self.router_reads()

    @rule()
    def two_looks_make_both_ends_agree(self) -> None:
        for _ in range(2):
            self.settle()
            self.ask()
        self.settle()
        assert self.known == self.there

    @invariant()
    def bounded(self) -> None:
        assert len(self.inventory._asked or ()) <= self.tokens


TestOrderedPair = OrderedPair.TestCase
