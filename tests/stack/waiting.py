"""Waiting on a condition, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; the test's deadline bounds it."""

    async def check() -> bool:
        return await asyncio.to_thread(condition)

    await until_async(check)


async def until_async(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.1)
