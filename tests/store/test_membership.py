"""Leased records: epochs, loss, take-over, and the clock that tells when not to trust a lease."""

from __future__ import annotations

import asyncio

import pytest

from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_settings import EtcdConfig
from headrace.control.errors import Failure, Reason
from headrace.runtime.membership import LeaseClock, LeaseState, Membership
from support.etcd import Etcd, TcpProxy, eventually, make_store

KEY = "replicas/r1"


@pytest.mark.parametrize(
    ("now", "trusted", "due"),
    [(100.0, True, False), (104.9, True, False), (105.0, True, True), (112.9, True, True), (113.0, False, True)],
)
def test_a_lease_is_renewed_after_a_third_and_distrusted_before_it_can_end(
    now: float, trusted: bool, due: bool
) -> None:
    clock = LeaseClock()
    clock.renewed(100.0, 15.0)
    assert clock.is_trusted(now) is trusted
    assert (now >= clock.renew_at) is due


async def test_a_record_lives_under_the_lease_and_goes_with_it(store: EtcdStore) -> None:
    async with Membership(store, 15) as member:
        epoch = await member.register(KEY, b"1")
        await member.update(KEY, b"2")
        kv = await store.get(KEY)
        assert kv is not None
        assert (kv.value, kv.create_revision) == (b"2", epoch)
        assert kv.lease != 0
        await member.register("replicas/r2", b"x")
        await member.withdraw("replicas/r2")
        assert await store.get("replicas/r2") is None
    assert await store.get(KEY) is None


async def test_the_lease_is_renewed_for_longer_than_it_lasts(store: EtcdStore) -> None:
    async with Membership(store, 2) as member:
        epoch = await member.register(KEY, b"1")
        await asyncio.sleep(5)
        assert member.state is LeaseState.HELD
        assert member.epoch(KEY) == epoch


async def test_a_lost_lease_is_granted_anew_with_new_epochs_and_values(store: EtcdStore) -> None:
    lost: list[str] = []
    epochs: list[tuple[str, int]] = []
    async with Membership(
        store, 2, on_lost=lambda: lost.append("x"), on_epoch=lambda key, epoch: epochs.append((key, epoch))
    ) as member:
        old = await member.register(KEY, b"1")
        kv = await store.get(KEY)
        assert kv is not None
        await store.lease_revoke(kv.lease)  # what an expiry does
        await member.update(KEY, b"2")
        await eventually(lambda: epochs)
        assert lost == ["x"]
        ((key, new),) = epochs
        assert key == KEY
        assert new > old
        kv = await store.get(KEY)
        assert kv is not None
        assert (kv.value, kv.create_revision) == (b"2", new)


async def test_a_paused_etcd_makes_the_lease_uncertain_then_new(etcd: Etcd, store: EtcdStore) -> None:
    lost: list[LeaseState] = []
    async with Membership(store, 3, on_lost=lambda: lost.append(member.state)) as member:
        old = await member.register(KEY, b"1")
        etcd.pause()
        await eventually(lambda: lost, 8)
        assert lost == [LeaseState.UNCERTAIN]
        await asyncio.sleep(1.5)  # longer than the lease
        etcd.resume()
        await eventually(lambda: member.state is LeaseState.HELD and member.epoch(KEY) not in (0, old), 10)
        assert len(lost) == 1


async def test_a_restarted_etcd_keeps_the_lease_and_the_epoch(etcd: Etcd, store: EtcdStore) -> None:
    async with Membership(store, 3) as member:
        old = await member.register(KEY, b"1")
        await etcd.kill()
        await eventually(lambda: member.state is LeaseState.UNCERTAIN)
        await etcd.start()
        await eventually(lambda: member.state is LeaseState.HELD)
        assert member.epoch(KEY) == old


async def test_an_update_without_etcd_is_written_when_it_is_back(etcd: Etcd, store: EtcdStore) -> None:
    async with Membership(store, 5) as member:
        await member.register(KEY, b"1")
        await etcd.kill()
        await member.update(KEY, b"2")
        await etcd.start()

        async def is_written() -> bool:
            kv = await store.get(KEY)
            return kv is not None and kv.value == b"2"

        await store.wait_ready(10)
        await eventually(is_written)


async def test_records_come_back_in_a_wiped_store(etcd: Etcd, store: EtcdStore) -> None:
    async with Membership(store, 3) as member:
        await member.register(KEY, b"1")
        await etcd.kill()
        etcd.wipe()
        await etcd.start()
        await store.wait_ready(10)

        async def is_there() -> bool:
            kv = await store.get(KEY)
            return kv is not None and kv.create_revision == member.epoch(KEY)

        await eventually(is_there)


async def test_a_restarted_process_takes_its_record_over_and_the_old_one_is_fenced(store: EtcdStore) -> None:
    async with Membership(store, 15) as old, Membership(store, 15) as new:
        first = await old.register(KEY, b"old")
        second = await new.register(KEY, b"new")
        assert second > first
        with pytest.raises(Failure) as caught:
            await old.update(KEY, b"zombie")
        assert caught.value.reason is Reason.STALE_EPOCH
        await old.withdraw(KEY)
        kv = await store.get(KEY)
        assert kv is not None
        assert kv.value == b"new"


async def test_a_zombie_does_not_take_its_record_back(etcd: Etcd, store: EtcdStore) -> None:
    async with TcpProxy(etcd.client_port) as proxy, Membership(store, 15) as new:
        far = EtcdStore(EtcdConfig((f"127.0.0.1:{proxy.port}",)))
        async with Membership(far, 2) as old:
            await old.register(KEY, b"old")
            kv = await store.get(KEY)
            assert kv is not None
            await store.lease_revoke(kv.lease)
            epoch = await new.register(KEY, b"new")
            await eventually(lambda: old.epoch(KEY) == 0)
            await asyncio.sleep(1)
            kv = await store.get(KEY)
            assert kv is not None
            assert (kv.value, kv.create_revision) == (b"new", epoch)
        await far.aclose()


async def test_a_claim_is_given_to_one(store: EtcdStore, etcd: Etcd) -> None:
    async with (
        make_store(etcd.endpoint, prefix="/headrace") as other,
        Membership(store, 15) as one,
        Membership(other, 15) as two,
    ):
        claims = await asyncio.gather(one.claim("registry/leader", b"1"), two.claim("registry/leader", b"2"))
        assert [claim is None for claim in claims].count(True) == 1


async def test_a_claim_whose_answer_was_lost_is_found_by_claiming_again(store: EtcdStore) -> None:
    async with Membership(store, 15) as one, Membership(store, 15) as two:
        epoch = await one.claim("registry/leader", b"1")
        assert epoch is not None
        assert await one.claim("registry/leader", b"1") == epoch
        assert await one.claim("registry/leader", b"2") is None
        assert await two.claim("registry/leader", b"1") is None, "the same name under another lease is another process"


async def test_no_store_at_the_start_is_a_failure_with_a_reason() -> None:
    store = EtcdStore(EtcdConfig(("127.0.0.1:1",)))
    with pytest.raises(Failure) as caught:
        async with Membership(store):
            pass
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    await store.aclose()
