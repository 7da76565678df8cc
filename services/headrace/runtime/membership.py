"""Records that live as long as this process: one lease, kept alive, and what hangs on it.

    HELD ──renewed──> HELD
      │ no answer for the lease's life less a margin (our own monotonic clock)
      v
    UNCERTAIN ──renewed: etcd was away, the lease lived on──> HELD, same epochs
      │ etcd says it is gone
      v
    LOST ──granted anew, records put again──> HELD, new epochs

The epoch of a record is the create revision of its key: a fencing token, different for every registration. While
UNCERTAIN a process does not know whether others still see it. It goes on with what it has (an outage of etcd must
not stop the data plane) and leaves it to its owner, told by `on_lost`, what to refuse meanwhile.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections.abc import Callable
from types import TracebackType

from headrace.control.errors import Failure, Reason
from headrace.runtime.ports import Compare, LeaseNotFound, Put, Store
from headrace.runtime.tasks import cancel_and_wait
from headrace.runtime.telemetry import get_logger

TTL_S = 15
"""Life of a lease without renewal, seconds: how long a dead process is believed alive."""

MARGIN_S = 2.0
"""The process stops trusting its lease this long before etcd can end it, seconds."""

RETRY_S = 0.5
CALL_S = 3.0
REVOKE_S = 2.0


class LeaseState(enum.Enum):
    """What this process may assume about its lease."""

    HELD = "held"
    UNCERTAIN = "uncertain"
    LOST = "lost"


class LeaseClock:
    """When to renew, and how long the lease can be trusted. Sans-io; instants are monotonic seconds."""

    def __init__(self) -> None:
        self.renewed_at = float("-inf")
        self.trusted_until = float("-inf")
        self.renew_at = float("-inf")

    def renewed(self, sent_at: float, ttl_s: float) -> None:
        """Take in an answer to what was sent at `sent_at`; counting from the sending is the safe side."""
        self.renewed_at = sent_at
        self.trusted_until = sent_at + ttl_s - min(MARGIN_S, ttl_s / 4)
        self.renew_at = sent_at + ttl_s / 3

    def is_trusted(self, now: float) -> bool:
        """Whether etcd cannot have ended the lease yet."""
        return now < self.trusted_until


class _Record:
    """One record: what it should hold, and what etcd has of it. `lock` orders the calls about it."""

    __slots__ = ("epoch", "last_epoch", "lock", "value", "written")

    def __init__(self, value: bytes) -> None:
        self.value = value
        self.written: bytes | None = None
        self.epoch = 0
        self.last_epoch = 0
        """The newest one it has had; a record with an older one is a ghost, from a backup that was restored."""
        self.lock = asyncio.Lock()

    @property
    def is_current(self) -> bool:
        """Whether etcd holds it as it should be."""
        return self.epoch > 0 and self.written == self.value


class Membership:
    """The leased records of one process. Use it as `async with`: leaving revokes the lease, the last act of a stop.

    Args:
        store: where.
        ttl_s: life of the lease without renewal, whole seconds.
        on_lost: called once when the lease stops being trusted, and not again before it is held again.
        on_epoch: called with (key, epoch) for each record that was put again under a new lease.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        ttl_s: int = TTL_S,
        *,
        on_lost: Callable[[], None] = lambda: None,
        on_epoch: Callable[[str, int], None] = lambda key, epoch: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._on_epoch = on_epoch
        self._clock = clock
        self._lease_clock = LeaseClock()
        self._lease = 0
        self._records: dict[str, _Record] = {}
        self._state = LeaseState.LOST
        self._granting = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def state(self) -> LeaseState:
        """What may be assumed now; exact even while the renewing task is busy."""
        if self._state is LeaseState.HELD and not self._lease_clock.is_trusted(self._clock()):
            return LeaseState.UNCERTAIN
        return self._state

    @property
    def age_s(self) -> float:
        """Seconds since the store last renewed the lease, or granted it."""
        return self._clock() - self._lease_clock.renewed_at

    def epoch(self, key: str) -> int:
        """Epoch of a record; 0 when it is not registered now."""
        record = self._records.get(key)
        return record.epoch if record else 0

    async def __aenter__(self) -> Membership:
        """Grant the lease and begin to renew it.

        Raises:
            Failure: the store is not available.
        """
        await self._grant_if_lost()
        self._keeper = asyncio.create_task(self._keep(), name="membership")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing and revoke; a store that is away will let the lease run out."""
        assert self._keeper is not None
        await cancel_and_wait(self._keeper)
        try:
            await self._store.lease_revoke(self._lease, timeout_s=REVOKE_S)
        except Failure as failure:
            get_logger().info("lease_not_revoked", why=failure.message)

    async def register(self, key: str, value: bytes) -> int:
        """Put a record and return its epoch. A record that another process left there is taken over.

        Raises:
            Failure: the store is not available; nothing is kept.
        """
        record = self._records.setdefault(key, _Record(value))
        record.value = value
        try:
            async with record.lock:
                while True:
                    try:
                        return await self._create(key, record, take_over=True)
                    except LeaseNotFound:
                        self._lose()
                        await self._grant_if_lost()
        except BaseException:
            if not record.epoch:
                self._records.pop(key, None)
            raise

    async def update(self, key: str, value: bytes) -> None:
        """Change a record that is registered; its epoch stays.

        Without an answer from the store the value is kept and written as soon as there is one; that is no error.

        Raises:
            Failure: STALE_EPOCH: another process has taken the key over, or it was never registered here.
        """
        record = self._records.get(key)
        if record is None:
            raise Failure(Reason.STALE_EPOCH, f"{key} is not registered by this process.")
        record.value = value
        try:
            async with record.lock:
                await self._write(key, record)
        except LeaseNotFound:
            self._lose()
        except Failure as failure:
            if failure.reason is Reason.STALE_EPOCH:
                self._records.pop(key, None)
                raise
            get_logger().info("record_update_delayed", key=key, why=failure.message)

    async def withdraw(self, key: str) -> None:
        """Delete a record of ours; one that is gone or taken over is left alone.

        Raises:
            Failure: the store is not available; the record goes with the lease.
        """
        record = self._records.pop(key, None)
        if record is None or not record.epoch:
            return
        async with record.lock:
            await self._store.txn([Compare(key, create_revision=record.epoch)], deletes=[key], timeout_s=CALL_S)

    async def claim(self, key: str, value: bytes) -> int | None:
        """Put a record only if there is none: for leadership. Returns its epoch, or None when the key is taken.

        A claim is not put again after the lease was lost: whoever holds it must notice and claim anew. One whose
        answer was lost on the way is found again by claiming once more.
        """
        lease = self._lease
        try:
            done = await self._store.txn([Compare(key, create_revision=0)], [Put(key, value, lease)], timeout_s=CALL_S)
        except LeaseNotFound:
            self._lose()
            return None
        if done.succeeded:
            return done.revision
        found = await self._store.get(key, timeout_s=CALL_S)
        is_ours = found is not None and (found.lease, found.value) == (lease, value)
        return found.create_revision if found is not None and is_ours else None

    async def _create(self, key: str, record: _Record, *, take_over: bool) -> int:
        """Make the key ours, with a create revision that no other registration has."""
        while True:
            value = record.value
            done = await self._store.txn(
                [Compare(key, create_revision=0)], [Put(key, value, self._lease)], timeout_s=CALL_S
            )
            if done.succeeded:
                record.epoch = record.last_epoch = done.revision
                record.written = value
                return record.epoch
            found = await self._store.get(key, timeout_s=CALL_S)
            if found is None:
                continue
            if found.lease == self._lease and found.value == value:  # ours: its answer was lost on the way
                record.epoch = record.last_epoch = found.create_revision
                record.written = value
                return record.epoch
            is_newer = found.create_revision > record.last_epoch
            if not take_over and is_newer and found.lease != self._lease:
                raise Failure(Reason.STALE_EPOCH, f"{key} was taken over by another process.")
            get_logger().warning("record_taken_over", key=key, old_epoch=found.create_revision)
            theirs = Compare(key, create_revision=found.create_revision)
            await self._store.txn([theirs], deletes=[key], timeout_s=CALL_S)

    async def _write(self, key: str, record: _Record) -> None:
        """Bring etcd's value up to date, if the key is still ours."""
        if not record.epoch or record.written == record.value:
            return
        value = record.value
        compares = [Compare(key, create_revision=record.epoch)]
        done = await self._store.txn(compares, [Put(key, value, self._lease)], timeout_s=CALL_S)
        if done.succeeded:
            record.written = value
            return
        found = await self._store.get(key, timeout_s=CALL_S)
        if found is None or found.create_revision < record.epoch:
            raise LeaseNotFound()
        if found.create_revision > record.epoch:
            raise Failure(Reason.STALE_EPOCH, f"{key} was taken over by another process; this one is out of date.")

    async def _grant_if_lost(self) -> None:
        async with self._granting:
            if self._state is LeaseState.LOST:
                sent_at = self._clock()
                self._lease, ttl_s = await self._store.lease_grant(self._ttl_s, timeout_s=CALL_S)
                self._lease_clock.renewed(sent_at, ttl_s)
                self._state = LeaseState.HELD

    def _lose(self) -> None:
        """Etcd says that the lease is gone, and everything on it."""
        if self._state is LeaseState.LOST:
            return
        was_held = self._state is LeaseState.HELD
        self._state = LeaseState.LOST
        for record in self._records.values():
            record.epoch = 0
        get_logger().warning("lease_lost", records=len(self._records))
        if was_held:
            self._on_lost()

    async def _keep(self) -> None:
        """Renew for ever; after a loss, put everything again."""
        retry_at = float("-inf")
        while True:
            now = self._clock()
            if self._state is LeaseState.HELD and not self._lease_clock.is_trusted(now):
                self._state = LeaseState.UNCERTAIN
                get_logger().warning("lease_uncertain", why="etcd has not answered for nearly its life")
                self._on_lost()
            if now >= retry_at:
                try:
                    await self._renew(now)
                except LeaseNotFound:
                    self._lose()
                except Failure as failure:
                    get_logger().info("lease_not_renewed", why=failure.message)
                    retry_at = self._clock() + RETRY_S * (0.5 + random.random())  # noqa: S311  only spreads load
            # Short steps: a loss noticed elsewhere, and the end of trust, are acted on in time.
            await asyncio.sleep(min(0.25, self._ttl_s / 20))

    async def _renew(self, now: float) -> None:
        await self._grant_if_lost()
        if now >= self._lease_clock.renew_at:
            left_s = self._lease_clock.trusted_until - now
            timeout_s = min(CALL_S, max(left_s, RETRY_S)) if self._state is LeaseState.HELD else CALL_S
            ttl_s = await self._store.lease_keepalive(self._lease, timeout_s=timeout_s)
            self._lease_clock.renewed(now, ttl_s)
            self._state = LeaseState.HELD
        for key, record in list(self._records.items()):
            if not record.is_current:
                await self._restore(key, record)

    async def _restore(self, key: str, record: _Record) -> None:
        """Put a record again whose lease was lost, or write what could not be written before."""
        async with record.lock:
            if self._records.get(key) is not record or record.is_current:
                return
            is_new = not record.epoch
            try:
                if is_new:
                    await self._create(key, record, take_over=False)
                else:
                    await self._write(key, record)
            except Failure as failure:
                if failure.reason is not Reason.STALE_EPOCH:
                    raise
                get_logger().error("record_lost_to_another_process", key=key)
                self._records.pop(key, None)
                return
        if is_new:
            self._on_epoch(key, record.epoch)
