"""A short part of `make faults`: real etcd and two real Registries as processes, without Triton."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from faults.examine import Breaking, examine
from faults.leaders import late_write
from faults.rig import Rig, rig
from faults.single import compacted, killed
from headrace.runtime.telemetry import configure_logging

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

SHORT: dict[str, Breaking] = {
    "etcd killed": killed,
    "compaction while watchers are cut off": compacted,
    "old leader's write arrives late": late_write,
}


@contextlib.asynccontextmanager
async def small_rig(directory: Path) -> AsyncIterator[Rig]:
    async with rig(directory, serving=(), streams=0) as made:
        yield made


async def test_the_laws_hold_through_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = structlog.get_config()
    configure_logging("faults", level="critical")
    monkeypatch.setattr("faults.single.AWAY_S", 5.5)
    async with small_rig(tmp_path) as made:
        for name, breaking in SHORT.items():
            outcome = await examine(made, name, breaking)
            assert outcome.verdict == "holds", f"{name}: {outcome.proofs} {outcome.broken}"
            assert outcome.versions > 0
            assert outcome.promised > 0
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()


async def test_what_did_not_happen_is_invalid_and_a_broken_law_is_told(tmp_path: Path) -> None:
    async def untrue(rig: Rig) -> AsyncIterator[tuple[str, bool]]:
        yield "etcd was killed", False

    async def lying(rig: Rig) -> AsyncIterator[tuple[str, bool]]:
        rig.readers[0].versions.note(1, "x", rig.readers[0].follower.current.incarnation)  # type: ignore[union-attr]
        rig.writer.promised.append(("d/never", 10**9))
        yield "a reader went back, and an event was lost", True

    async with small_rig(tmp_path) as made:
        assert (await examine(made, "untrue", untrue)).verdict == "INVALID"
        assert (await examine(made, "nothing", _silent)).verdict == "INVALID"
        outcome = await examine(made, "lying", lying)
        assert outcome.verdict == "BROKEN"
        assert outcome.lost == 1
        assert any("went back" in text for text in outcome.broken)


async def _silent(rig: Rig) -> AsyncIterator[tuple[str, bool]]:
    return
    yield
