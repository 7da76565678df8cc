"""Callers: each sends its call once, or, if naive, again at once when it fails, whatever it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.control.errors import Failure
from headrace.control.tenants import Tenant
from sim_load.request import Request
from sim_load.tally import Tally
from sim_load.traffic import Call

if TYPE_CHECKING:
    from sim_load.world import World

CALLER_DELAY_S = 0.002
NAIVE_RESENDS = 5


class Caller:
    """Of one call."""

    def __init__(self, world: World, call: Call, tenant: Tenant, resends: int, tally: Tally) -> None:
        self.call = call
        self.sends = 0
        self._world = world
        self._tenant = tenant
        self._resends = resends
        self._tally = tally

    def send(self) -> None:
        """To a Router; each time to the next one."""
        world = self._world
        router = world.routers[(self.call.router + self.sends) % len(world.routers)]
        self.sends += 1
        self._tally.sent(self.call, world.clock.now, is_again=self.sends > 1)
        world.clock.after(CALLER_DELAY_S, router.ask, self.call, self._tenant, self)

    def refused(self, request: Request, failure: Failure) -> None:
        """At the door."""
        if not self._again():
            self._tally.refused(self.call, failure.metadata.get("stage", failure.reason.name))

    def first_token(self, request: Request) -> None:
        """The answer begins."""
        now = self._world.clock.now
        self._tally.began(self.call, now - request.received_at, now)

    def ended(self, request: Request) -> None:
        """The request is over."""
        assert request.machine is not None
        record, now = request.machine.record, self._world.clock.now
        if record.first_output_at is None and self._again():
            self._tally.tried(request.received_at, record.attempts)
            return
        self._tally.ended(self.call, request.received_at, record, now, attempts=record.attempts)

    def _again(self) -> bool:
        if self.sends > self._resends:
            return False
        self._world.clock.after(2 * CALLER_DELAY_S, self.send)
        return True
