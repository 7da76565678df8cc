"""Faults of one etcd, and of the way to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import psutil

from faults import members
from faults.examine import HEALED, Breaking, Proof
from faults.proxy import BOTH, Way
from faults.rig import LEASE_TTL_S, Rig
from headrace.adapters.etcd_transport import StoreFull
from headrace.control.errors import Failure

AWAY_S = 8.0
"""How long etcd, or the way to it, is away, seconds: longer than it takes to notice (5 s)."""
FROZEN_S = 2 * LEASE_TTL_S + 1.0
DELAY_S = 0.3
RESETS = 20


async def killed(rig: Rig) -> AsyncIterator[Proof]:
    """etcd is killed, and started again after a while."""
    etcd = rig.etcd.processes[0]
    before = etcd.pid
    await etcd.kill()
    await asyncio.sleep(AWAY_S)
    yield await _noticed(rig)
    await etcd.start()
    yield f"another process, {before} -> {etcd.pid}", before != etcd.pid
    yield HEALED


async def frozen(rig: Rig) -> AsyncIterator[Proof]:
    """etcd stands still for twice as long as the leases live: when it goes on it ends them all together."""
    etcd = rig.etcd.processes[0]
    before = await _epochs(rig)
    etcd.pause()
    await asyncio.sleep(FROZEN_S)
    assert etcd.pid is not None
    yield f"SIGSTOP for {FROZEN_S:.0f} s", psutil.Process(etcd.pid).status() == psutil.STATUS_STOPPED
    yield await _noticed(rig)
    etcd.resume()
    yield HEALED
    after = await _epochs(rig)
    changed = sum(before.get(key) != epoch for key, epoch in after.items())
    yield f"{changed} of {len(after)} leased records were lost and put again", True


async def compacted(rig: Rig) -> AsyncIterator[Proof]:
    """Watchers are cut off, what they would resume from is compacted, and the way is free again."""
    for proxy in rig.proxies():
        proxy.lose()
    await asyncio.sleep(1.0)
    await rig.writer.burst(100)
    revision = await members.compact(rig.store)
    applied = rig.twin.watch.state.revision
    yield f"compacted to {revision}, the watcher is at {applied}", revision > applied
    await asyncio.sleep(AWAY_S)
    _heal(rig)
    yield HEALED
    state = rig.twin.watch.state
    yield f"the watcher listed anew: {state.last_relist}", state.last_relist == "compacted"


def partition(*ways: Way, held: bool) -> Breaking:
    """The network between everyone and etcd lets nothing pass, in one direction or both."""

    async def partitioned(rig: Rig) -> AsyncIterator[Proof]:
        lost = sum(proxy.lost_bytes + proxy.held_chunks for proxy in rig.proxies())
        for proxy in rig.proxies():
            (proxy.hold if held else proxy.lose)(*ways)
        await asyncio.sleep(AWAY_S)
        yield await _noticed(rig)
        stopped = sum(proxy.lost_bytes + proxy.held_chunks for proxy in rig.proxies()) - lost
        yield ("chunks were held" if held else f"{stopped} bytes were lost"), stopped > 0
        _heal(rig)
        yield HEALED

    return partitioned


async def delayed(rig: Rig) -> AsyncIterator[Proof]:
    """Everything to and from etcd takes much longer."""
    for proxy in rig.proxies():
        proxy.delay_s = DELAY_S
    await asyncio.sleep(AWAY_S)
    began = time.monotonic()
    await rig.reader_stores[-1].head()
    took_s = time.monotonic() - began
    yield f"a read took {took_s:.2f} s", took_s > DELAY_S
    _heal(rig)
    yield HEALED


async def reset(rig: Rig) -> AsyncIterator[Proof]:
    """Connections are cut again and again, in the middle of what they carry."""
    cuts = sum(proxy.cuts for proxy in rig.proxies())
    for _ in range(RESETS):
        for proxy in rig.proxies():
            proxy.cut()
        await rig.writer.burst(10)
        await asyncio.sleep(0.3)
    cuts = sum(proxy.cuts for proxy in rig.proxies()) - cuts
    yield f"{cuts} connections were cut", cuts > RESETS
    yield HEALED


async def full(rig: Rig) -> AsyncIterator[Proof]:
    """The space quota is used up; then old revisions are compacted, the file is defragmented, the alarm disarmed."""
    junk = bytes(1024 * 1024)
    refused, written = False, 0
    while not refused and written < 64:
        try:
            await rig.twin_store.put(f"junk/{written}", junk)
            written += 1
        except StoreFull:
            refused = True
    yield f"a write was refused after {written} MiB", refused
    raised = await members.alarms(rig.store)
    yield f"{len(raised)} alarms", len(raised) > 0
    await asyncio.sleep(AWAY_S)
    failed = rig.churn.failed
    yield f"{failed} changes could not be made", failed > 0
    for number in range(written):
        await rig.twin_store.delete(f"junk/{number}")
    await members.compact(rig.store)
    await members.defragment(rig.store)
    await members.disarm(rig.store)
    yield HEALED
    yield "no alarm is left", not await members.alarms(rig.store)


async def wiped(rig: Rig) -> AsyncIterator[Proof]:
    """etcd comes back empty; after a while the models are registered again."""
    etcd = rig.etcd.processes[0]
    before = await rig.store.head()
    last = {reader.versions.name: reader.follower.current for reader in rig.readers}
    await rig.churn.stop()
    await rig.writer.stop()
    rig.is_between_stores = True
    await etcd.kill()
    etcd.wipe()
    rig.writer.promised.clear()  # of the old store
    rig.churn.acknowledged = 0
    await etcd.start()
    await asyncio.sleep(AWAY_S)
    kept = all(reader.follower.current is not None for reader in rig.readers)
    served = all(
        reader.follower.current is not None and rig.revision in reader.follower.current.revision_by_name
        for reader in rig.readers
    )
    yield f"{len(last)} readers keep a snapshot that serves", kept and served
    await rig.register()
    after = await rig.store.head()
    yield f"another store: {before.incarnation[:8]} -> {after.incarnation[:8]}", before.incarnation != after.incarnation
    yield HEALED


def _heal(rig: Rig) -> None:
    for proxy in rig.proxies():
        proxy.heal()


async def _noticed(rig: Rig) -> Proof:
    """A Router says that what it has is old; without one, the readers do."""
    if rig.of("router"):
        age_s = min((rig.ages.get(router.name, 0.0) for router in rig.of("router")), default=0.0)
        return f"the Router's snapshot was {age_s:.1f} s old", age_s > AWAY_S / 2
    return "the readers are not fresh", not any(reader.is_fresh for reader in rig.readers)


async def _epochs(rig: Rig) -> dict[str, int]:
    with contextlib.suppress(Failure):
        found = [*(await rig.store.range("services/")).items, *(await rig.store.range("replicas/")).items]
        return {kv.key: kv.create_revision for kv in found}
    return {}


SINGLE: dict[str, Breaking] = {
    "etcd killed and restarted": killed,
    "etcd frozen for 2x the leases' life": frozen,
    "compaction while watchers are cut off": compacted,
    "partition, held and then delivered": partition(*BOTH, held=True),
    "partition, both ways lost": partition(*BOTH, held=False),
    "half-open: etcd's answers lost": partition(Way.DOWN, held=False),
    "half-open: calls to etcd lost": partition(Way.UP, held=False),
    "delay of 0.3 s each way": delayed,
    "connections reset 20 times": reset,
    "full disk: NOSPACE, compact, defrag": full,
    "store wiped": wiped,
}
