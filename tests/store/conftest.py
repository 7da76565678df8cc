from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.adapters.etcd import EtcdStore
from support.etcd import Etcd, etcd_process, make_store


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[Etcd]:
    """An etcd of the test's own: these tests kill, freeze and wipe it."""
    async with etcd_process(tmp_path / "etcd") as process:
        yield process


@pytest.fixture
async def store(etcd: Etcd) -> AsyncIterator[EtcdStore]:
    async with make_store(etcd.endpoint, prefix="/headrace") as opened:
        yield opened
