"""A simulated etcd and the ways to it, in virtual time: deterministic, and as unkind as a seed makes it.

    client ──call──> Link ──late, lost, held──> SimEtcd ──answer──> Link ──late, lost──> client
                                                   └──events──> SimStream ──late, twice, missing──> PrefixWatch

It stands in for `EtcdStore`: what watches, publishes and follows above it is the real code.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from faults.sim_loop import VirtualLoop
from headrace.adapters.etcd_transport import StoreUnavailable
from headrace.adapters.etcd_watch import PrefixWatch
from headrace.adapters.shard_codec import parse_root
from headrace.registry.catalogue import LEADER_KEY
from headrace.runtime.ports import Compare, Head, KeyValue, LeaseNotFound, Listing, Put, TxnResult
from headrace.runtime.snapshot_follower import ROOT_KEY

TICK_S = 0.25


class BrokenLaw(AssertionError):
    """What must never happen has happened."""


class SimEtcd:
    """The server."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.streams: dict[SimStream, None] = {}  # in order, for one seed is one story
        self.frozen_until = 0.0
        self.blind_to = ""
        """A mutation: conditions about this key are not looked at."""
        self.stores = 0
        self.roots_written = 0
        self.refused = 0
        self.views: dict[tuple[str, int], dict[str, bytes]] = {}
        """The aliases at each revision of each store."""
        self.wipe()

    def wipe(self) -> None:
        """Begin again with nothing."""
        self.incarnation = f"store-{self.stores + 1}"
        self.revision = 1
        self.compacted = 0
        self.items: dict[str, KeyValue] = {}
        self.log: list[tuple[int, str, KeyValue]] = []
        self.leases: dict[int, SimpleNamespace] = {}
        self._note_view()
        self._restart()

    def backup(self) -> tuple[Any, ...]:
        """What `restore` takes."""
        return self.stores, dict(self.items), dict(self.leases)

    def restore(self, backup: tuple[Any, ...]) -> None:
        """Go back to a backup, as is right: revisions go on far above, and all before is compacted."""
        _, self.items, self.leases = backup[0], dict(backup[1]), dict(backup[2])
        self.revision += 1000
        self.compacted, self.log = self.revision, []
        self._note_view()
        for lease in self.leases.values():
            lease.expires_at = self.loop.time() + lease.ttl_s
        self._restart()

    def _restart(self) -> None:
        self.stores += 1  # old connections reach nothing
        for stream in list(self.streams):
            stream.end()

    def _note_view(self) -> None:
        view = {key: kv.value for key, kv in self.items.items() if key.startswith("aliases/")}
        self.views[self.incarnation, self.revision] = view

    async def run(self) -> None:
        """End leases for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self.loop.time()
            if now < self.frozen_until:
                continue
            for number, lease in sorted(self.leases.items()):
                if lease.expires_at <= now:
                    self.revoke(number)

    def revoke(self, number: int) -> None:
        """End a lease and its keys."""
        if self.leases.pop(number, None) is not None:
            self.write((), [key for key, kv in self.items.items() if kv.lease == number], None)

    def txn(self, compares: Any, puts: Any, deletes: Any, link: Link | None) -> TxnResult:
        """As etcd's."""
        if not all(self._holds(compare) for compare in compares):
            self.refused += 1
            return TxnResult(False, self.revision)
        if any(put.lease and put.lease not in self.leases for put in puts):
            raise LeaseNotFound()
        return TxnResult(True, self.write(puts, deletes, link))

    def write(self, puts: Any, deletes: Any, link: Link | None) -> int:
        """Write at one revision, and tell the watchers."""
        gone = [key for key in deletes if key in self.items]
        if not puts and not gone:
            return self.revision
        revision = self.revision + 1
        events = []
        for put in puts:
            old = self.items.get(put.key)
            if put.key == ROOT_KEY:
                self._check_root(old, put, link)
            created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
            self.items[put.key] = kv = KeyValue(put.key, put.value, created, revision, version, put.lease)
            events.append((revision, "put", kv))
        for key in gone:
            del self.items[key]
            events.append((revision, "delete", KeyValue(key, b"", 0, revision, 0)))
        self.revision = revision
        self.log += events
        self._note_view()
        for stream in list(self.streams):
            stream.push(events)
        return revision

    def compact(self, revision: int) -> None:
        """Forget events before `revision`."""
        self.compacted = max(self.compacted, min(revision, self.revision))
        self.log = [event for event in self.log if event[0] >= self.compacted]

    def _holds(self, compare: Compare) -> bool:
        if compare.key == self.blind_to:
            return True
        kv = self.items.get(compare.key)
        created, modified = (kv.create_revision, kv.mod_revision) if kv else (0, 0)
        if compare.create_revision is not None and created != compare.create_revision:
            return False
        if compare.mod_revision is not None and modified != compare.mod_revision:
            return False
        return compare.exists is None or compare.exists == (kv is not None)

    def _check_root(self, old: KeyValue | None, put: Put, link: Link | None) -> None:
        """The law of publishing: by the leader of this moment, and never an older version."""
        self.roots_written += 1
        leader = self.items.get(LEADER_KEY)
        owner = self.leases[leader.lease].link if leader is not None and leader.lease in self.leases else None
        if owner is not link:
            raise BrokenLaw(f"{link and link.name} published while {owner and owner.name} led")
        new = parse_root(put.value)
        if old is not None and new.version <= parse_root(old.value).version:
            raise BrokenLaw(f"version {new.version} was published over {parse_root(old.value).version}")


