"""Faults of an etcd cluster of three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from faults.examine import HEALED, Breaking, Proof
from faults.rig import Rig
from support.etcd import eventually

AWAY_S = 10.0


async def leader_killed(rig: Rig) -> AsyncIterator[Proof]:
    """The member that leads is killed; it comes back once everyone has converged without it."""
    before = await rig.etcd.leader()
    await rig.etcd.processes[before].kill()
    await eventually(lambda: _leads_other(rig, before), 20, "another member leads")
    yield f"member {before} led and was killed, member {await rig.etcd.leader()} leads", True
    yield HEALED
    await rig.etcd.processes[before].start()


async def member_partitioned(rig: Rig) -> AsyncIterator[Proof]:
    """A member that services are connected to neither hears the others nor is heard by them."""
    index = await rig.etcd.leader()
    await rig.etcd.cut_off_member(index)
    await asyncio.sleep(AWAY_S)
    status = await rig.etcd.status(index)
    others = await rig.etcd.leader()
    yield f"member {index} led, and knows no leader now", status.leader == 0
    yield f"member {others} leads the others", others not in (-1, index)
    rig.etcd.heal()
    yield HEALED


async def majority_lost(rig: Rig) -> AsyncIterator[Proof]:
    """Two of three members are killed, and come back. The third tells its watchers after three elections (6 s)."""
    gone = rig.etcd.processes[:2]
    for process in gone:
        await process.kill()
    await asyncio.sleep(AWAY_S + 6.0)
    yield "no member leads", await rig.etcd.leader() == -1
    age_s = min(rig.ages.values(), default=0.0)
    yield f"the Router's snapshot was {age_s:.1f} s old", age_s > AWAY_S / 2
    for process in gone:
        await process.start(wait_ready=False)
    yield HEALED


async def _leads_other(rig: Rig, before: int) -> bool:
    return await rig.etcd.leader() not in (-1, before)


CLUSTER: dict[str, Breaking] = {
    "cluster: leading member killed": leader_killed,
    "cluster: leading member partitioned": member_partitioned,
    "cluster: majority lost": majority_lost,
}
