"""Decides what happens to one worker: when it may serve, when it is started again, and when it is over.

    CREATED --start--> LOADING --loaded--> WARMING --warmed--> READY --drain--> DRAINING --drained--> STOPPED
                          |                   |                  |                  |
                          +-------lost--------+------lost--------+               lost--> STOPPED
                                              v
                       LOADING <--start-- FAILED --drain--> STOPPED

    READY --recycle--> RECYCLING --drained, lost--> FAILED
                           +--drain--> DRAINING

A drain that finds nothing serving ends in STOPPED at once. A worker that has to be started again although it still
serves (it takes too much memory) is RECYCLING: a drain, after which it is FAILED and comes back. An event that the
table does not have is illegal and changes nothing. READY is the only state in which a worker takes attempts.

Restarts back off from 0.5 s, doubling. Five failures without a minute of service between them, or five within ten
minutes whatever it did between them, are a crash loop: it is told as CRASH_LOOP and tried once a minute. It is never
given up: the file or the memory that is missing may come back without anyone who would say so.

Sans-io.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from headrace.control.resources import ReplicaState

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
CRASH_LOOP_FAILURES = 5
CRASH_LOOP_RETRY_S = 60.0
CRASH_LOOP_WINDOW_S = 600.0
STABLE_S = 60.0
"""A worker that served this long starts again with a clean record."""


class WorkerState(enum.Enum):
    """State of a worker's life."""

    CREATED = "created"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    RECYCLING = "recycling"
    STOPPED = "stopped"
    FAILED = "failed"


class WorkerEvent(enum.Enum):
    """What happened to a worker."""

    STARTED = "started"
    LOADED = "loaded"
    WARMED = "warmed"
    LOST = "lost"
    DRAIN_ASKED = "drain_asked"
    RECYCLE_ASKED = "recycle_asked"
    DRAINED = "drained"


class WorkerEffect(enum.Enum):
    """What has to be done about it, in the order given."""

    LAUNCH = "launch"
    PUBLISH = "publish"
    END_ATTEMPTS = "end_attempts"
    REFUSE_NEW = "refuse_new"
    STOP_ENGINE = "stop_engine"
    WITHDRAW = "withdraw"


_S, _E, _X = WorkerState, WorkerEvent, WorkerEffect
_OVER = (_X.STOP_ENGINE, _X.WITHDRAW)

TRANSITIONS: Mapping[tuple[WorkerState, WorkerEvent], tuple[WorkerState, tuple[WorkerEffect, ...]]] = MappingProxyType(
    {
        (_S.CREATED, _E.STARTED): (_S.LOADING, (_X.PUBLISH, _X.LAUNCH)),
        (_S.CREATED, _E.DRAIN_ASKED): (_S.STOPPED, ()),
        (_S.LOADING, _E.LOADED): (_S.WARMING, (_X.PUBLISH,)),
        (_S.LOADING, _E.LOST): (_S.FAILED, (_X.STOP_ENGINE, _X.PUBLISH)),
        (_S.LOADING, _E.DRAIN_ASKED): (_S.STOPPED, _OVER),
        (_S.WARMING, _E.WARMED): (_S.READY, (_X.PUBLISH,)),
        (_S.WARMING, _E.LOST): (_S.FAILED, (_X.STOP_ENGINE, _X.PUBLISH)),
        (_S.WARMING, _E.DRAIN_ASKED): (_S.STOPPED, _OVER),
        # The attempts first: what was computed and said is final before anything else moves.
        (_S.READY, _E.LOST): (_S.FAILED, (_X.END_ATTEMPTS, _X.STOP_ENGINE, _X.PUBLISH)),
        (_S.READY, _E.DRAIN_ASKED): (_S.DRAINING, (_X.REFUSE_NEW, _X.PUBLISH)),
        (_S.READY, _E.RECYCLE_ASKED): (_S.RECYCLING, (_X.REFUSE_NEW, _X.PUBLISH)),
        (_S.RECYCLING, _E.DRAINED): (_S.FAILED, (_X.END_ATTEMPTS, _X.STOP_ENGINE, _X.PUBLISH)),
        (_S.RECYCLING, _E.LOST): (_S.FAILED, (_X.END_ATTEMPTS, _X.STOP_ENGINE, _X.PUBLISH)),
        (_S.RECYCLING, _E.DRAIN_ASKED): (_S.DRAINING, ()),
        (_S.DRAINING, _E.DRAINED): (_S.STOPPED, (_X.END_ATTEMPTS, *_OVER)),
        (_S.DRAINING, _E.LOST): (_S.STOPPED, (_X.END_ATTEMPTS, *_OVER)),
        (_S.FAILED, _E.STARTED): (_S.LOADING, (_X.PUBLISH, _X.LAUNCH)),
        (_S.FAILED, _E.DRAIN_ASKED): (_S.STOPPED, (_X.WITHDRAW,)),
    }
)

