"""What serves an alias while nobody serves what it names now: the targets that were served before it moved.

An alias that is moved to a revision which is still loading, or which does not load, would otherwise take the model away
from its clients. So the snapshot says what was good last. Schedulers keep or start its workers while they have places;
Routers use it where nobody serves any target. What serves is in `accepted`, as always.

Each snapshot's answer follows from that snapshot and the one published before, so every Router and every Scheduler has
the same one, also one that has just started.

Sans-io.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headrace.control.resources import Alias, AliasTarget
from headrace.control.snapshot import RoutingSnapshot


def with_last_good(snapshot: RoutingSnapshot, before: RoutingSnapshot | None) -> RoutingSnapshot:
    """`snapshot`, its aliases with what was good last.

    Args:
        snapshot: compiled, not published.
        before: the published one; None: there is none.
    """
    if before is None:
        return snapshot
    aliases = tuple(_told(alias, snapshot, before) for alias in snapshot.aliases)
    return snapshot if aliases == snapshot.aliases else replace(snapshot, aliases=aliases)


def _told(alias: Alias, snapshot: RoutingSnapshot, before: RoutingSnapshot) -> Alias:
    past = before.alias_by_name.get(alias.name)
    if past is None or all(snapshot.ready_of[target.revision] for target in alias.targets):
        return alias
    current = {target.revision for target in alias.targets}
    left = [t for t in past.targets if t.revision not in current and before.ready_of[t.revision]]
    last_good = tuple(_usable(left, snapshot)) or tuple(_usable(past.last_good, snapshot, current))
    return replace(alias, last_good=last_good) if last_good else alias


def _usable(
    targets: Iterable[AliasTarget], snapshot: RoutingSnapshot, current: Iterable[str] = ()
) -> Iterable[AliasTarget]:
    for target in targets:
        name = target.revision
        if name in snapshot.revision_by_name and name not in snapshot.revocation_of and name not in current:
            yield target
