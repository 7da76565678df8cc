"""Owned tasks and orderly ends.

Every task belongs to a TaskGroup. A signal sets one event; a service then drains in its own order. A second
signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable


def stop_on_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets. The second signal exits with 128 + its number."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def cancel_and_wait(*tasks: asyncio.Task[object]) -> None:
    """Cancel tasks and wait until they have ended; their own errors are theirs to report."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def retry_forever(
    attempt: Callable[[], Awaitable[None]],
    *,
    on_error: Callable[[Exception, float], None],
    first_delay_s: float = 0.1,
    max_delay_s: float = 5.0,
) -> None:
    """Run `attempt` until it returns; after an exception wait (doubling up to `max_delay_s`) and run it again."""
    delay_s = first_delay_s
    while True:
        started = asyncio.get_running_loop().time()
        try:
            await attempt()
            return
        except Exception as error:
            if asyncio.get_running_loop().time() - started > 4 * max_delay_s:
                delay_s = first_delay_s
            on_error(error, delay_s)
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, max_delay_s)
