"""The Router's stream to the Scheduler, as `headrace.router.links` keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.scheduler import CancelAttempt, Credit, Dispatch, Ended, ToRouter, in_frame_order
from sim.timeline import Pipe

if TYPE_CHECKING:
    from sim.router import Session
    from sim.world import World


class Link:
    """The Router's stream to the Scheduler: one session after the other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.number = 0
        self.is_up = False
        self._up: Pipe | None = None
        self._down: Pipe | None = None
        self.running: dict[int, Session] = {}
        """Attempts that have not ended."""

    def open(self) -> None:
        world, delay_ms = self.world, self.world.scenario.delay_ms
        self.number += 1
        number = self.number
        self._up = Pipe(world.time, delay_ms, lambda frame: world.scheduler.take(number, frame))
        self._down = Pipe(world.time, delay_ms, self._take)
        world.scheduler.open_session(number, self._down)
        self.is_up = True

    def lose(self, *, is_back: bool = False) -> None:
        """The stream is broken: this side knows at once, the other one a little later.

        With `is_back` there is another one before anybody asks, as if there were a second Scheduler.
        """
        if not self.is_up:
            return
        assert self._up is not None
        assert self._down is not None
        self.is_up = False
        lost, self.running = self.running, {}
        self._up.cut()
        self._down.on_lost = lambda message: self._come_late(lost, message)
        self._down.cut()
        self.world.time.later(self.world.time.rng.randrange(200), self.world.scheduler.close_session, self.number)
        if is_back:
            self.open()
        for token, session in lost.items():
            session.on_lost(token)

    def send(self, message: Dispatch | Credit | CancelAttempt) -> None:
        if self.is_up and self._up is not None:
            self._up.send(message)

    def _take(self, frame: list[ToRouter]) -> None:
        for message in in_frame_order(frame):
            session = self.running.get(message.token)
            if session is None:
                continue
            if isinstance(message, Ended):
                del self.running[message.token]
            session.take_message(message)
            self.world.repeat("answer", session.take_again, message, self.world.time.rng.random() < 0.5)

    def _come_late(self, lost: dict[int, Session], message: ToRouter) -> None:
        """What the old stream still held reaches its session after all: it must not count any more."""
        session = lost.get(message.token)
        if session is not None:
            self.world.repeat("lost_answer", session.take_again, message, self.world.time.rng.random() < 0.5)
