"""The credit window: how far generation may run ahead of each kind of reader."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.control.credit import CreditWindow, Reader


def opened(window: int = 8, reader: Reader = Reader.IMPLICIT, **changes: int) -> CreditWindow:
    credit = CreditWindow(window, reader, **changes)
    assert credit.open() == window
    return credit


def test_the_low_watermark_is_half_the_window_unless_it_is_set() -> None:
    assert [CreditWindow(window).low for window in (8, 9, 1)] == [4, 4, 0]
    assert CreditWindow(3, low=2).low == 2
    assert CreditWindow(3, low=0).low == 0


def test_what_the_transport_took_is_taken_and_half_a_window_makes_a_grant() -> None:
    credit = opened(8)
    credit.output(8, now=1.0)
    credit.write(3, sequence=2)
    assert credit.grant() is None, "the low watermark is not reached"
    credit.write(1, sequence=3)
    assert credit.grant() == 12
    assert credit.grant() is None, "a grant is not repeated"
    assert (credit.sent, credit.acknowledged, credit.outstanding) == (4, 0, 8)


def test_an_explicit_reader_is_believed_only_for_what_it_confirmed() -> None:
    credit = opened(8, Reader.EXPLICIT)
    credit.output(8, now=1.0)
    credit.write(0, sequence=1)
    credit.write(5, sequence=2)
    credit.write(3, sequence=3)
    assert (credit.sent, credit.taken, credit.grant()) == (8, 0, None)
    credit.acknowledge(1)
    assert (credit.acknowledged, credit.grant()) == (0, None)
    credit.acknowledge(2)
    assert (credit.acknowledged, credit.grant()) == (5, 13)
    for repeated in (2, 1, 0):
        credit.acknowledge(repeated)
        assert (credit.acknowledged, credit.taken, credit.grant()) == (5, 5, None)
    credit.acknowledge(99)  # beyond the newest: all there is
    assert credit.acknowledged == 8


@pytest.mark.parametrize("reader", [Reader.IMPLICIT, Reader.NONE])
def test_a_late_acknowledgement_confirms_nothing_of_another_reader(reader: Reader) -> None:
    credit = opened(8, Reader.EXPLICIT)
    credit.output(6, now=1.0)
    credit.write(6, sequence=2)
    credit.attach(reader, 6)
    credit.acknowledge(2)
    assert credit.acknowledged == 0


def test_a_pause_begins_when_the_credit_is_used_up_and_ends_with_a_grant() -> None:
    credit = opened(8)
    credit.output(7, now=1.0)
    assert credit.paused_at is None
    credit.output(1, now=2.0)
    credit.output(0, now=3.0)
    assert credit.paused_at == 2.0
    credit.write(8, sequence=2)
    assert credit.grant() == 16
    assert (credit.paused_at, credit.overrun) == (None, 0)


def test_an_engine_that_breaks_its_contract_is_counted() -> None:
    credit = opened(8)
    credit.output(11, now=1.0)
    assert credit.overrun == 3


def test_a_reader_that_goes_back_is_not_counted_twice_and_costs_no_credit() -> None:
    credit = opened(8)
    credit.output(8, now=1.0)
    credit.write(8, sequence=2)
    assert credit.grant() == 16
    credit.attach(Reader.EXPLICIT, 2)
    assert (credit.acknowledged, credit.sent, credit.granted) == (2, 8, 16)
    assert credit.grant() is None
    credit.write(6, sequence=2)
    assert (credit.sent, credit.position) == (8, 8)
    credit.acknowledge(2)
    assert (credit.acknowledged, credit.taken) == (8, 8)
    assert credit.granted == 16, "what was granted stands"


def test_another_attempt_begins_with_a_whole_window() -> None:
    credit = opened(8)
    credit.output(8, now=1.0)
    assert credit.open() == 8
    assert (credit.produced, credit.paused_at) == (0, None)


class AnyReader(RuleBasedStateMachine):
    """Engine, readers and log in any order, against plain counting."""

    @initialize(window=st.integers(1, 12), data=st.data())
    def begin(self, window: int, data: st.DataObject) -> None:
        low = data.draw(st.integers(-1, window - 1))
        self.credit = CreditWindow(window, low=low)
        self.granted = self.credit.open()
        self.through = [0]
        """Tokens of all events up to and with each sequence; of the answer so far."""
        self.told = self.confirmed = self.sent = 0
        self.reader = Reader.IMPLICIT
        self.at = self.known = 0
        """Newest sequence that this reader was given; and that counts as read."""
        self.seen = 0
        """Newest sequence that any reader was given: an honest one does not go on behind another."""

    @rule(tokens=st.integers(0, 4))
    def produce(self, tokens: int) -> None:
        self.credit.output(min(tokens, self.granted - self.credit.produced), now=1.0)

    @precondition(lambda self: self.at == len(self.through) - 1)
    @rule(early=st.booleans())
    def tell(self, early: bool) -> None:
        """`early`: the reader confirms the event before its write is known to be done."""
        self.through.append(self.credit.produced)
        sequence = len(self.through) - 1
        if early:
            self.credit.acknowledge(sequence)
        self._write(sequence)
        if early and self.reader is Reader.EXPLICIT:
            self.known = sequence
            self.confirmed = max(self.confirmed, min(self.through[sequence], self.sent))

    @precondition(lambda self: self.at < len(self.through) - 1)
    @rule()
    def repeat(self) -> None:
        self._write(self.at + 1)

    def _write(self, sequence: int) -> None:
        self.credit.write(self.through[sequence] - self.through[sequence - 1], sequence)
        self.at = sequence
        if self.reader is not Reader.EXPLICIT:
            self.known = sequence
        if self.reader is not Reader.NONE:
            self.sent = max(self.sent, self.through[sequence])
            self.seen = max(self.seen, sequence)

    @rule(back=st.integers(0, 4))
    def acknowledge(self, back: int) -> None:
        sequence = max(0, self.at - back)
        self.credit.acknowledge(sequence)
        if self.reader is Reader.EXPLICIT:
            self.known = max(self.known, min(sequence, self.at))
            self.confirmed = max(self.confirmed, min(self.through[self.known], self.sent))

    @rule(reader=st.sampled_from(Reader), data=st.data())
    def attach(self, reader: Reader, data: st.DataObject) -> None:
        at = len(self.through) - 1 if reader is Reader.NONE else data.draw(st.integers(0, self.seen))
        self.at = self.known = at
        self.reader = reader
        self.credit.attach(reader, self.through[self.at])
        if reader is Reader.EXPLICIT:
            self.confirmed = max(self.confirmed, min(self.through[self.at], self.sent))

    @rule()
    def grant(self) -> None:
        limit = self.credit.grant()
        taken = self.through[self.known]
        if limit is None:
            assert self.granted - taken > self.credit.low, "there was something to grant"
        else:
            assert limit == taken + self.credit.window > self.granted
            self.granted = limit

    @invariant()
    def counts_hold(self) -> None:
        credit = self.credit
        assert credit.acknowledged <= credit.sent <= credit.produced <= credit.granted == self.granted
        assert (credit.sent, credit.acknowledged) == (self.sent, self.confirmed)
        assert credit.taken == self.through[self.known]
        assert (credit.paused_at is not None) == (credit.produced == credit.granted)


TestAnyReader = AnyReader.TestCase
TestAnyReader.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_confirmation_that_is_faster_than_the_news_of_its_write_counts() -> None:
    window = CreditWindow(8, Reader.EXPLICIT)
    window.open()
    window.output(8, 1.0)
    window.acknowledge(2)
    assert window.grant() is None
    window.write(8, 2)
    assert (window.taken, window.acknowledged) == (8, 8)
    assert window.grant() == 16
    window.attach(Reader.EXPLICIT, 8)
    window.write(4, 2)
    assert window.taken == 8, "what an earlier reader confirmed is not what this one has"
