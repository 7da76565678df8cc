"""The wall clock of every service jumps by an hour, forth and back (libfaketime; monotonic clocks stay as they are)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from faults.examine import HEALED, Breaking, Proof
from faults.readers import held_by
from faults.rig import Rig

LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")
JUMP_S = 3600


def find_library() -> Path | None:
    """libfaketime for programs with threads, where it is installed."""
    for pattern in LIBRARIES:
        found = sorted(Path("/").glob(pattern.lstrip("/")))
        if found:
            return found[0]
    return None


def environ(library: Path, offset: Path) -> dict[str, str]:
    """For services whose clock is to jump."""
    write(offset, 0)
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def write(offset: Path, seconds: int) -> None:
    """Set the clock."""
    fresh = offset.with_suffix(".new")
    fresh.write_text(f"{seconds:+d}\n", encoding="ascii")
    fresh.replace(offset)


def jump(offset: Callable[[Rig], Path], seconds: int) -> Breaking:
    """The clock jumps to `seconds` from the true time."""

    async def jumped(rig: Rig) -> AsyncIterator[Proof]:
        before = (await held_by(rig.store)).publish_time_ms
        write(offset(rig), seconds)
        await asyncio.sleep(6.0)
        after = (await held_by(rig.store)).publish_time_ms
        moved_s = (after - before) / 1000
        yield f"snapshots are dated {moved_s:+.0f} s on", abs(moved_s) > JUMP_S / 2
        yield HEALED

    return jumped


def offset_of(rig: Rig) -> Path:
    """The file that holds the rig's offset."""
    return rig.directory / "faketime"


CLOCK: dict[str, Breaking] = {
    "clock jumps an hour ahead": jump(offset_of, JUMP_S),
    "clock jumps two hours back": jump(offset_of, -JUMP_S),
}
