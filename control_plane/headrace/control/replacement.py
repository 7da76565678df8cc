"""Keeps the worker of an old revision until the new one can serve: make before break.

When an alias moves, the revision that it leaves is no longer named. Its worker stays while every alias that left it
still exists and a revision that one of them names now has no READY replica anywhere, but not for ever. So a revision
that does not load takes nothing away: whoever names the old one is served, and an alias that moves back finds it warm.
One that was revoked does not stay.

Sans-io.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.control.snapshot import RoutingSnapshot


@dataclass(slots=True)
class _Leaving:
    """A revision that aliases have left."""

    since: float
    aliases: set[str] = field(default_factory=set)


class Replacements:
    """What aliases named before.

    Args:
        wait_s: how long an old revision waits for its successors, seconds.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._targets: dict[str, frozenset[str]] = {}
        self._leaving: dict[str, _Leaving] = {}

    def apply(self, snapshot: RoutingSnapshot, now: float) -> None:
        """Take in a newer snapshot."""
        targets = {alias.name: frozenset(t.revision for t in alias.targets) for alias in snapshot.aliases}
        named = frozenset[str]().union(*targets.values())
        for alias, before in self._targets.items():
            for revision in before - named:
                self._leaving.setdefault(revision, _Leaving(now)).aliases.add(alias)
        self._targets = targets
        if not self._leaving:
            return
        for revision, leaving in tuple(self._leaving.items()):
            successors = [targets[alias] for alias in leaving.aliases if alias in targets]
            is_replaced = all(snapshot.ready_of.get(one) for wanted in successors for one in wanted)
            if revision in named or is_replaced or revision in snapshot.revocation_of:
                del self._leaving[revision]

    def kept(self, now: float) -> frozenset[str]:
        """Revisions that stay although no alias names them."""
        return frozenset(name for name, leaving in self._leaving.items() if now - leaving.since < self._wait_s)
