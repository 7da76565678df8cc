"""The production's classes, broken on purpose: each breakage has to be noticed by an aim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.breakage import Mutation

from headrace.control.attempts import AttemptLedger
from headrace.control.load_view import LoadView
from headrace.control.request import RequestMachine
from headrace.control.retry_budget import RetryBudget
from headrace.control.router_admission import RouterAdmission
from headrace.control.wait_forecast import Flow
from headrace.control.wait_queue import Waiting, WaitQueue
from headrace.control.worker_queue import WorkerQueue

BREAKAGES: list[tuple[Mutation, tuple[str, ...]]] = []
"""With the names of the scenarios in which it is looked for."""

_put, _end = WaitQueue.put, LoadView.end


def breaks(
    *places: tuple[type, str], aim: str, scenarios: tuple[str, ...]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as what attributes become, and the aim, by the beginning of its name, that is then missed."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        changes = tuple((owner, name, function) for owner, name in places)
        BREAKAGES.append((Mutation(function.__name__, changes, frozenset({aim})), scenarios))
        return function

    return register


@breaks((WaitQueue, "put"), aim="Jain's index of all", scenarios=("1.5 by each, 15 by one",))
def tenants_take_no_turns(self: WaitQueue, entry: Waiting) -> None:
    entry.tenant = "all"
    _put(self, entry)


@breaks(
    (WorkerQueue, "check_deadline"), (AttemptLedger, "_make_room"), (AttemptLedger, "_expire"),
    (AttemptLedger, "_check_time"), (RequestMachine, "tick"),
    aim="p99 TTFT, s", scenarios=("3x",),
)  # fmt: skip
def nobody_is_refused(*_: Any, **__: Any) -> list[int]:
    return []


@breaks((Flow, "rate"), aim="more than 0.5 s in vain", scenarios=("3x",))
def what_will_come_first_is_not_foreseen(self: Flow, now: float) -> float:
    return 0.0


@breaks((RetryBudget, "balance"), aim="attempts per request", scenarios=("full outage",))
def retries_have_no_budget(self: RetryBudget, now: float) -> float:
    return 100.0


@breaks((LoadView, "half_life_s"), aim="p99 TTFT with reports", scenarios=("reports 5 s old",))
def the_age_of_reports_is_ignored(self: LoadView, habits: Any) -> float:
    return 1e9


@breaks((LoadView, "end"), aim="counted in flight", scenarios=("0.8x",))
def an_end_in_a_hundred_is_not_counted(self: LoadView, token: int, now: float, *, is_measured: bool = True) -> bool:
    return token % 100 == 0 or _end(self, token, now, is_measured=is_measured)


@breaks((RouterAdmission, "release"), aim="nothing lost", scenarios=("0.8x",))
def what_a_request_holds_is_not_given_back(self: RouterAdmission, demand: Any) -> None:
    return
