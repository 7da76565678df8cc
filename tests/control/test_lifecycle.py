"""The request record: one end, no retry after output, late messages change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.lifecycle import Finish, Phase, RequestRecord


def record_in(phase: Phase) -> RequestRecord:
    record = RequestRecord(received_at=0.0)
    if phase is Phase.RECEIVED:
        return record
    record.dispatch(1, "replicas/a")
    if phase in (Phase.PREFILL, Phase.DECODE):
        record.admit(1, record.attempt_version, 1.0)
    if phase is Phase.DECODE:
        record.output(1, 1, 2.0)
    if phase is Phase.TERMINAL:
        record.end(Finish.CANCELLED)
    assert record.phase is phase
    return record


@pytest.mark.parametrize("first", Finish)
@pytest.mark.parametrize("second", Finish)
def test_the_first_end_wins(first: Finish, second: Finish) -> None:
    record = record_in(Phase.DECODE)
    assert record.end(first)
    version = record.version
    assert not record.end(second)
    assert record.finish is first
    assert record.version == version


@pytest.mark.parametrize(
    ("phase", "allowed"),
    [
        (Phase.RECEIVED, True),
        (Phase.QUEUED, True),
        (Phase.PREFILL, True),
        (Phase.DECODE, False),
        (Phase.TERMINAL, False),
    ],
)
def test_an_attempt_starts_only_before_output_and_before_the_end(phase: Phase, allowed: bool) -> None:
    record = record_in(phase)
    before = record.version
    assert record.dispatch(2, "replicas/b") is allowed
    assert (record.version > before) is allowed


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREFILL])
def test_messages_of_an_old_attempt_change_nothing(phase: Phase) -> None:
    record = record_in(phase)
    old = record.attempt_version
    record.dispatch(2, "replicas/b")
    version = record.version
    assert not record.admit(1, old, 5.0)
    assert not record.admit(2, old, 5.0), "the attempt's token with an old record version"
    assert not record.admit(1, record.attempt_version, 5.0), "the version with an old attempt's token"
    assert not record.output(1, 3, 5.0)
    assert (record.version, record.output_tokens, record.phase) == (version, 0, Phase.QUEUED)


@pytest.mark.parametrize(
    ("tokens_at", "ttft_s", "tpot_s"),
    [([], None, None), ([2.0], 2.0, None), ([2.0, 3.0, 4.0], 2.0, 1.0), ([5.0, 8.0], 5.0, 3.0)],
    ids=["no token", "one token has no gap", "DESIGN's request a", "DESIGN's request b"],
)
def test_ttft_and_tpot(tokens_at: list[float], ttft_s: float | None, tpot_s: float | None) -> None:
    record = record_in(Phase.PREFILL)
    for at in tokens_at:
        record.output(1, 1, at)
    assert record.time_to_first_token_s() == ttft_s
    assert record.time_per_output_token_s() == tpot_s


@pytest.mark.parametrize(
    ("phase", "attempts", "free", "allowed"),
    [
        (Phase.RECEIVED, 0, 0, False),
        (Phase.QUEUED, 1, 0, True),
        (Phase.PREFILL, 2, 0, True),
        (Phase.QUEUED, 3, 0, False),
        (Phase.QUEUED, 3, 1, True),
        (Phase.DECODE, 1, 0, False),
        (Phase.TERMINAL, 1, 0, False),
    ],
)
def test_a_retry_needs_an_attempt_that_gave_nothing_and_one_that_is_left(
    phase: Phase, attempts: int, free: int, allowed: bool
) -> None:
    record = record_in(phase)
    record.attempts, record.attempts_free = attempts, free
    assert record.may_retry(3) is allowed


def test_a_second_admission_of_the_same_attempt_changes_nothing() -> None:
    record = record_in(Phase.PREFILL)
    before = record.version, record.admitted_at
    assert not record.admit(1, record.attempt_version, 9.0)
    assert (record.version, record.admitted_at) == before


_STEP = st.one_of(
    st.tuples(st.just("dispatch"), st.integers(1, 4)),
    st.tuples(st.just("admit"), st.integers(1, 4)),
    st.tuples(st.just("output"), st.integers(1, 4)),
    st.tuples(st.just("end"), st.sampled_from(Finish)),
)


@given(st.lists(_STEP, max_size=40))
def test_whatever_the_order_there_is_one_end_and_one_counting_attempt(steps: list[tuple[str, object]]) -> None:
    record, counted, ends, now = RequestRecord(received_at=0.0), 0, 0, 0.0
    for name, value in steps:
        now += 1.0
        before = (record.version, record.phase)
        if name == "dispatch":
            changed = record.dispatch(value, "replicas/x")  # type: ignore[arg-type]
            assert not (changed and counted), "a retry after output"
        elif name == "admit":
            changed = record.admit(value, record.attempt_version, now)  # type: ignore[arg-type]
            assert not changed or value == record.attempt
        elif name == "output":
            changed = record.output(value, 2, now)  # type: ignore[arg-type]
            counted += 2 * changed
        else:
            changed = record.end(value)  # type: ignore[arg-type]
            ends += changed
        if not changed:
            assert (record.version, record.phase) == before
    assert ends == (record.phase is Phase.TERMINAL) <= 1
    assert record.output_tokens == counted
