"""The event log keeps the newest events, the very bytes, within its bounds, and says what is gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.event_log import EventLog, EventsExpired, Retention, UnknownSequence


def log_of(*sizes: int, events_max: int = 4, bytes_max: int = 100) -> EventLog:
    log = EventLog(Retention(events_max, bytes_max, window_s=10.0))
    for sequence, size in enumerate(sizes, start=1):
        log.append(sequence, bytes([sequence]) * size, tokens=sequence)
    return log


def sequences(log: EventLog, after: int) -> list[int]:
    return [event.sequence for event in log.after(after)]


def test_an_empty_log_has_nothing_after_zero() -> None:
    log = log_of()
    assert (log.first, log.last, log.after(0), log.tokens_through(0)) == (1, 0, [], 0)
    with pytest.raises(UnknownSequence) as unknown:
        log.after(1)
    assert unknown.value.last == 0


@pytest.mark.parametrize(
    ("sizes", "first"),
    [((1, 1, 1, 1), 1), ((1, 1, 1, 1, 1), 2), ((60, 30, 20), 2), ((60, 60, 60), 3), ((10, 10, 101), 4)],
    ids=["all fit", "too many events", "too many bytes", "one at a time", "one that fits nowhere"],
)
def test_the_oldest_give_way(sizes: tuple[int, ...], first: int) -> None:
    log = log_of(*sizes)
    assert log.first == first
    assert sequences(log, log.last) == []
    assert sequences(log, first - 1) == list(range(first, len(sizes) + 1))
    for gone in range(first - 1):
        with pytest.raises(EventsExpired) as expired:
            log.after(gone)
        assert expired.value.first == first


def test_a_gap_is_a_bug_of_the_writer() -> None:
    log = log_of(1)
    with pytest.raises(AssertionError):
        log.append(3, b"", 0)


def test_room_is_what_pushes_none_out() -> None:
    log = log_of(40, 40, events_max=3)
    assert log.has_room(20)
    assert not log.has_room(21)
    log.append(3, b"", 0)
    assert not log.has_room(0), "the count is a bound too"


def test_clear_forgets_all_and_keeps_the_numbers() -> None:
    log = log_of(5, 6)
    assert log.clear() == 11
    assert (len(log), log.size, log.first, log.last, log.tokens) == (0, 0, 3, 2, 3)
    with pytest.raises(EventsExpired):
        log.after(1)


@given(
    st.lists(st.tuples(st.binary(max_size=12), st.integers(0, 5)), max_size=30),
    st.integers(0, 6),
    st.integers(0, 30),
)
def test_against_a_log_that_forgets_nothing(events: list[tuple[bytes, int]], events_max: int, bytes_max: int) -> None:
    log = EventLog(Retention(events_max, bytes_max, window_s=1.0))
    for sequence, (data, tokens) in enumerate(events, start=1):
        log.append(sequence, data, tokens)
        assert len(log) <= events_max
        assert log.size == sum(len(event.data) for event in log.after(log.first - 1)) <= bytes_max
    for after in range(log.first - 1, log.last + 1):
        assert [(event.data, event.tokens) for event in log.after(after)] == events[after:]
        assert log.tokens_through(after) == sum(tokens for _, tokens in events[:after])
