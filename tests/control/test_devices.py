"""GPUs: none has two holders, whatever comes and goes; who cannot have all gets none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.devices import DevicePool


@pytest.mark.parametrize(
    ("held", "count", "taken"),
    [
        ([], 0, ()),
        ([], 1, ("0",)),
        ([], 4, ("0", "1", "2", "3")),
        ([], 5, None),
        (["0"], 2, ("1", "2")),
        (["1"], 2, ("2", "3")),
        (["1", "3"], 2, ("0", "2")),
        (["0", "1", "2"], 2, None),
    ],
    ids=str,
)
def test_neighbours_first_and_all_or_none(held: list[str], count: int, taken: tuple[str, ...] | None) -> None:
    pool = DevicePool("0123")
    for device in "0123":
        pool.take(f"holder {device}", 1)
    for device in "0123":
        if device not in held:
            pool.give_back(f"holder {device}")
    assert pool.take("new", count) == taken
    assert pool.free == 4 - len(held) - len(taken or ())


def test_a_device_that_is_named_twice_is_one() -> None:
    assert DevicePool(["GPU-a", "GPU-b", "GPU-a"]).count == 2


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from(["take", "give"]), st.sampled_from("abcd"), st.integers(0, 4)), max_size=40),
)
def test_no_device_ever_has_two_holders(size: int, calls: list[tuple[str, str, int]]) -> None:
    pool = DevicePool(map(str, range(size)))
    held: dict[str, tuple[str, ...]] = {}
    for call, holder, count in calls:
        if call == "give":
            pool.give_back(holder)
            held.pop(holder, None)
        elif holder not in held:
            free = pool.free
            taken = pool.take(holder, count)
            assert (taken is None) == (count > free)
            if taken:
                assert len(taken) == count
                held[holder] = taken
        every = [device for devices in held.values() for device in devices]
        assert len(every) == len(set(every)) <= size
        assert pool.free == size - len(every)
        assert {holder: pool.held_by(holder) for holder in held} == held
