"""The pause before a retry, push-back, and the budget of all attempts beyond the first: the real classes, and laws."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

from headrace.control.backoff import CAP_S, Retries
from headrace.control.retry_budget import WINDOW_S, RetryBudget
from headrace.control.steps import AttemptEnd
from sim.violation import Violation

if TYPE_CHECKING:
    from sim.router import Session
    from sim.world import World

LATE_S = 0.002
"""The virtual clock counts whole milliseconds."""
SHARE = 0.5


class Pauses:
    """What a Router's requests share, and what was seen of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.policy = Retries(RetryBudget(SHARE, world.scenario.retry_floor), Random(world.scenario.seed).random)
        self._ends: dict[Session, tuple[float, AttemptEnd]] = {}
        """How the newest attempt ended, and when."""
        self._extra: list[float] = []
        self._successes = 0

    def push_back_s(self) -> float | None:
        """What a loss asks for, now and then."""
        push_back_ms = self.world.scenario.push_back_ms
        return push_back_ms / 1_000 if push_back_ms and self.world.time.rng.random() < 0.5 else None

    def on_ended(self, session: Session, end: AttemptEnd) -> None:
        """An attempt that counts has ended."""
        self._ends[session] = self.world.time.now, end

    def on_over(self, session: Session) -> None:
        """A request is over."""
        record = session.machine.record
        if record.finish is not None and record.finish.is_ok and record.attempts == 1:
            self._successes += 1
            self.policy.budget.succeeded(self.world.time.now)

    def may_start(self, session: Session) -> bool:
        """Whether there is room for another attempt; taken."""
        machine, now = session.machine, self.world.time.now
        if session not in self._ends:
            return True
        ended_at, end = self._ends[session]
        waited_s = now - ended_at
        self.world.counts["retry_paused"] += waited_s > 0 and not end.is_free
        if end.push_back_s is not None and not machine.record.output_tokens:
            self.world.counts["push_back_obeyed"] += 1
            self._need(waited_s >= end.push_back_s - 1e-9, "push_back", f"after {waited_s} s, not {end.push_back_s}")
        if not machine.is_charged:
            return True
        if not self.policy.budget.take(now):
            self.world.counts["refused_budget"] += 1
            return False
        self._extra.append(now)
        lately = sum(1 for at in self._extra if at > now - WINDOW_S)
        allowed = self.world.scenario.retry_floor + SHARE * self._successes
        self._need(lately <= allowed + 1e-9, "budget", f"{lately} extra attempts, {allowed} allowed")
        return True

    def await_retry(self, session: Session) -> None:
        """Look again when the time has come."""
        retry_at = session.machine.retry_at
        if retry_at is not None:
            self.world.time.later(max(1, math.ceil((retry_at - self.world.time.now) * 1_000)), session.look)

    def check(self) -> None:
        """After every step."""
        now = self.world.time.now
        for track in self.world.laws.open:
            session, machine = track.session, track.session.machine
            if machine.retry_at is None:
                continue
            self._need(machine.record.finish is None, "pause", "decided, and it still waits for another attempt")
            self._need(not machine._is_running, "pause", "it runs, and waits for another attempt")
            push_back_ms = self.world.scenario.push_back_ms
            self._need(machine.retry_at <= now + max(CAP_S, push_back_ms / 1_000), "pause", "a pause without end")
            is_read = session.reader is not None and machine.writing_since is None
            self._need(not is_read or now <= machine.retry_at + LATE_S, "pause", "its time came and nothing happened")

    def _need(self, holds: bool, law: str, what: str) -> None:
        if not holds:
            raise Violation(law, what)
