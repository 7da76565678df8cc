from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.adapters.etcd import EtcdStore
from support.etcd import Etcd, etcd_process, make_store
from support.registry import Registry, Start, running
from support.registry_api import Api, serving


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Etcd]:
    """One for a file of tests that do not break it."""
    async with etcd_process(tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest.fixture
async def api(shared_etcd: Etcd) -> AsyncIterator[Api]:
    """RegistryService on a store of the test's own."""
    async with make_store(shared_etcd.endpoint) as opened, serving(opened) as made:
        yield made
