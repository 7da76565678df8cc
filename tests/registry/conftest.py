from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.adapters.etcd import EtcdStore
from support.etcd import Etcd, etcd_process, make_store
from support.registry import Registry, Start, running


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[Etcd]:
    async with etcd_process(tmp_path / "etcd") as process:
        yield process


@pytest.fixture
async def store(etcd: Etcd) -> AsyncIterator[EtcdStore]:
    async with make_store(etcd.endpoint, prefix="/headrace") as opened:
        yield opened


@pytest.fixture
def start(etcd: Etcd) -> Start:
    """start(**settings): a Registry on this test's etcd."""
    return lambda **settings: running(etcd.endpoint, **settings)


@pytest.fixture
async def registry(start: Start) -> AsyncIterator[Registry]:
    async with start() as started:
        yield started
