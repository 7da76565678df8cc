"""Three signals of a worker's health that never stand for each other, and the rules for a whole Scheduler.

    startup     its first start is over: it was ready once, or it failed and said why
    liveness    an engine that is up answers; loading, warming and long queues are no failure of it
    readiness   warm, registered and not draining: attempts may come

What a startup probe waits for is bounded by the worker's own deadline of its start, after which it has failed. A
Scheduler is not dead because an engine is: it starts that again. So its own liveness fails only where its own tasks
have ended.

Sans-io.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.control.worker_lifecycle import WorkerLifecycle, WorkerState

SILENCE_MAX_S = 3.0
"""An engine's loop says at least once a second that it is alive; so long a silence is death."""
SNAPSHOT_WAIT_S = 10.0
"""A Scheduler that has had no snapshot for so long has nothing to start."""

_UP = frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.RECYCLING})


@dataclass(frozen=True, slots=True)
class Signals:
    """What one worker says, or all of them together."""

    started: bool
    alive: bool
    ready: bool


def worker_signals(life: WorkerLifecycle, *, is_registered: bool, heard_ago_s: float | None) -> Signals:
    """The signals of one worker.

    Args:
        life: its state.
        is_registered: whether its record in the store has an epoch.
        heard_ago_s: seconds since its engine's loop was heard; None: there is no engine.
    """
    is_silent = life.state in _UP and (heard_ago_s is None or heard_ago_s > SILENCE_MAX_S)
    return Signals(
        started=life.has_started,
        alive=life.state is not WorkerState.FAILED and not is_silent,
        ready=life.takes_attempts and is_registered and not is_silent,
    )


def scheduler_signals(
    workers: Iterable[Signals], *, had_started: bool, has_snapshot: bool, up_s: float, is_draining: bool
) -> Signals:
    """The signals of a Scheduler.

    Args:
        workers: those of its workers.
        had_started: what was said before; a startup that is over does not begin again.
        has_snapshot: whether it knows what it ought to serve.
        up_s: seconds since it began.
        is_draining: whether it was told to stop.
    """
    found = tuple(workers)
    knows = has_snapshot or up_s >= SNAPSHOT_WAIT_S
    return Signals(
        started=had_started or (knows and all(one.started for one in found)),
        alive=True,  # said by the event loop itself: where that hangs, nobody is left to say it
        ready=not is_draining and any(one.ready for one in found),
    )
