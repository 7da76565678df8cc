"""The last good targets of each alias: what serves while nobody serves what the alias names now.

An alias that is moved to a revision which is still loading, or which does not load, would otherwise take the model away
from its clients. Schedulers keep the worker of the revision that was left for as long as its successor needs
(`headrace.control.replacement`), and Routers go on using it. What serves is in `accepted`, as always.

Sans-io. It is memory: a Router that has just started knows no last good target, and says that the model loads.
"""

from __future__ import annotations

from headrace.control.resources import AliasTarget
from headrace.control.snapshot import RoutingSnapshot


class StandIns:
    """Fed with each snapshot, in order."""

    def __init__(self) -> None:
        self._last_good: dict[str, tuple[AliasTarget, ...]] = {}

    def apply(self, snapshot: RoutingSnapshot) -> None:
        """Note which targets are served."""
        last_good = {}
        for alias in snapshot.aliases:
            served = tuple(target for target in alias.targets if snapshot.ready_of.get(target.revision))
            if kept := served or self._last_good.get(alias.name, ()):
                last_good[alias.name] = kept
        self._last_good = last_good

    def of(self, alias: str) -> tuple[AliasTarget, ...]:
        """The targets of an alias that were served last."""
        return self._last_good.get(alias, ())
