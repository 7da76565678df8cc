"""A worker's life: the table, what must hold for every sequence of events, and when it starts again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.resources import ReplicaState
from headrace.control.worker_lifecycle import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    CRASH_LOOP_FAILURES,
    CRASH_LOOP_RETRY_S,
    CRASH_LOOP_WINDOW_S,
    STABLE_S,
    TRANSITIONS,
    IllegalTransition,
    WorkerEffect,
    WorkerEvent,
    WorkerLifecycle,
    WorkerState,
)

S, E, X = WorkerState, WorkerEvent, WorkerEffect


def live(*events: WorkerEvent, now: float = 0.0) -> WorkerLifecycle:
    life = WorkerLifecycle()
    for event in events:
        life.handle(event, now)
    return life


@pytest.mark.parametrize(
    ("events", "state", "replica"),
    [
        ((), S.CREATED, None),
        ((E.STARTED,), S.LOADING, ReplicaState.LOADING),
        ((E.STARTED, E.LOADED), S.WARMING, ReplicaState.LOADING),
        ((E.STARTED, E.LOADED, E.WARMED), S.READY, ReplicaState.READY),
        ((E.STARTED, E.LOADED, E.WARMED, E.DRAIN_ASKED), S.DRAINING, ReplicaState.DRAINING),
        ((E.STARTED, E.LOADED, E.WARMED, E.DRAIN_ASKED, E.DRAINED), S.STOPPED, None),
        ((E.STARTED, E.LOADED, E.WARMED, E.DRAIN_ASKED, E.LOST), S.STOPPED, None),
        ((E.STARTED, E.LOADED, E.WARMED, E.LOST), S.FAILED, ReplicaState.FAILED),
        ((E.STARTED, E.LOADED, E.WARMED, E.RECYCLE_ASKED), S.RECYCLING, ReplicaState.DRAINING),
        ((E.STARTED, E.LOADED, E.WARMED, E.RECYCLE_ASKED, E.DRAINED), S.FAILED, ReplicaState.FAILED),
        ((E.STARTED, E.LOADED, E.WARMED, E.RECYCLE_ASKED, E.LOST, E.STARTED), S.LOADING, ReplicaState.LOADING),
        ((E.STARTED, E.LOADED, E.WARMED, E.RECYCLE_ASKED, E.DRAIN_ASKED), S.DRAINING, ReplicaState.DRAINING),
        ((E.STARTED, E.LOST, E.STARTED), S.LOADING, ReplicaState.LOADING),
        ((E.STARTED, E.LOST, E.DRAIN_ASKED), S.STOPPED, None),
        ((E.DRAIN_ASKED,), S.STOPPED, None),
    ],
    ids=lambda value: " ".join(e.value for e in value) or "nothing" if isinstance(value, tuple) else "",
)
def test_where_events_lead(events, state, replica):
    life = live(*events)
    assert (life.state, life.replica_state) == (state, replica)
    assert life.takes_attempts == (state is S.READY)


@given(st.sampled_from(WorkerState), st.sampled_from(WorkerEvent))
def test_an_illegal_event_changes_nothing(state, event):
    if (state, event) in TRANSITIONS:
        return
    life = WorkerLifecycle(state=state, detail="as it was", start_at=7.0, failures=2)
    with pytest.raises(IllegalTransition):
        life.handle(event, 9.0, "other")
    assert life == WorkerLifecycle(state=state, detail="as it was", start_at=7.0, failures=2)


@given(st.lists(st.sampled_from(WorkerEvent), max_size=40))
def test_what_holds_for_every_life(events):
    life = WorkerLifecycle()
    engine = published = takes = warmed = refuses = False
    serving = (S.READY, S.DRAINING, S.RECYCLING)
    now = 0.0
    for event in events:
        if (life.state, event) not in TRANSITIONS:
            continue
        now += 1.0
        was_ready = life.state in serving
        had_started = life.has_started
        effects = life.handle(event, now)
        for effect in effects:
            if effect is X.LAUNCH:
                assert not engine
                engine, warmed, refuses = True, False, False
            elif effect is X.STOP_ENGINE:
                assert engine
                engine = False
            elif effect is X.REFUSE_NEW:
                assert X.PUBLISH not in effects[: effects.index(effect)]  # nobody is told before it is true here
                refuses = True
            elif effect is X.PUBLISH:
                published = True
            elif effect is X.WITHDRAW:
                published = False
        warmed |= event is E.WARMED
        if was_ready and life.state not in serving:
            assert effects[0] is X.END_ATTEMPTS  # whoever waits for an answer hears first
        else:
            assert X.END_ATTEMPTS not in effects
        takes = life.takes_attempts
        assert engine == (life.state in (S.LOADING, S.WARMING, *serving))
        assert (life.replica_state is ReplicaState.READY) == takes
        assert refuses or life.state not in (S.DRAINING, S.RECYCLING)
        assert life.has_started or not had_started
        assert published == (life.replica_state is not None)
        assert (life.start_at is not None) == (life.state is S.FAILED)
        if takes:
            assert engine
            assert published
            assert warmed
    if life.is_over:
        assert not any(state is S.STOPPED for state, _ in TRANSITIONS)


def fail(life: WorkerLifecycle, now: float) -> float:
    """Start and lose it; returns the delay until it may start again."""
    life.handle(E.STARTED, now)
    life.handle(E.LOST, now, "why")
    assert life.start_at is not None
    return life.start_at - now


def test_restarts_back_off_and_a_crash_loop_is_told_and_slow():
    life = WorkerLifecycle()
    delays = [fail(life, float(n)) for n in range(CRASH_LOOP_FAILURES + 3)]
    quick = delays[: CRASH_LOOP_FAILURES - 1]
    assert quick == [min(BACKOFF_FIRST_S * 2**n, BACKOFF_MAX_S) for n in range(len(quick))]
    assert set(delays[CRASH_LOOP_FAILURES - 1 :]) == {CRASH_LOOP_RETRY_S}
    assert life.is_crash_loop
    assert life.detail.startswith("CRASH_LOOP: failed 8 times")
    assert life.detail.endswith("why")
    assert life.restarts == len(delays) - 1


def test_a_worker_that_dies_again_and_again_is_a_crash_loop_even_if_it_serves_in_between():
    life, now = WorkerLifecycle(), 0.0
    for n in range(CRASH_LOOP_FAILURES):
        assert not life.is_crash_loop, n
        for event in (E.STARTED, E.LOADED, E.WARMED):
            life.handle(event, now)
        now += CRASH_LOOP_WINDOW_S / CRASH_LOOP_FAILURES
        life.handle(E.LOST, now, "why")
    assert life.is_crash_loop
    assert life.detail.startswith("CRASH_LOOP: failed 5 times")
    assert life.start_at == now + CRASH_LOOP_RETRY_S


def test_failures_further_apart_than_the_window_are_none():
    life, now = WorkerLifecycle(), 0.0
    for _ in range(3 * CRASH_LOOP_FAILURES):
        for event in (E.STARTED, E.LOADED, E.WARMED):
            life.handle(event, now)
        now += CRASH_LOOP_WINDOW_S / (CRASH_LOOP_FAILURES - 1) + 1
        life.handle(E.LOST, now, "why")
        assert not life.is_crash_loop
        assert life.start_at == now + BACKOFF_FIRST_S


def test_a_minute_of_service_clears_the_record():
    life = WorkerLifecycle()
    for n in range(CRASH_LOOP_FAILURES):
        fail(life, float(n))
    for served_s, failures in ((STABLE_S - 1, CRASH_LOOP_FAILURES + 1), (STABLE_S, 1)):
        for event in (E.STARTED, E.LOADED, E.WARMED):
            life.handle(event, 1000.0)
        life.handle(E.LOST, 1000.0 + served_s, "why")
        assert life.failures == failures
    assert not life.is_crash_loop
