"""Hedges, retries and their budget in virtual time: seeded runs of the real machine, with workers that lag and die."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace.control.attempt_log import AttemptCause
from headrace.control.backoff import Retries
from headrace.control.credit import CreditWindow
from headrace.control.deadlines import Budget
from headrace.control.errors import Reason
from headrace.control.hedge import is_due
from headrace.control.holdings import ResourceLedger
from headrace.control.lifecycle import Finish
from headrace.control.request import AttemptEnd, RequestMachine, Step, Terms
from headrace.control.retry_budget import RetryBudget
from support.told import LOST

REPLICAS = 4
TOKENS = 5
CANCELLED = AttemptEnd(Finish.CANCELLED, Reason.CLIENT_CANCELLED)


class Run:
    """A Router, and workers of which one is slow and any may die before its first token."""

    def __init__(self, seed: int, hedge_after_s: float, share: float = 0.1) -> None:
        self.rng = Random(seed)
        self.hedge_after_s = hedge_after_s
        self.ledger = ResourceLedger()
        self.retries = Retries(RetryBudget(share, floor=3), self.rng.random)
        self.now = 0.0
        self.requests: list[Request] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count(1)

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._numbers), call, args))

    def token(self) -> int:
        return next(self._numbers)

    def finish(self, requests: int) -> Run:
        for number in range(requests):
            self.later(number * 0.02, self._arrive)
        while self._heap:
            self.now, _, call, args = heapq.heappop(self._heap)
            call(*args)
        return self

    def _arrive(self) -> None:
        self.requests.append(Request(self))

    @property
    def extra(self) -> int:
        return sum(request.machine.record.attempts - 1 for request in self.requests)

    @property
    def successes(self) -> int:
        return sum(one.machine.record.finish is Finish.STOP and one.is_first for one in self.requests)

    def first_tokens(self) -> list[float]:
        waits = [request.machine.record.time_to_first_token_s() for request in self.requests]
        return sorted(wait for wait in waits if wait is not None)


class Request:
    """What the Router's shell does around a machine; the reader takes all at once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        budget = Budget(run.now, run.now + 30.0)
        self.machine = RequestMachine(budget, CreditWindow(64), Terms(3, 10.0), run.ledger, run.retries)
        self.alive: set[int] = set()
        """Attempts that an engine has."""
        self.told: list[int] = []
        """The attempt of each token that was told."""
        self._versions: dict[int, int] = {}
        self._send(AttemptCause.FIRST)

    @property
    def is_first(self) -> bool:
        return self.machine.current.cause is AttemptCause.FIRST

    def _send(self, cause: AttemptCause) -> None:
        run, machine, token = self.run, self.machine, self.run.token()
        fresh = [number for number in range(REPLICAS) if str(number) not in machine.record.tried]
        replica = run.rng.choice(fresh or range(REPLICAS))
        if cause is AttemptCause.HEDGE:
            machine.hedge(token, str(replica))
        else:
            machine.dispatch(token, str(replica), cause)
            if run.hedge_after_s:
                run.later(run.hedge_after_s + 1e-6, self._hedge, run.now)
        self._versions[token] = machine.version_of(token)
        self.alive.add(token)
        wait_s = run.rng.expovariate(1.0 if replica == 0 and run.rng.random() < 0.2 else 30.0)
        run.later(0.01, self._hear, token, machine.admitted, token, self._versions[token])
        if run.rng.random() < 0.05:
            run.later(wait_s, self._end, token, LOST)
            return
        for number in range(TOKENS):
            run.later(0.01 + wait_s + number * 0.01, self._output, token)
        run.later(0.01 + wait_s + TOKENS * 0.01, self._end, token, AttemptEnd(Finish.STOP, output_tokens=TOKENS))

    def _hedge(self, dispatched_at: float) -> None:
        run = self.run
        if self.machine.may_hedge and is_due(run.hedge_after_s, dispatched_at, run.now) and self._budget():
            self._send(AttemptCause.HEDGE)

    def _budget(self) -> bool:
        return self.run.retries.budget.take(self.run.now)

    def _hear(self, token: int, tell: Callable[..., object], *args: Any) -> None:
        if token in self.alive:
            tell(*args, self.run.now)
            self._look()

    def _output(self, token: int) -> None:
        if token in self.alive and self.machine.output(token, 1, self.run.now):
            self.told.append(token)
        self._look()

    def _end(self, token: int, end: AttemptEnd) -> None:
        if token not in self.alive:
            return
        self.alive.discard(token)
        assert self.machine.ended(token, self._versions[token], end, self.run.now)
        self._look()

    def _look(self) -> None:
        machine, run = self.machine, self.run
        if machine.unstopped:
            assert machine.unstopped in self.alive, "a loser that has ended is to be stopped"
            run.later(run.rng.uniform(0.001, 0.05), self._end, machine.unstopped, CANCELLED)
            machine.unstopped = 0
        was_over = machine.is_over
        while (step := machine.next(run.now)) not in (Step.WAIT, Step.OVER):
            if step is Step.RETRY:
                if self._budget():
                    self._send(AttemptCause.RETRY)
                else:
                    machine.give_up("budget")
                continue
            pending = machine.pending if step is Step.DELTA else 0
            sequence = machine.take(step)
            machine.write(pending, sequence)
        if machine.retry_at is not None:
            run.later(machine.retry_at - run.now + 1e-6, self._look)
        if machine.is_over and not was_over and machine.record.finish is Finish.STOP and self.is_first:
            run.retries.budget.succeeded(run.now)
        assert not (machine.is_over and self.alive), "over, and an engine still works for it"


@pytest.mark.parametrize("seed", range(20))
def test_each_request_is_one_story_and_all_is_free_at_the_end(seed: int) -> None:
    run = Run(seed, hedge_after_s=0.06).finish(150)
    for request in run.requests:
        machine = request.machine
        assert machine.is_over
        assert len(set(request.told)) <= 1, "output of two attempts"
        assert len(request.told) == (TOKENS if machine.record.finish is Finish.STOP else 0)
        assert sum(one.is_delivered for one in machine.attempted) == (machine.record.finish is Finish.STOP)
        assert sum(one.cause is AttemptCause.HEDGE for one in machine.attempted) <= 1
        assert all(one.finish is not None for one in machine.attempted)
        machine.close()
    assert run.ledger.references == 0
    assert run.extra == run.retries.budget.spent
    assert run.extra <= 3 + 0.1 * run.successes


def test_hedges_cut_the_tail_and_cost_what_the_budget_allows() -> None:
    plain, hedged = (Run(7, hedge_after_s=after_s, share=0.2).finish(2_000) for after_s in (0.0, 0.15))
    p99 = [run.first_tokens()[int(0.99 * len(run.first_tokens()))] for run in (plain, hedged)]
    assert p99[1] < 0.5 * p99[0], p99
    causes = [one.cause for request in hedged.requests for one in request.machine.attempted]
    assert causes.count(AttemptCause.HEDGE) > 50
    assert hedged.extra <= 0.2 * hedged.successes + 3 * (1 + hedged.now / 10)
