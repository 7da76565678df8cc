"""One engine for all tests of the suite, then the next; and, where asked for, what came of each test as a file."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from conformance.providers import Running, running, selected
from conformance.session import Session, connected

RESULTS = "HEADRACE_CONFORMANCE_RESULTS"
_results: list[dict[str, object]] = []


@pytest_asyncio.fixture(scope="package", loop_scope="package", params=selected(), ids=lambda one: one.name)
async def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(request.param, tmp_path_factory.mktemp(request.param.name)) as up:
        yield up


@pytest_asyncio.fixture(loop_scope="package")
async def session(engine: Running) -> AsyncIterator[Session]:
    """An owner whose engine is idle again when the test has passed, with every rule kept."""
    async with connected(engine) as session:
        yield session
        await session.assert_idle()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each test ended, in whichever phase."""
    if not report.nodeid.startswith("tests/conformance/test_") or os.environ.get(RESULTS) is None:
        return
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        _results.append({"test": report.nodeid, "outcome": report.outcome, "reason": reason, "s": report.duration})


def pytest_sessionfinish() -> None:
    """Write it."""
    if path := os.environ.get(RESULTS):
        Path(path).write_text(json.dumps(_results, indent=1), encoding="utf-8")
