"""Three signals that never stand for each other."""

import pytest

from headrace.control.worker_health import (
    SILENCE_MAX_S,
    SNAPSHOT_WAIT_S,
    Signals,
    scheduler_signals,
    worker_signals,
)
from headrace.control.worker_lifecycle import WorkerEvent, WorkerLifecycle

E = WorkerEvent
UP = (E.STARTED, E.LOADED, E.WARMED)
QUIET_S = SILENCE_MAX_S + 0.1


def life(*events: WorkerEvent) -> WorkerLifecycle:
    machine = WorkerLifecycle()
    for event in events:
        machine.handle(event, 0.0)
    return machine


@pytest.mark.parametrize(
    ("events", "heard_ago_s", "signals"),
    [
        ((), None, (False, True, False)),
        ((E.STARTED,), None, (False, True, False)),
        ((E.STARTED, E.LOADED), None, (False, True, False)),
        ((E.STARTED, E.LOADED), QUIET_S, (False, True, False)),
        (UP, 0.5, (True, True, True)),
        (UP, QUIET_S, (True, False, False)),
        (UP, None, (True, False, False)),
        ((*UP, E.DRAIN_ASKED), 0.5, (True, True, False)),
        ((*UP, E.DRAIN_ASKED), QUIET_S, (True, False, False)),
        ((*UP, E.RECYCLE_ASKED), 0.5, (True, True, False)),
        ((*UP, E.LOST), None, (True, False, False)),
        ((E.STARTED, E.LOST), None, (True, False, False)),
        ((E.STARTED, E.LOST, E.STARTED), None, (True, True, False)),
        ((*UP, E.LOST, E.STARTED, E.LOADED), None, (True, True, False)),
    ],
    ids=lambda value: (
        " ".join(e.value for e in value) or "nothing"
        if isinstance(value, tuple) and not any(isinstance(v, bool) for v in value)
        else None
    ),
)
def test_the_signals_of_a_worker(events, heard_ago_s, signals):
    assert worker_signals(life(*events), is_registered=True, heard_ago_s=heard_ago_s) == Signals(*signals)


def test_a_worker_that_no_router_can_see_is_not_ready():
    assert worker_signals(life(*UP), is_registered=False, heard_ago_s=0.1) == Signals(True, True, False)


READY, STARTING, DEAD = Signals(True, True, True), Signals(False, True, False), Signals(True, False, False)


@pytest.mark.parametrize(
    ("workers", "facts", "signals"),
    [
        ((), {}, (True, True, False)),
        ((), {"has_snapshot": False}, (False, True, False)),
        ((), {"has_snapshot": False, "up_s": SNAPSHOT_WAIT_S}, (True, True, False)),
        ((STARTING,), {}, (False, True, False)),
        ((STARTING,), {"had_started": True}, (True, True, False)),
        ((READY, STARTING), {}, (False, True, True)),
        ((READY, DEAD), {}, (True, True, True)),
        ((DEAD,), {}, (True, True, False)),
        ((READY,), {"is_draining": True}, (True, True, False)),
    ],
)
def test_the_signals_of_a_scheduler(workers, facts, signals):
    all_facts = {"had_started": False, "has_snapshot": True, "up_s": 1.0, "is_draining": False, **facts}
    assert scheduler_signals(workers, **all_facts) == Signals(*signals)
