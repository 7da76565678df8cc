"""What became of the calls of one run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from headrace.control.lifecycle import RequestRecord
from headrace.control.priority import Priority
from sim_load.traffic import TENANTS, Call

TTFT_SLO_S = 5.0
AT_ONCE_S = 0.25
"""A request that is refused by then is refused at once; later it has waited in vain."""
LONG_S = 0.5
"""A wait in vain that is long."""


class Tally:
    """See the module. Rates are those of what ended in the window."""

    def __init__(
        self, window: tuple[float, float], trouble: tuple[float, float] | None = None, slo_s: float = TTFT_SLO_S
    ) -> None:
        self.window = window
        self.slo_s = slo_s
        self.trouble = trouble
        """While something is broken."""
        self.requests = self.attempts = 0
        """Of what came in while something was broken, or else ever: what Routers took in, and sent to Schedulers."""
        self.offered = 0
        self.resends = 0
        self.refusals: Counter[str] = Counter()
        """Calls refused at once, by where and why."""
        self.vain: Counter[str] = Counter()
        """Calls that waited and were then refused, by why."""
        self.long_vain = 0
        """Of them, those that came in the window and waited long."""
        self.accepted = 0
        """Calls whose answer began."""
        self.failed = 0
        """Of them, those that did not get a whole answer in time."""
        self.ends: Counter[str] = Counter()
        self.good = 0
        self.good_tokens = 0
        """Of answers."""
        self.good_work: dict[str, int] = dict.fromkeys(TENANTS, 0)
        """Tokens of prompts and answers, by tenant."""
        self.asked: Counter[str] = Counter()
        """Calls, by tenant, in the window."""
        self.good_calls: Counter[str] = Counter()
        self.ttfts: list[float] = []
        """Of STANDARD and above: nobody waits for the first token of what is below."""
        self.longest_wait_s = 0.0
        self.open: set[int] = set()
        """Calls that have not heard their end; for the laws."""
        self.broken: list[str] = []
        self._unserved: dict[tuple[str, Priority], float] = {}
        """Since when a tenant asks at a priority and gets nothing."""
        self.starved_s: Counter[Priority] = Counter()
        """The longest such time, by priority, over all tenants."""

    def sent(self, call: Call, now: float, *, is_again: bool) -> None:
        """A call goes out."""
        if is_again:
            self.resends += 1
            return
        self.offered += 1
        self.open.add(call.number)
        self.asked[call.tenant] += self._counts(now)
        self._unserved.setdefault((call.tenant, call.priority), now)

    def began(self, call: Call, ttft_s: float, now: float) -> None:
        """An answer begins."""
        self.accepted += 1
        if now >= self.window[0] and call.priority >= Priority.STANDARD:
            self.ttfts.append(ttft_s)
        self.longest_wait_s = max(self.longest_wait_s, ttft_s)
        self._served(call, now)

    def refused(self, call: Call, where: str) -> None:
        """A call is refused at once."""
        self._close(call)
        self.refusals[where] += 1

    def ended(self, call: Call, received_at: float, record: RequestRecord, now: float, *, attempts: int) -> None:
        """A call that was not refused at a Router's door is over."""
        self._close(call)
        self.tried(received_at, attempts)
        reason = record.reason.name if record.reason is not None else ""
        if record.first_output_at is None:
            (self.refusals if now - received_at <= AT_ONCE_S else self.vain)[reason] += 1
            self.long_vain += now - received_at > LONG_S and self._counts(call.at)
            return
        assert record.finish is not None
        self.ends[reason or record.finish.value] += 1
        if not record.finish.is_ok or now > received_at + call.deadline_s:
            self.failed += 1
            return
        is_soon = record.first_output_at - received_at <= self.slo_s or call.priority < Priority.STANDARD
        if is_soon and self._counts(now):
            self.good += 1
            self.good_calls[call.tenant] += 1
            self.good_tokens += call.output
            self.good_work[call.tenant] += call.work

    def tried(self, received_at: float, attempts: int) -> None:
        """A request is over that its caller sends again."""
        if self.trouble is None or self.trouble[0] <= received_at < self.trouble[1]:
            self.requests += 1
            self.attempts += attempts

    def finish(self) -> None:
        """No calls come any more: who asked and got nothing until now has starved so long."""
        until = self.window[1]
        for key, since in self._unserved.items():
            self._starve(key[1], until - since)
        self._unserved.clear()

    def _served(self, call: Call, now: float) -> None:
        since = self._unserved.pop((call.tenant, call.priority), None)
        if since is not None:
            self._starve(call.priority, min(now, self.window[1]) - since)

    def _starve(self, priority: Priority, seconds: float) -> None:
        self.starved_s[priority] = max(self.starved_s[priority], seconds)

    def _counts(self, now: float) -> bool:
        return self.window[0] <= now < self.window[1]

    def _close(self, call: Call) -> None:
        if call.number in self.open:
            self.open.discard(call.number)
        else:
            self.broken.append(f"call {call.number} ended twice")


def jain(shares: Iterable[float]) -> float:
    """Jain's index: 1 where all are equal, 1/n where one has all."""
    found = list(shares)
    squares = sum(x * x for x in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 where there is none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
