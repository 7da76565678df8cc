"""What the engines say of their prefix caches: tokens stored and removed, for metrics and for the Routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb


class _Told(NamedTuple):
    """Since the start of one engine."""

    stored: int = 0
    removed: int = 0
    lost: int = 0


class KvCounts:
    """Of all engines of a Scheduler. Totals go on over restarts of engines, as counters have to."""

    def __init__(self) -> None:
        self.stored: Counter[str] = Counter()
        """Tokens, by revision."""
        self.removed: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        """Messages of the engines about it that did not come."""
        self._told: dict[str, _Told] = {}

    def take(self, replica: str, revision: str, stats: Mapping[str, Any]) -> None:
        """An engine's newest `stats`; those that do not say anything of it change nothing."""
        if stats.get("kv_stored", -1) < 0:
            return
        now = _Told(*(stats.get(name, 0) for name in ("kv_stored", "kv_removed", "kv_events_lost")))
        before = self._told.get(replica, _Told())
        self._told[replica] = now
        for total, was, value in zip((self.stored, self.removed, self.lost), before, now, strict=True):
            total[revision] += max(0, value - was)

    def tell(self, load: pb.ReplicaLoad) -> None:
        """Write what is known of a replica into its load."""
        told = self._told.get(load.replica)
        if told is not None:
            load.kv_tokens_stored, load.kv_tokens_removed = told.stored, told.removed

    def forget(self, replica: str) -> None:
        """Its engine is gone; the next one counts from 0."""
        self._told.pop(replica, None)
