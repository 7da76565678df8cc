"""How many attempts beyond the first the fleet can afford: a token bucket that successes fill.

    extra attempts of a window <= floor + share * successes of the window

An extra attempt is a retry, a hedge or a continuation. Where things go well there is always room for one; where
nothing succeeds any more, only the floor is left, and a retry storm cannot keep an overloaded fleet down.

Each Scheduler counts both numbers for all Routers and reports them (LoadReport). A Router adds up the newest reports
and what it has spent itself since they were made; of what is left it takes its part, one Router of so many. Before any
report it goes by its own counts. Reports are late, so that all Routers together may overshoot by at most one attempt
each between two reports.

Sans-io.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.control.sliding_count import SlidingCount

WINDOW_S = 10.0
"""What successes and extra attempts are counted over; Schedulers report the same window."""
SHARE = 0.1
FLOOR = 10
LAG_S = 0.3
"""A report may not yet hold what was sent so long before it arrived."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one Scheduler says, of all Routers."""

    successes: int
    """First attempts that ended well in the last WINDOW_S."""
    extra_attempts: int
    routers: int
    """Routers that are attached to it."""
    at: float
    """When it arrived, monotonic seconds."""


class RetryBudget:
    """One Router's view of the fleet's budget; see the module.

    Args:
        share: extra attempts for each success; 0.1 is ten per cent.
        floor: extra attempts in a window in which nothing has succeeded.
        window_s: the window, seconds.
    """

    def __init__(self, share: float = SHARE, floor: int = FLOOR, window_s: float = WINDOW_S) -> None:
        self.share = share
        self.floor = floor
        self.window_s = window_s
        self.spent = 0
        """Extra attempts that this Router has made."""
        self.refused = 0
        """Those that it did not, for want of budget."""
        self._successes = SlidingCount(window_s)
        self._extra = SlidingCount(window_s)
        self._recent: deque[float] = deque()
        """When this Router spent, as far as reports may not hold it yet."""
        self._reports: dict[str, Report] = {}

    def succeeded(self, now: float) -> None:
        """A first attempt of this Router ended well."""
        self._successes.add(now)

    def report(self, scheduler: str, report: Report) -> None:
        """A Scheduler has reported; what it said before no longer counts."""
        self._reports[scheduler] = report

    def balance(self, now: float) -> float:
        """Extra attempts that this Router may make now; below 1: none."""
        reports = self._live_reports(now)
        own_extra, own_successes = self._extra.total(now), self._successes.total(now)
        if not reports:
            return self.floor + self.share * own_successes - own_extra
        oldest = min(report.at for report in reports)
        while self._recent and self._recent[0] <= oldest - LAG_S:
            self._recent.popleft()
        unreported = len(self._recent)
        successes = max(own_successes, sum(report.successes for report in reports))
        told = sum(report.extra_attempts for report in reports)
        room = self.floor + self.share * successes - max(told, own_extra - unreported)
        routers = max(1, *(report.routers for report in reports))
        mine = max(min(room, 1.0), room / routers)  # a part of one attempt is no use to anybody
        return min(mine - unreported, self.floor + self.share * successes - own_extra)

    def allows(self, now: float) -> bool:
        """Whether there is room for an extra attempt; takes nothing."""
        return self.balance(now) >= 1

    def take(self, now: float) -> bool:
        """Take room for an extra attempt that is made now; False, and counted as refused: there is none."""
        if not self.allows(now):
            self.refused += 1
            return False
        self.spent += 1
        self._extra.add(now)
        if self._reports:
            self._recent.append(now)
        return True

    def _live_reports(self, now: float) -> list[Report]:
        """Those young enough to say something of this window."""
        for scheduler, report in list(self._reports.items()):
            if now - report.at > self.window_s:
                del self._reports[scheduler]
        if not self._reports:
            self._recent.clear()
        return list(self._reports.values())
