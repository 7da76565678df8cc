"""Breakages of the queue in the Scheduler."""

from __future__ import annotations

from typing import Any

from headrace.control.attempts import AttemptLedger
from headrace.control.wait_queue import Waiting, WaitQueue
from sim.breakage import breaks

_take_ended = AttemptLedger.take_ended


@breaks(AttemptLedger, "take_ended", "liveness", "references", "released_early", "deadline", "orphan", "released_once")
def the_end_of_one_that_waits_is_not_told(self: AttemptLedger) -> list[Any]:
    _take_ended(self)
    return []


@breaks(WaitQueue, "remove", "crash", "references", "released_once", "liveness", "assertion")
def one_that_has_ended_waits_on(self: WaitQueue, token: int) -> Waiting:
    return self._entries[token]
