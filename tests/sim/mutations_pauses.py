"""Breakages of what retries run on: the rules, the pause, the budget."""

from __future__ import annotations

from typing import Any

from headrace.control.backoff import Retries
from headrace.control.request import RequestMachine
from headrace.control.retry_budget import RetryBudget
from sim.breakage import breaks

_next_at = Retries.next_at
_ask = RequestMachine._ask


@breaks(Retries, "next_at", "push_back")
def push_back_is_not_obeyed(self: Retries, record: Any, replica: str, end: Any, attempts_max: int, now: float) -> Any:
    return None if _next_at(self, record, replica, end, attempts_max, now) is None else now


@breaks(RetryBudget, "allows", "budget")
def the_budget_is_never_empty(self: RetryBudget, now: float) -> bool:
    return True


@breaks(RequestMachine, "_ask", "pause")
def an_end_leaves_the_pause_as_it_is(self: RequestMachine, now: float) -> bool:
    retry_at = self.retry_at
    must_stop = _ask(self, now)
    self.retry_at = retry_at
    return must_stop
