"""One replica's record in etcd, written behind the worker's back so that no worker waits for the store.

`begin` asks for a new registration, and with it a new epoch; `put` changes the record that is registered; `end`
takes it away. What cannot be written now is written once the store answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from headrace.control.errors import Failure, Reason
from headrace.runtime.tasks import cancel_and_wait, retry_forever
from headrace.runtime.telemetry import get_logger

END_S = 3.0


class Records(Protocol):
    """What is needed of `headrace.runtime.membership.Membership`."""

    async def register(self, key: str, value: bytes) -> int:
        """Put a record and return its epoch."""

    async def update(self, key: str, value: bytes) -> None:
        """Change a record that is registered."""

    async def withdraw(self, key: str) -> None:
        """Delete a record."""


class ReplicaPublisher:
    """The record of one replica.

    Args:
        records: where.
        key: the replica's name.
        on_epoch: called with the epoch of each new registration.
        on_fenced: called when another process has taken the record over.
    """

    def __init__(
        self, records: Records, key: str, *, on_epoch: Callable[[int], None], on_fenced: Callable[[], None]
    ) -> None:
        self._records = records
        self._key = key
        self._on_epoch = on_epoch
        self._on_fenced = on_fenced
        self._value = b""
        self._written = b""
        self._is_registered = False
        self._fresh = False
        self._is_fenced = False
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self, value: bytes) -> None:
        """Register anew: what was registered before is withdrawn first, so the epoch differs."""
        self._fresh = True
        self._is_fenced = False
        self.put(value)

    def put(self, value: bytes) -> None:
        """Let the record hold `value`; after another process took it over nothing is written until `begin`."""
        self._value = value
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"publish {self._key}")

    async def end(self) -> None:
        """Withdraw the record; a store that is away lets it go with the lease."""
        if self._task is None:
            return
        await cancel_and_wait(self._task)
        self._task = None
        with contextlib.suppress(TimeoutError, Failure):
            async with asyncio.timeout(END_S):
                await self._records.withdraw(self._key)

    async def _run(self) -> None:
        def on_error(error: Exception, delay_s: float) -> None:
            if not isinstance(error, Failure):
                raise error
            get_logger().info("replica_not_published", replica=self._key, why=error.message, retry_in_s=delay_s)

        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await retry_forever(self._write, on_error=on_error, max_delay_s=2.0)

    async def _write(self) -> None:
        if self._is_fenced:
            return
        if self._fresh and self._is_registered:
            await self._records.withdraw(self._key)
            self._is_registered = False
        value = self._value
        if not self._is_registered:
            epoch = await self._records.register(self._key, value)
            self._is_registered, self._fresh, self._written = True, False, value
            self._on_epoch(epoch)
        elif value != self._written:
            try:
                await self._records.update(self._key, value)
                self._written = value
            except (Failure, KeyError) as error:
                if isinstance(error, Failure) and error.reason is not Reason.STALE_EPOCH:
                    raise
                self._is_registered = False
                self._is_fenced = True
                self._on_fenced()