class Link:
    """One process's way to the server; `Store`, as the process sees it."""

    def __init__(self, server: SimEtcd, name: str) -> None:
        self.server = server
        self.name = name
        self.state = "up"
        """up, held, lost (nothing arrives, no answer comes), or dead: the process is gone."""
        self.late = 0.0
        """Share of calls that are on the way for seconds."""
        self.streams: dict[SimStream, None] = {}  # in order, for one seed is one story
        self._held: list[Callable[[], None]] = []
        self._loop, self._rng = server.loop, server.rng
        self._lease = 0

    def heal(self) -> None:
        """Work again; what was held arrives now."""
        if self.state != "dead":
            self.state = "up"
        held, self._held = self._held, []
        for deliver in held:
            self._loop.call_later(self._rng.uniform(0.0, 0.05), deliver)
        for stream in list(self.streams):
            stream.flush()

    def cut(self) -> None:
        """Break the watches."""
        for stream in list(self.streams):
            stream.end()

    def delay_s(self) -> float:
        """Of one message."""
        if self._rng.random() < self.late:
            return self._rng.uniform(0.3, 4.0)
        return self._rng.uniform(0.0005, 0.01)

    def deliver(self, action: Callable[[], None], delay_s: float) -> None:
        """Let `action` happen at the other end, if it gets there."""
        store = self.server.stores

        def arrive() -> None:
            if self.state == "held":
                self._held.append(arrive)
            elif self.server.frozen_until > self._loop.time():
                self._loop.call_at(self.server.frozen_until + self._rng.uniform(0.0, 0.1), arrive)
            elif self.state != "lost" and store == self.server.stores:  # a server that restarts has no old connections
                action()

        self._loop.call_later(delay_s, arrive)

    async def _call(self, action: Callable[[], Any], timeout_s: float) -> Any:
        if self.state == "dead":
            raise StoreUnavailable("the process is gone")
        answer: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if not answer.done() and self.state != "dead":
                answer.set_exception(error) if error else answer.set_result(result)

        def execute() -> None:
            result, error = None, None
            try:
                result = action()
            except LeaseNotFound as failed:
                error = failed
            self.deliver(lambda: settle(result, error), self.delay_s())

        self.deliver(execute, self.delay_s())
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise StoreUnavailable("no answer") from None

    async def head(self, *, timeout_s: float = 5.0) -> Head:
        return await self._call(lambda: Head(self.server.incarnation, self.server.revision), timeout_s)

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        return await self._call(lambda: self.server.items.get(key), timeout_s)

    async def range(self, prefix: str, *, timeout_s: float = 5.0) -> Listing:
        def read() -> Listing:
            items = tuple(kv for key, kv in sorted(self.server.items.items()) if key.startswith(prefix))
            return Listing(items, self.server.revision, self.server.incarnation)

        return await self._call(read, timeout_s)

    async def txn(self, compares: Any, puts: Any = (), deletes: Any = (), *, timeout_s: float = 5.0) -> TxnResult:
        compares, puts, deletes = tuple(compares), tuple(puts), tuple(deletes)
        return await self._call(lambda: self.server.txn(compares, puts, deletes, self), timeout_s)

    async def lease_grant(self, ttl_s: int, *, timeout_s: float = 5.0) -> tuple[int, float]:
        def grant() -> tuple[int, float]:
            number = self.server.rng.getrandbits(48)
            expires_at = self._loop.time() + ttl_s
            self.server.leases[number] = SimpleNamespace(ttl_s=ttl_s, expires_at=expires_at, link=self)
            return number, float(ttl_s)

        return await self._call(grant, timeout_s)

    async def lease_keepalive(self, lease: int, *, timeout_s: float = 5.0) -> float:
        def renew() -> float:
            found = self.server.leases.get(lease)
            if found is None:
                raise LeaseNotFound()
            found.expires_at = self._loop.time() + found.ttl_s
            return float(found.ttl_s)

        return await self._call(renew, timeout_s)

    async def lease_revoke(self, lease: int, *, timeout_s: float = 5.0) -> None:
        await self._call(lambda: self.server.revoke(lease), timeout_s)

    # What `PrefixWatch` needs of `EtcdStore`.

    def watch(self, prefix: str, on_reset: Any, on_changes: Any) -> PrefixWatch:
        store: Any = self
        return PrefixWatch(store, prefix, on_reset, on_changes, clock=self._loop.time, jitter=self._rng.random)

    def watch_stream(self, deadline: float) -> SimStream:
        return SimStream(self)

    def watch_request(self, prefix: str, start_revision: int) -> tuple[str, int]:
        return prefix, start_revision

    def progress_request(self) -> None:
        return None

    def item(self, kv: KeyValue) -> KeyValue:
        return kv

    def forget_token(self) -> None:
        return None


