"""Which of several Routers a call goes to, and whether it is sent at all. Sans-io: a Router is its number.

    turn = targets.turn()  one for each request
    turn.next()            before a call that may go anywhere: the Router in turn, a well one if there is any
    turn.send()            before a call that starts something: whether to send it; counts it
    turn.answered() ...    what became of it

A Router that was lost, or that stops, is passed over for DOWN_S while there are others; then a request tries it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from headrace.control.client_throttle import ClientThrottle, ThrottlePolicy, Ticket

DOWN_S = 5.0
KEYLESS_S = 10.0
"""How long no idempotency keys are made after the fleet could not keep one."""


class _Target:
    def __init__(self, throttle: ThrottlePolicy | None) -> None:
        self.throttle = ClientThrottle(throttle) if throttle is not None else None
        self.down_until = 0.0


class Targets:
    """What one client knows of its Routers. May be used from several threads.

    Args:
        count: how many there are.
        throttle: None holds nothing back.
        clock: monotonic seconds.
        draw: evenly from 0 to 1.
    """

    def __init__(
        self, count: int, throttle: ThrottlePolicy | None, clock: Callable[[], float], draw: Callable[[], float]
    ) -> None:
        self.clock = clock
        self.draw = draw
        self.states = [_Target(throttle) for _ in range(count)]
        self.keyless_until = 0.0
        self.lock = threading.Lock()
        # Chance, so that many clients that start together do not all begin at the first.
        self._starts = itertools.count(int(draw() * count))

    def __len__(self) -> int:
        return len(self.states)

    def turn(self) -> Turn:
        """Begin a request: they start at one Router after the other."""
        return Turn(self, next(self._starts))


class Turn:
    """The calls of one request."""

    def __init__(self, targets: Targets, start: int) -> None:
        self._targets = targets
        self._position = start
        self._ticket: Ticket | None = None
        self.index = -1
        """The Router of the latest call; -1 before the first."""

    @property
    def count(self) -> int:
        """How many Routers there are."""
        return len(self._targets)

    @property
    def may_make_keys(self) -> bool:
        """Whether the fleet can keep idempotency keys, as far as is known."""
        return self._targets.clock() >= self._targets.keyless_until

    def no_keys(self) -> None:
        """It could not."""
        self._targets.keyless_until = self._targets.clock() + KEYLESS_S

    def next(self) -> int:
        """Move on to another Router, if there is one; returns its number."""
        states, now = self._targets.states, self._targets.clock()
        order = [(self._position + step) % len(states) for step in range(len(states))]
        self.index = next((index for index in order if now >= states[index].down_until), order[0])
        self._position = self.index + 1
        return self.index

    def send(self, *, is_retry: bool) -> bool:
        """Whether a call is to be sent; it is counted. A retry always is: it has passed its own budget."""
        throttle = self._state.throttle
        if throttle is None:
            return True
        with self._targets.lock:
            self._ticket = throttle.admit(self._targets.clock(), 1.0 if is_retry else self._targets.draw())
        return self._ticket is not None

    def shed(self) -> None:
        """The call was refused because there were too many."""
        self._state.down_until = 0.0
        ticket, self._ticket = self._ticket, None
        throttle = self._state.throttle
        if throttle is not None and ticket is not None:
            with self._targets.lock:
                throttle.refused(ticket)

    def retry(self) -> bool:
        """Whether another call is within the budget; then it is counted."""
        throttle = self._state.throttle
        if throttle is None:
            return True
        with self._targets.lock:
            return throttle.retry(self._targets.clock())

    def answered(self) -> None:
        """The Router is there."""
        self._state.down_until = 0.0

    def lost(self) -> None:
        """The Router is not there, or stops."""
        self._state.down_until = self._targets.clock() + DOWN_S

    @property
    def _state(self) -> _Target:
        return self._targets.states[self.index]
