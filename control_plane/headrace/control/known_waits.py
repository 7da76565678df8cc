"""Refusals that a Router need not ask for again: a replica has just said that such a request would wait too long.

A wait shrinks no faster than time passes. So a replica that foresees 3.4 s for a request that may wait 3 s refuses, for
0.4 s, everything that would stand behind it and may wait no longer: what is of the same tenant, of no higher priority,
no smaller, with no earlier deadline. The same holds where it is the deadline that the wait would miss, for what has no
later one than what is foreseen. Where every replica has said so, the Router refuses at once, and a caller that
sends again and again costs neither a Scheduler's time nor a way there and back.

CRITICAL is left out: such a one is refused in a Router only by what a replica itself has told of it. Sans-io; instants
are monotonic seconds; O(replicas) where all have refused, else O(1).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from headrace.control.priority import Priority

HOLD_MAX_S = 0.5
"""For longer nothing is believed: others leave the queue, too."""
KEYS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """What matters of a request."""

    revision: str
    tenant: str
    priority: Priority
    tokens: int
    """Prompt and output, estimated."""
    deadline_at: float
    queue_s: float
    """How long it may wait for a slot; infinite: until its deadline."""


@dataclass(frozen=True, slots=True)
class _Refused:
    tokens: int
    deadline_at: float
    until: float
    retry_at: float
    slot_at: float
    """When it would have had its slot; -infinity: not told."""
    done_at: float
    """When what its deadline is for would have been done; -infinity: not told."""

    def covers(self, asked: Asked, now: float) -> bool:
        """Whether `asked` would stand behind the one that was refused."""
        is_behind = asked.tokens >= self.tokens and asked.deadline_at >= self.deadline_at
        is_late = now + asked.queue_s < self.slot_at or asked.deadline_at < self.done_at
        return now < self.until and is_behind and is_late


class KnownWaits:
    """Of one Router."""

    def __init__(self) -> None:
        self.refused = 0
        """Requests that were refused by this."""
        self._refused: OrderedDict[tuple[str, str, Priority], dict[str, _Refused]] = OrderedDict()
        """By replica."""

    def __len__(self) -> int:
        return len(self._refused)

    def learn(
        self,
        asked: Asked,
        replica: str,
        *,
        expected_s: float,
        limit_s: float,
        retry_after_s: float,
        now: float,
        is_deadline: bool = False,
    ) -> None:
        """A replica has refused on arrival.

        Args:
            asked: the request.
            replica: which.
            expected_s: the wait for a slot that it foresaw; with `is_deadline`, to what would not be done in time.
            limit_s: the longest wait, or the time to the deadline.
            retry_after_s: when it expects to have room.
            now: monotonic seconds.
            is_deadline: it refused for the deadline.
        """
        if asked.priority is Priority.CRITICAL or expected_s <= limit_s:
            return
        key = asked.revision, asked.tenant, asked.priority
        by_replica = self._refused.setdefault(key, {})
        self._refused.move_to_end(key)
        if len(self._refused) > KEYS_MAX:
            self._refused.popitem(last=False)
        known = by_replica.get(replica)
        if known is not None and known.until > now and known.tokens < asked.tokens:
            return  # it says more
        until = now + min(expected_s - limit_s, HOLD_MAX_S)
        by_replica[replica] = _Refused(
            asked.tokens,
            asked.deadline_at,
            until,
            now + retry_after_s,
            slot_at=-math.inf if is_deadline else now + expected_s,
            done_at=now + expected_s if is_deadline else -math.inf,
        )

    def refuses(self, asked: Asked, replicas: Collection[str], now: float) -> float | None:
        """Whether every one of the replicas would refuse it.

        Returns:
            Seconds until the first of them expects room; None: it has to be asked for.
        """
        if not self._refused or not replicas or asked.priority is Priority.CRITICAL:
            return None
        soonest = None
        for priority in Priority:
            if priority < asked.priority or priority is Priority.CRITICAL:
                continue
            by_replica = self._refused.get((asked.revision, asked.tenant, priority))
            if by_replica is None or len(by_replica) < len(replicas):
                continue
            found = [by_replica.get(name) for name in replicas]
            if all(one is not None and one.covers(asked, now) for one in found):
                soonest = min(one.retry_at for one in found if one is not None)
                break
        if soonest is None:
            return None
        self.refused += 1
        return max(0.0, soonest - now)