_REPLICA_STATES: Mapping[WorkerState, ReplicaState | None] = MappingProxyType(
    {
        _S.CREATED: None,
        _S.LOADING: ReplicaState.LOADING,
        _S.WARMING: ReplicaState.LOADING,
        _S.READY: ReplicaState.READY,
        _S.DRAINING: ReplicaState.DRAINING,
        _S.RECYCLING: ReplicaState.DRAINING,
        _S.STOPPED: None,
        _S.FAILED: ReplicaState.FAILED,
    }
)


class IllegalTransition(AssertionError):
    """An event came that the worker's state does not have: a bug of the caller."""


@dataclass(slots=True)
class WorkerLifecycle:
    """One worker's state, its reason, and when it may start again.

    Invariant: `start_at` is set in CREATED and FAILED, and nowhere else.
    """

    state: WorkerState = WorkerState.CREATED
    detail: str = ""
    """Why it is in that state, one sentence for a person; "" when it speaks for itself."""
    start_at: float | None = 0.0
    """Monotonic seconds from which STARTED is due."""
    restarts: int = 0
    failures: int = 0
    """Failures since it last served for STABLE_S."""
    has_started: bool = False
    """Whether its first start is over, one way or the other."""
    _ready_since: float | None = None
    _failed_at: deque[float] = field(default_factory=lambda: deque(maxlen=CRASH_LOOP_FAILURES))

    def handle(self, event: WorkerEvent, now: float, detail: str = "") -> tuple[WorkerEffect, ...]:
        """Take an event; return what to do.

        Raises:
            IllegalTransition: the state does not have this event; nothing changed.
        """
        found = TRANSITIONS.get((self.state, event))
        if found is None:
            raise IllegalTransition(f"a worker that is {self.state.value} cannot be {event.value}")
        before, (self.state, effects) = self.state, found
        self.detail = detail
        self.start_at = None
        if self.state is WorkerState.FAILED:
            self._count_failure(detail, now)
        elif self.state is WorkerState.LOADING and before is WorkerState.FAILED:
            self.restarts += 1
        self.has_started |= self.state in (WorkerState.READY, WorkerState.FAILED)
        if self.state is not WorkerState.RECYCLING:
            self._ready_since = now if self.state is WorkerState.READY else None
        return effects

    @property
    def replica_state(self) -> ReplicaState | None:
        """What the outside is told; None: there is no replica."""
        return _REPLICA_STATES[self.state]

    @property
    def takes_attempts(self) -> bool:
        """Whether new attempts may go to it."""
        return self.state is WorkerState.READY

    @property
    def is_over(self) -> bool:
        """Whether it will never do anything again."""
        return self.state is WorkerState.STOPPED

    @property
    def is_crash_loop(self) -> bool:
        """Whether it keeps failing: without having served in between, or too often within the window."""
        if self.failures >= CRASH_LOOP_FAILURES:
            return True
        failed = self._failed_at
        return len(failed) == CRASH_LOOP_FAILURES and failed[-1] - failed[0] <= CRASH_LOOP_WINDOW_S

    def _count_failure(self, detail: str, now: float) -> None:
        if self._ready_since is not None and now - self._ready_since >= STABLE_S:
            self.failures = 0
        self.failures += 1
        self._failed_at.append(now)
        if self.is_crash_loop:
            delay_s = CRASH_LOOP_RETRY_S
            times = max(self.failures, CRASH_LOOP_FAILURES)
            self.detail = f"CRASH_LOOP: failed {times} times, tried again each minute: {detail}"
        else:
            delay_s = min(BACKOFF_FIRST_S * 2 ** (self.failures - 1), BACKOFF_MAX_S)
        self.start_at = now + delay_s