class SimStream:
    """One watch; the server pushes, the client reads."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._server, self._loop, self._rng = link.server, link.server.loop, link.server.rng
        self._prefix = ""
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._arrives_at = 0.0
        self._lost_something = False
        self._backlog: list[Any] = []
        """Held back with the link; TCP delivers in order."""
        self.drops = 0
        """Responses that are to vanish on the way."""
        self.repeats = 0
        """Responses that are to come twice."""

    async def __aenter__(self) -> SimStream:
        if self._link.state == "dead":
            raise StoreUnavailable("the process is gone")
        self._link.streams[self] = None
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Break it."""
        self._link.streams.pop(self, None)
        self._server.streams.pop(self, None)
        self._inbox.put_nowait(None)

    async def write(self, message: tuple[str, int] | None, deadline: float) -> None:
        self._link.deliver(lambda: self._open(*message) if message else self.push(()), self._link.delay_s())

    async def read(self, deadline: float) -> Any:
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._inbox.get()
        except TimeoutError:
            raise StoreUnavailable("it has fallen silent") from None
        if response is None:
            raise StoreUnavailable("the stream ended")
        return response

    def push(self, events: Any) -> None:
        """Send events; none of them means a sign of life."""
        found = [event for event in events if event[2].key.startswith(self._prefix)]
        if found or not events:
            self._send(found)

    def _open(self, prefix: str, start: int) -> None:
        if self not in self._link.streams:
            return
        self._prefix = prefix
        if start < self._server.compacted:
            self._send((), compact_revision=self._server.compacted)
            return
        self._send(())
        self._server.streams[self] = None
        missed = [event for event in self._server.log if event[0] >= start and event[2].key.startswith(prefix)]
        while missed:  # in pieces, whole revisions, under the header of the store's head
            last = missed[min(len(missed), self._rng.randint(1, 4)) - 1][0]
            piece = [event for event in missed if event[0] <= last]
            self._send(piece)
            missed = missed[len(piece) :]

    def _send(self, events: Any, *, compact_revision: int = 0) -> None:
        response = SimpleNamespace(
            header=SimpleNamespace(revision=self._server.revision),
            events=[SimpleNamespace(kv=kv, type=int(kind == "delete")) for _, kind, kv in events],
            canceled=bool(compact_revision),
            compact_revision=compact_revision,
            cancel_reason="",
        )
        times = 1
        if events and self.drops:
            self.drops, times = self.drops - 1, 0
        elif events and self.repeats:
            self.repeats, times = self.repeats - 1, 2
        for _ in range(times):
            self._arrives_at = max(self._arrives_at + 1e-6, self._loop.time() + self._link.delay_s())
            self._loop.call_at(self._arrives_at, self._arrive, response)

    def _arrive(self, response: Any) -> None:
        if self._link.state == "held":
            self._backlog.append(response)
        elif self._link.state == "lost" or self._lost_something:
            self._lost_something = True  # a TCP connection with a hole in it delivers nothing more
        else:
            self._inbox.put_nowait(response)

    def flush(self) -> None:
        """Deliver what was held back."""
        backlog, self._backlog = self._backlog, []
        for response in backlog:
            self._arrive(response)
