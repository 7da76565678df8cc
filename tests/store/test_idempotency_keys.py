"""Idempotency keys in a real etcd: one winner, a bounded answer while it is frozen, records that go by themselves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from router.harness import REVISION, collect, failure, running, until

from headrace.adapters.etcd import EtcdStore
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Reason
from headrace.control.idempotency import Decision, Origin
from headrace.router.codec import Efforts
from headrace.router.idempotency import CLAIM_S, Keys
from headrace.router.metrics import RouterMetrics
from headrace.router.settings import RouterSettings
from support.etcd import Etcd, eventually, make_store

PLAN: Any = SimpleNamespace(efforts=Efforts(None, None, None), revision=REVISION)


def keys(store: EtcdStore, router: str, **settings: Any) -> Keys:
    made = Keys(RouterSettings(**settings), Origin(router, "1"), RouterMetrics())
    made.use(store, "127.0.0.1:1")
    return made


def request(key: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="chat", prompt="hello", idempotency_key=key)


async def test_of_200_claims_at_two_routers_one_wins_and_all_others_learn_whose_it_is(etcd: Etcd) -> None:
    async with make_store(etcd.endpoint, prefix="/x") as one, make_store(etcd.endpoint, prefix="/x") as other:
        both = keys(one, "routers/a"), keys(other, "routers/b")
        found = await asyncio.gather(*(both[n % 2].claim(request("k"), PLAN, "t", 10.0) for n in range(200)))
        decisions = Counter(f.decision for f in found)
        assert decisions == {Decision.NEW: 1, Decision.ATTACH_HERE: 99, Decision.ATTACH_THERE: 100}
        assert len({f.record.request for f in found}) == 1
        listed = await one.range("idempotency/")
        assert len(listed.items) == 1
        assert len({f.revision for f in found}) == 1
        for made in both:
            await made.close()


async def test_a_frozen_etcd_costs_a_caller_two_seconds_and_no_execution(etcd: Etcd, store: EtcdStore) -> None:
    async with running(store=store) as h:
        etcd.pause()
        began = time.monotonic()
        _, error = await collect(h.generate(idempotency_key="k"))
        took_s = time.monotonic() - began
        assert failure(error).reason is Reason.STORE_UNAVAILABLE
        assert took_s < CLAIM_S + 1.0
        assert h.scheduler.dispatches.empty()
        etcd.resume()
        call = h.generate(idempotency_key="k")
        await h.scheduler.end((await h.admitted()).attempt)
        assert (await collect(call))[1] is None
        await until(lambda: not h.service.sharing.keys._claims)


async def test_a_record_goes_with_its_lease(store: EtcdStore, monkeypatch: Any) -> None:
    monkeypatch.setattr("headrace.router.idempotency._LEASE_MARGIN_S", 0)
    short = keys(store, "routers/a", idempotency_ttl_s=1.0, resume_window_s=0.1)
    await short.claim(request("k"), PLAN, "t", 0.5)
    assert len((await store.range("idempotency/")).items) == 1

    async def is_gone() -> bool:
        return not (await store.range("idempotency/")).items

    await eventually(is_gone, 15)
