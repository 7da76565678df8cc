"""A whole Router on a real etcd: what it says of itself there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.api.registry.v1 import resources_pb2
from headrace.router.main import run
from headrace.router.settings import RouterSettings
from headrace.runtime.tasks import cancel_and_wait
from support.etcd import etcd_process, eventually, make_store

ELSEWHERE = {"advertise": "router.example:50051", "admin_advertise": "10.0.0.7:50061"}


@pytest.mark.parametrize("advertised", [{}, ELSEWHERE])
async def test_others_are_told_the_addresses_that_they_can_reach(tmp_path: Path, advertised: dict[str, str]) -> None:
    async with etcd_process(tmp_path / "etcd") as etcd, make_store(etcd.endpoint, prefix="/headrace") as store:
        stop = asyncio.Event()
        settings = RouterSettings(listen="127.0.0.1:0", etcd=(etcd.endpoint,), name="r", drain_grace_s=0, **advertised)
        router = asyncio.create_task(run(settings, stop))
        record = resources_pb2.ServiceRecord()

        async def is_there() -> bool:
            kv = await store.get("services/routers/r")
            record.ParseFromString(kv.value if kv is not None else b"")
            return kv is not None

        try:
            await eventually(is_there, 10)
            told = {"advertise": record.endpoint, "admin_advertise": record.admin_endpoint}
            if advertised:
                assert told == advertised
            else:
                assert all(endpoint.startswith("127.0.0.1:") for endpoint in told.values())
                assert told["advertise"] != told["admin_advertise"]
            stop.set()
            await asyncio.wait_for(router, 10)
            assert await store.get("services/routers/r") is None
        finally:
            await cancel_and_wait(router)
