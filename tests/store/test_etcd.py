"""The store's operations against a real etcd."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_process import EtcdProcess
from headrace.adapters.etcd_settings import EtcdSettings
from headrace.adapters.etcd_transport import StoreFull, StoreUnavailable
from headrace.control.errors import Failure, Reason
from headrace.runtime.ports import Compare, LeaseNotFound, Put
from headrace.runtime.settings import SettingsError, load_settings
from support.etcd import Etcd, etcd_process, eventually, make_store


async def test_keys_are_read_back_with_their_revisions(store: EtcdStore) -> None:
    first = await store.put("aliases/a", b"1")
    second = await store.put("aliases/a", b"2")
    kv = await store.get("aliases/a")
    assert kv is not None
    assert (kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version) == ("aliases/a", b"2", first, second, 2)
    assert await store.get("aliases/none") is None
    assert await store.delete("aliases/a")
    assert not await store.delete("aliases/a")


async def test_a_listing_is_complete_ordered_and_only_of_its_prefix(store: EtcdStore) -> None:
    names = [f"replicas/r{n:04}" for n in range(2500)]
    for start in range(0, len(names), 100):
        await store.txn((), [Put(name, name.encode()) for name in names[start : start + 100]])
    await store.put("replicas0/other", b"x")
    listing = await store.range("replicas/")
    assert [kv.key for kv in listing.items] == names
    assert listing.revision == (await store.head()).revision
    assert listing.incarnation == (await store.head()).incarnation != ""


async def test_a_transaction_writes_all_or_nothing(store: EtcdStore) -> None:
    assert (await store.txn([Compare("k", create_revision=0)], [Put("k", b"1"), Put("l", b"1")])).succeeded
    assert not (await store.txn([Compare("k", create_revision=0)], [Put("k", b"2")], ["l"])).succeeded
    kv = await store.get("k")
    assert kv is not None
    assert kv.value == b"1"
    assert (await store.txn([Compare("k", mod_revision=kv.mod_revision, exists=True)], deletes=["k", "l"])).succeeded
    assert await store.get("l") is None


async def test_a_swap_writes_or_reads_what_is_there_instead(store: EtcdStore) -> None:
    won = await store.swap(Put("k", b"1"), 0)
    assert won.revision > 0
    lost = await store.swap(Put("k", b"2"), 0)
    assert (lost.revision, lost.found and (lost.found.value, lost.found.mod_revision)) == (0, (b"1", won.revision))
    again = await store.swap(Put("k", b"3"), won.revision)
    assert again.revision > won.revision
    assert (await store.swap(Put("k", b"4"), won.revision)).found is not None
    await store.delete("k")
    gone = await store.swap(Put("k", b"5"), again.revision)
    assert (gone.revision, gone.found) == (0, None)
    with pytest.raises(LeaseNotFound):
        await store.swap(Put("k", b"6", lease=4711), 0)


async def test_of_200_swaps_for_one_key_one_writes_and_all_others_read_it(etcd: Etcd, store: EtcdStore) -> None:
    async with make_store(etcd.endpoint, prefix="/headrace") as other:
        done = await asyncio.gather(*((store, other)[n % 2].swap(Put("k", b"%d" % n), 0) for n in range(200)))
    winners = [n for n, result in enumerate(done) if result.revision]
    assert len(winners) == 1
    assert {result.found.value for result in done if result.found is not None} == {b"%d" % winners[0]}


async def test_a_lease_takes_its_keys_with_it_and_is_then_not_found(store: EtcdStore) -> None:
    lease, ttl_s = await store.lease_grant(5)
    assert ttl_s == 5
    await store.put("replicas/r", b"", lease=lease)
    assert await store.lease_keepalive(lease) == 5
    await store.lease_revoke(lease)
    assert await store.get("replicas/r") is None
    with pytest.raises(LeaseNotFound):
        await store.lease_keepalive(lease)
    with pytest.raises(LeaseNotFound):
        await store.put("replicas/r", b"", lease=lease)
    await store.lease_revoke(lease)


async def test_a_dead_etcd_fails_calls_at_once_and_a_frozen_one_at_the_deadline(etcd: Etcd, store: EtcdStore) -> None:
    loop = asyncio.get_running_loop()
    etcd.pause()
    began = loop.time()
    with pytest.raises(StoreUnavailable):
        await store.put("k", b"", timeout_s=0.5)
    assert 0.4 < loop.time() - began < 1.5
    etcd.resume()
    await etcd.kill()
    await eventually(lambda: _fails(store))
    began = loop.time()
    with pytest.raises(StoreUnavailable) as caught:
        await store.put("k", b"", timeout_s=5)
    assert loop.time() - began < 2
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    await etcd.start()
    await store.wait_ready(10)


async def test_the_next_endpoint_answers_when_the_first_does_not(etcd: Etcd) -> None:
    with socket.socket() as closed:  # bound, not listening: refuses connections
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        async with make_store(dead, etcd.endpoint) as store:
            assert await store.put("k", b"v") > 0
            assert store.endpoint == etcd.endpoint


async def test_a_full_store_says_so_and_still_reads_and_keeps_leases(tmp_path: Path) -> None:
    async with etcd_process(tmp_path / "e", quota_bytes=2 * 1024 * 1024) as etcd, make_store(etcd.endpoint) as store:
        await store.range("")  # draws the incarnation
        lease, _ = await store.lease_grant(30)
        await store.put("small", b"x", lease=lease)
        with pytest.raises(StoreFull):
            await _fill(store)
        assert await store.lease_keepalive(lease) == 30
        assert {kv.key for kv in (await store.range("small")).items} == {"small"}
        assert await store.delete("small")


async def test_a_record_that_is_too_large_is_refused_with_its_own_reason(store: EtcdStore) -> None:
    with pytest.raises(Failure) as caught:
        await store.put("big", b"x" * 1_700_000)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


async def test_no_etcd_at_the_start_is_one_sentence_with_the_setting_and_the_endpoint() -> None:
    settings = load_settings(EtcdSettings, "registry", environ={"HEADRACE_REGISTRY_ETCD": "127.0.0.1:1"})
    with pytest.raises(SettingsError, match=r"^registry setting 'etcd': cannot reach etcd at 127\.0\.0\.1:1 within"):
        await EtcdStore.connect(settings, "registry", timeout_s=0.4)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:2379", "127.0.0.1", "127.0.0.1:0", ":1"])
def test_an_endpoint_that_cannot_be_one_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="etcd"):
        load_settings(EtcdSettings, "router", overrides={"etcd": endpoint})


def test_endpoints_may_be_given_with_commas() -> None:
    settings = load_settings(EtcdSettings, "router", environ={"HEADRACE_ROUTER_ETCD": "a:1, b:2"})
    assert settings.etcd == ("a:1", "b:2")


async def test_a_port_in_use_is_named_with_its_setting(tmp_path: Path, etcd: Etcd) -> None:
    other = EtcdProcess(tmp_path / "other", client_port=etcd.client_port, setting="etcd_port")
    with pytest.raises(SettingsError, match=rf"setting 'etcd_port': port {etcd.client_port} .* in use"):
        await other.start()


async def _fails(store: EtcdStore) -> bool:
    try:
        await store.head(timeout_s=0.5)
    except Failure:
        return True
    return False


async def _fill(store: EtcdStore) -> None:
    for n in range(400):
        await store.put(f"big/{n}", b"x" * 100_000)
