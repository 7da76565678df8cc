"""List-and-watch against a real etcd that is killed, frozen, wiped, compacted and cut off."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_settings import EtcdConfig
from headrace.adapters.etcd_watch import PrefixWatch
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import Listing, Put
from headrace.runtime.tasks import cancel_and_wait
from support.etcd import Etcd, TcpProxy, compact, eventually, make_store

STALE_S = 1.5


class Twin:
    """Keeps what it is told, and every revision it was told twice."""

    def __init__(self, store: EtcdStore, **options: float) -> None:
        self.view: dict[str, bytes] = {}
        self.resets = 0
        self.log: list[tuple[str, int]] = []
        self.revisions: list[int] = []
        self.watch = PrefixWatch(
            store, "d/", self.on_reset, self.on_changes, stale_s=STALE_S, progress_s=0.3, **options
        )

    def on_reset(self, listing: Listing) -> None:
        self.resets += 1
        self.log = []
        self.view = {kv.key: kv.value for kv in listing.items}
        self.revisions.append(listing.revision)

    def on_changes(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            self.log.append((change.key, change.mod_revision))
            self.revisions.append(change.mod_revision)
            if change.value is None:
                del self.view[change.key]
            else:
                self.view[change.key] = change.value
        assert len(set(self.log)) == len(self.log), "an event was applied twice"

    def is_fresh(self) -> bool:
        return self.watch.state.is_fresh(time.monotonic(), STALE_S)

    async def equals(self, store: EtcdStore) -> bool:
        return self.view == {kv.key: kv.value for kv in (await store.range("d/")).items}


@contextlib.asynccontextmanager
async def following(store: EtcdStore, **options: float) -> AsyncIterator[Twin]:
    twin = Twin(store, **options)
    task = asyncio.create_task(twin.watch.run())
    try:
        await eventually(lambda: twin.resets == 1 and twin.is_fresh())
        yield twin
    finally:
        await cancel_and_wait(task)


async def write(store: EtcdStore, name: str, count: int = 5) -> None:
    for n in range(count):
        await store.put(f"d/{name}{n}", b"x")


async def test_puts_deletes_and_transactions_arrive_in_order(store: EtcdStore) -> None:
    await store.put("d/before", b"1")
    async with following(store) as twin:
        await store.put("d/a", b"1")
        await store.txn((), [Put("d/b", b"2"), Put("d/c", b"3")], ["d/a"])
        await store.put("other/x", b"")
        await eventually(lambda: twin.view == {"d/before": b"1", "d/b": b"2", "d/c": b"3"})
        assert twin.revisions == sorted(twin.revisions)


async def test_a_quiet_watch_stays_fresh(store: EtcdStore) -> None:
    async with following(store) as twin:
        heard = twin.watch.state.heard_at
        await eventually(lambda: (twin.watch.state.heard_at or 0) > (heard or 0) + 2 * STALE_S)
        assert twin.resets == 1
        assert twin.is_fresh()


async def test_nothing_is_lost_when_etcd_is_killed_and_comes_back(etcd: Etcd, store: EtcdStore) -> None:
    async with following(store) as twin:
        await write(store, "a")
        await eventually(lambda: len(twin.view) == 5)
        await etcd.kill()
        await eventually(lambda: not twin.is_fresh())
        assert len(twin.view) == 5, "what was known stays"
        await etcd.start()
        async with make_store(etcd.endpoint, prefix="/headrace") as other:
            await write(other, "b")
            await eventually(lambda: twin.equals(other))
        assert twin.is_fresh()
        assert twin.resets == 1, "it resumed, and did not have to list"


async def test_a_frozen_etcd_is_noticed_and_followed_again(etcd: Etcd, store: EtcdStore) -> None:
    async with following(store) as twin:
        etcd.pause()
        await eventually(lambda: not twin.is_fresh(), STALE_S + 2)
        etcd.resume()
        await write(store, "a")
        await eventually(lambda: twin.equals(store))
        await eventually(twin.is_fresh)
        assert twin.resets == 1


async def test_a_revision_compacted_while_away_leads_to_a_listing(etcd: Etcd, store: EtcdStore) -> None:
    async with TcpProxy(etcd.client_port) as proxy:
        far = EtcdStore(EtcdConfig((f"127.0.0.1:{proxy.port}",)))
        async with following(far) as twin:
            await write(store, "a")
            await eventually(lambda: len(twin.view) == 5)
            proxy.hole()
            await write(store, "b", 20)
            await store.delete("d/a0")
            await compact(store)
            await eventually(lambda: twin.equals(store))
            assert twin.watch.state.last_relist == "compacted"
        await far.aclose()


async def test_a_black_hole_is_left_through_a_new_connection(etcd: Etcd, store: EtcdStore) -> None:
    async with TcpProxy(etcd.client_port) as proxy:
        far = EtcdStore(EtcdConfig((f"127.0.0.1:{proxy.port}",)))
        async with following(far) as twin:
            proxy.hole()
            began = time.monotonic()
            await write(store, "a")
            await eventually(lambda: twin.equals(store))
            assert time.monotonic() - began < 2 * STALE_S + 1
            assert twin.resets == 1
        await far.aclose()


async def test_resets_during_a_burst_lose_nothing(etcd: Etcd, store: EtcdStore) -> None:
    async with TcpProxy(etcd.client_port) as proxy:
        far = EtcdStore(EtcdConfig((f"127.0.0.1:{proxy.port}",)))
        async with following(far) as twin:
            for round_ in range(8):
                for n in range(100):
                    await store.put(f"d/{round_}-{n}", b"x")
                    if n == 50:
                        proxy.reset()
            await eventually(lambda: len(twin.view) == 800)
            assert twin.revisions == sorted(twin.revisions)
        await far.aclose()


@pytest.mark.parametrize("ahead", [False, True], ids=["it is behind", "it has come further than the old one"])
async def test_a_wiped_store_is_noticed(etcd: Etcd, store: EtcdStore, ahead: bool) -> None:
    async with following(store) as twin:
        await write(store, "a")
        await eventually(lambda: len(twin.view) == 5)
        old = twin.watch.state
        await etcd.kill()
        etcd.wipe()
        await etcd.start()
        async with make_store(etcd.endpoint, prefix="/headrace") as other:
            await write(other, "b", 40 if ahead else 1)
            await eventually(lambda: twin.watch.state.incarnation not in ("", old.incarnation))
            await eventually(lambda: twin.equals(other))
        assert twin.watch.state.last_relist == "wiped"


async def test_a_reader_that_raises_gets_a_new_listing(store: EtcdStore) -> None:
    async with following(store) as twin:
        twin.view = {}  # its next deletion raises KeyError
        await store.put("d/a", b"1")
        await eventually(lambda: "d/a" in twin.view)
        twin.view = {}
        await store.delete("d/a")
        await eventually(lambda: twin.resets == 2)
        assert twin.watch.state.last_relist == "handler_failed"


async def test_it_lists_again_now_and_then_as_a_safety_net(store: EtcdStore) -> None:
    async with following(store, relist_s=0.5) as twin:
        await eventually(lambda: twin.resets >= 3)
        assert twin.watch.state.last_relist == "periodic"
