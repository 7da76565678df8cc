"""What was generated beyond the credit: kept whole, handed out in order, bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.run_ahead import RunAhead
from headrace.engine.text import Release, TextJoiner


def release(*ids: int, text: bytes = b"") -> Release:
    return Release(list(ids), [None] * len(ids), text)


def test_parts_come_out_once_in_order_as_far_as_there_is_room() -> None:
    ahead = RunAhead(4)
    for part in (release(1, text=b"a"), release(2, text=b"b"), release(3, text=b"c")):
        ahead.push(part)
    assert ahead.held == 3
    taken = ahead.take(2)
    assert (taken.ids, taken.text) == ([1, 2], b"ab")
    assert ahead.take(0).ids == []
    assert ahead.take(9).ids == [3]
    assert (ahead.held, ahead.take(9)) == (0, Release())


def test_a_character_in_two_tokens_waits_for_room_for_both() -> None:
    ahead = RunAhead(4)
    ahead.push(release(1, 2, text="é".encode()))
    ahead.push(release(3, text=b"x"))
    assert ahead.take(1).ids == [], "and nothing overtakes it"
    assert ahead.take(2).ids == [1, 2]


def test_what_is_dropped_is_counted() -> None:
    ahead = RunAhead(4)
    ahead.push(release(1, 2))
    assert (ahead.drop(), ahead.held, ahead.take(9).ids) == (2, 0, [])


@pytest.mark.parametrize(
    ("capacity", "beyond", "must_abort", "may_resubmit"),
    [
        (8, -5, False, True),
        (8, 0, False, True),
        (8, 4, False, True),
        (8, 5, False, False),
        (8, 7, False, False),
        (8, 8, True, False),
        (8, 9, True, False),
        (1, 0, False, True),
        (1, 1, True, False),
        (3, 1, False, True),
        (3, 2, False, False),
    ],
)
def test_when_to_abort_and_when_to_resubmit(capacity: int, beyond: int, must_abort: bool, may_resubmit: bool) -> None:
    ahead = RunAhead(capacity)
    limit = 100
    assert ahead.must_abort(limit + beyond, limit) is must_abort
    assert ahead.may_resubmit(limit + beyond, limit) is may_resubmit


def test_a_buffer_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        RunAhead(0)


_PIECES = st.lists(st.sampled_from([b"a", b"b", b"", b"\xc3", b"\xa9", b"\xff", b"stop", "水".encode()]), max_size=12)


@settings(deadline=None)
@given(_PIECES, st.sampled_from([(), ("bab",), ("stop", "ab")]), st.booleans(), st.lists(st.integers(0, 3)))
def test_a_release_split_is_the_release_again(
    pieces: list[bytes], stop: tuple[str, ...], is_flushed: bool, rooms: list[int]
) -> None:
    joiner = TextJoiner(stop)
    ahead = RunAhead(1)
    ids: list[int] = []
    text = b""
    for token, piece in enumerate(pieces):
        shown = joiner.push(token, piece, f"detail {token}")
        parts = shown.split()
        assert b"".join(part.text for part in parts) == shown.text
        assert [i for part in parts for i in part.ids] == shown.ids
        assert [d for part in parts for d in part.details] == shown.details
        for part in parts:
            part.text.decode()
        ahead.push(shown)
        ids += shown.ids
        text += shown.text
        if shown.stop is not None:
            break
    else:
        if is_flushed:
            shown = joiner.flush()
            ahead.push(shown)
            ids += shown.ids
            text += shown.text
    got_ids: list[int] = []
    got_text = b""
    for room in [*rooms, 99]:
        taken = ahead.take(room)
        assert len(taken.ids) <= room
        assert taken.details == [f"detail {token}" for token in taken.ids]
        taken.text.decode()
        got_ids += taken.ids
        got_text += taken.text
    assert (got_ids, got_text, ahead.held) == (ids, text, 0)


def test_no_cut_goes_through_a_character() -> None:
    joiner = TextJoiner(("éab",))
    pieces = [b"\xc3", b"\xa9", b"a", b"x"]
    (shown,) = [shown for token, piece in enumerate(pieces) if (shown := joiner.push(token, piece)).ids]
    assert [(part.ids, part.text.decode()) for part in shown.split()] == [([0, 1], "é"), ([2], "a"), ([3], "x")]


def test_a_long_text_held_back_for_a_stop_string_comes_out_token_by_token() -> None:
    joiner = TextJoiner(("aaaaab",))
    ahead = RunAhead(1)
    for token in range(5):
        ahead.push(joiner.push(token, b"a"))
    ahead.push(joiner.push(5, b"c"))
    assert [ahead.take(1).ids for _ in range(6)] == [[0], [1], [2], [3], [4], [5]]
