"""The durable store: etcd as values and a handful of operations.

Keys are relative to the installation's prefix ("aliases/chat" is stored as "/headrace/aliases/chat"), so nothing
else in the code knows the prefix. Every operation has a deadline, and fails as a `Failure` that may be shown to a
caller, or as one of the exceptions of `etcd_transport` that its caller must tell apart.

Works with etcd 3.4, 3.5 and 3.6.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from aetcd.rpc import rpc_pb2

from headrace.adapters.etcd_settings import EtcdConfig, EtcdSettings, read_config
from headrace.adapters.etcd_stream import EtcdStream
from headrace.adapters.etcd_transport import (
    AccessDenied,
    EtcdTransport,
    StoreUnavailable,
)
from headrace.adapters.etcd_watch import PrefixWatch
from headrace.control.errors import Failure
from headrace.control.watch_cursor import Change
from headrace.runtime.ports import (
    Compacted,
    Compare,
    Head,
    KeyValue,
    LeaseNotFound,
    Listing,
    Page,
    Put,
    SwapResult,
    TxnResult,
    Watch,
)
from headrace.runtime.settings import SettingsError

TIMEOUT_S = 5.0
"""Deadline of one operation, seconds; a healthy etcd answers in a millisecond."""

CONNECT_TIMEOUT_S = 10.0
"""How long a service waits for etcd when it starts, seconds."""

PAGE = 1000
"""Keys in one page of a listing; a page stays far below what a message may hold."""

LIST_TRIES = 5
"""How often a listing starts over because its revision was compacted under it."""

INCARNATION = "incarnation"
"""Key with a UUID, written once: a wiped store has another one, and nothing else to be told apart by."""


class EtcdStore:
    """One process's store. Open it with `connect`; close it with `aclose`."""

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._transport = EtcdTransport(config)

    @classmethod
    async def connect(cls, settings: EtcdSettings, service: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> EtcdStore:
        """Connect, and wait until etcd answers.

        Args:
            settings: where it is.
            service: whose settings they are, for the error text.
            timeout_s: how long to wait for it, seconds.

        Raises:
            SettingsError: it did not answer, or refused the credentials; names the setting and the endpoints.
        """
        store = cls(read_config(settings, service))
        try:
            await store.wait_ready(timeout_s)
        except Failure as failure:
            await store.aclose()
            setting = "etcd_username" if isinstance(failure, AccessDenied) else "etcd"
            where = ", ".join(settings.etcd)
            raise SettingsError(
                f"{service} setting '{setting}': cannot reach etcd at {where} within {timeout_s:g} s "
                f"({failure.message.rstrip('.')}). Start etcd there, or correct the setting."
            ) from None
        except BaseException:
            await store.aclose()
            raise
        return store

    async def wait_ready(self, timeout_s: float) -> Head:
        """Wait until the store answers a linearizable read.

        Raises:
            StoreUnavailable: it did not within `timeout_s` seconds.
            AccessDenied: it refuses the credentials.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                return await self.head(timeout_s=max(min(left_s, TIMEOUT_S), 0.05))
            except AccessDenied:
                raise
            except Failure:
                if left_s <= 0.2:
                    raise
            await asyncio.sleep(0.1)

    @property
    def endpoint(self) -> str:
        """host:port in use."""
        return self._transport.endpoint

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    # Reading.

    async def head(self, *, timeout_s: float = TIMEOUT_S) -> Head:
        """Return the incarnation ("" if none was drawn yet) and the revision, by a linearizable read."""
        request = rpc_pb2.RangeRequest(key=self._raw(INCARNATION))
        reply = await self._unary("KV/Range", request, rpc_pb2.RangeResponse, timeout_s, repeatable=True)
        return Head(reply.kvs[0].value.decode() if reply.kvs else "", reply.header.revision)

    async def get(self, key: str, *, timeout_s: float = TIMEOUT_S) -> KeyValue | None:
        """Return one key, or None, by a linearizable read."""
        request = rpc_pb2.RangeRequest(key=self._raw(key))
        reply = await self._unary("KV/Range", request, rpc_pb2.RangeResponse, timeout_s, repeatable=True)
        return self._item(reply.kvs[0]) if reply.kvs else None

    async def range(self, prefix: str, *, timeout_s: float = TIMEOUT_S) -> Listing:
        """Return everything below `prefix`, ordered by key, at one revision, page by page.

        Draws the store's incarnation if there is none yet.
        """
        for _ in range(LIST_TRIES):
            try:
                return await self._list(prefix, timeout_s)
            except Compacted:
                continue
        raise StoreUnavailable("it compacts faster than a listing can be read")

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = "",
        newest_first: bool = False,
        keys_only: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> Page:
        """Return the next `limit` keys below `prefix`, as they are now.

        Args:
            prefix: ends in "/".
            limit: at most so many, 1 or more.
            after: the last key of the page before; "" for the first page.
            newest_first: from the highest key to the lowest.
            keys_only: leave the values out.
            timeout_s: deadline, seconds.
        """
        low, high = self._bounds(prefix)
        if after and newest_first:
            high = self._raw(after)
        elif after:
            low = self._raw(after) + b"\0"
        order = rpc_pb2.RangeRequest.DESCEND if newest_first else rpc_pb2.RangeRequest.NONE
        request = rpc_pb2.RangeRequest(
            key=low, range_end=high, limit=limit, sort_order=order, sort_target=rpc_pb2.RangeRequest.KEY,
            keys_only=keys_only,
        )  # fmt: skip
        reply = await self._unary("KV/Range", request, rpc_pb2.RangeResponse, timeout_s, repeatable=True)
        return Page(tuple(map(self._item, reply.kvs)), reply.count)

    async def _list(self, prefix: str, timeout_s: float) -> Listing:
        # Plain reads only: a store whose space is used up may refuse even a transaction that writes nothing.
        incarnation = await self._drawn_incarnation(timeout_s)
        low, high = self._bounds(prefix)
        items: list[KeyValue] = []
        revision, more = 0, True
        while more:
            start = self._raw(items[-1].key) + b"\0" if items else low
            page = rpc_pb2.RangeRequest(key=start, range_end=high, limit=PAGE, revision=revision)
            found = await self._unary("KV/Range", page, rpc_pb2.RangeResponse, timeout_s, repeatable=True)
            items.extend(self._item(kv) for kv in found.kvs)
            revision, more = revision or found.header.revision, found.more
        if (await self.head(timeout_s=timeout_s)).incarnation != incarnation:
            raise StoreUnavailable("it was wiped a moment ago")
        return Listing(tuple(items), revision, incarnation)

    async def _drawn_incarnation(self, timeout_s: float) -> str:
        head = await self.head(timeout_s=timeout_s)
        if head.incarnation:
            return head.incarnation
        new = str(uuid.uuid4())
        put = Put(INCARNATION, new.encode())
        done = await self.txn([Compare(INCARNATION, create_revision=0)], [put], timeout_s=timeout_s)
        return new if done.succeeded else (await self.head(timeout_s=timeout_s)).incarnation

    # Writing.

    async def put(self, key: str, value: bytes, *, lease: int = 0, timeout_s: float = TIMEOUT_S) -> int:
        """Write one key; returns the revision of the write.

        Raises:
            LeaseNotFound: `lease` has expired.
        """
        return (await self.txn((), [Put(key, value, lease)], timeout_s=timeout_s)).revision

    async def delete(self, key: str, *, timeout_s: float = TIMEOUT_S) -> bool:
        """Delete one key; returns whether it existed."""
        request = rpc_pb2.DeleteRangeRequest(key=self._raw(key))
        reply = await self._unary("KV/DeleteRange", request, rpc_pb2.DeleteRangeResponse, timeout_s)
        return bool(reply.deleted)

    async def txn(
        self,
        compares: Sequence[Compare],
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> TxnResult:
        """Write all of it if all conditions hold, else nothing.

        After a StoreUnavailable it may have happened: read before trying again.

        Raises:
            LeaseNotFound: the lease of a put has expired.
        """
        request = rpc_pb2.TxnRequest(
            compare=[wire for compare in compares for wire in self._compare(compare)],
            success=[
                *(
                    rpc_pb2.RequestOp(
                        request_put=rpc_pb2.PutRequest(key=self._raw(p.key), value=p.value, lease=p.lease)
                    )
                    for p in puts
                ),
                *(
                    rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=self._raw(key)))
                    for key in deletes
                ),
            ],
        )
        reply = await self._unary("KV/Txn", request, rpc_pb2.TxnResponse, timeout_s)
        return TxnResult(reply.succeeded, reply.header.revision)

    async def swap(self, put: Put, mod_revision: int, *, timeout_s: float = TIMEOUT_S) -> SwapResult:
        """Write a key if it was last written at `mod_revision` (0: does not exist); else read it, in one transaction.

        After a StoreUnavailable it may have happened.

        Raises:
            LeaseNotFound: the lease of `put` has expired.
        """
        key = self._raw(put.key)
        request = rpc_pb2.TxnRequest(
            compare=self._compare(Compare(put.key, mod_revision=mod_revision)),
            success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=put.value, lease=put.lease))],
            failure=[rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))],
        )
        reply = await self._unary("KV/Txn", request, rpc_pb2.TxnResponse, timeout_s)
        if reply.succeeded:
            return SwapResult(reply.header.revision)
        kvs = reply.responses[0].response_range.kvs
        return SwapResult(0, self._item(kvs[0]) if kvs else None)

    # Leases.

    async def lease_grant(self, ttl_s: int, *, timeout_s: float = TIMEOUT_S) -> tuple[int, float]:
        """Grant a lease; returns its id and the seconds it really lasts."""
        request = rpc_pb2.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._unary("Lease/LeaseGrant", request, rpc_pb2.LeaseGrantResponse, timeout_s)
        return reply.ID, float(reply.TTL)

    async def lease_keepalive(self, lease: int, *, timeout_s: float = TIMEOUT_S) -> float:
        """Renew a lease; returns the seconds it lasts from when this was sent.

        Raises:
            LeaseNotFound: it has expired; etcd says so by a TTL of 0.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        reply: Any = None
        async with self._stream("Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveResponse, deadline) as stream:
            await stream.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease), deadline)
            reply = await stream.read(deadline)
        if reply.TTL <= 0:
            raise LeaseNotFound()
        return float(reply.TTL)

    async def lease_revoke(self, lease: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """End a lease; its keys go with it. One that is gone already is no error."""
        try:
            request = rpc_pb2.LeaseRevokeRequest(ID=lease)
            await self._unary("Lease/LeaseRevoke", request, rpc_pb2.LeaseRevokeResponse, timeout_s)
        except LeaseNotFound:
            return

    # Watching: the wire only. `etcd_watch` decides.

    def watch(
        self,
        prefix: str,
        on_reset: Callable[[Listing], None],
        on_changes: Callable[[tuple[Change, ...]], None],
    ) -> Watch:
        """Follow everything below `prefix`; see `etcd_watch.PrefixWatch`."""
        return PrefixWatch(self, prefix, on_reset, on_changes)

    def watch_stream(self, deadline: float) -> EtcdStream:
        """Open the stream of watches; it fails fast on a member that has lost its leader."""
        return self._stream("Watch/Watch", rpc_pb2.WatchResponse, deadline, (("hasleader", "true"),))

    def watch_request(self, prefix: str, start_revision: int) -> rpc_pb2.WatchRequest:
        """The request that starts a watch of everything below `prefix`."""
        low, high = self._bounds(prefix)
        return rpc_pb2.WatchRequest(
            create_request=rpc_pb2.WatchCreateRequest(key=low, range_end=high, start_revision=start_revision)
        )

    def progress_request(self) -> rpc_pb2.WatchRequest:
        """The request for a sign of life on a stream of watches."""
        return rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())

    def item(self, kv: Any) -> KeyValue:
        """A stored key from its message."""
        return self._item(kv)

    def forget_token(self) -> None:
        """Authenticate again before the next call: a watch was ended for an old token."""
        self._transport.forget_token()

    # Private.

    def _stream(
        self, method: str, reply: Any, deadline: float, metadata: tuple[tuple[str, str], ...] = ()
    ) -> EtcdStream:
        return EtcdStream(self._transport, method, reply, deadline, metadata)

    async def _unary(self, method: str, request: Any, reply: Any, timeout_s: float, *, repeatable: bool = False) -> Any:
        return await self._transport.unary(method, request, reply, timeout_s=timeout_s, repeatable=repeatable)

    def _raw(self, key: str) -> bytes:
        return f"{self._config.prefix}/{key}".encode()

    def _bounds(self, prefix: str) -> tuple[bytes, bytes]:
        """First key of the range, and the one just past it: the same with its last byte ("/" or a letter) raised."""
        low = self._raw(prefix)
        return low, low[:-1] + bytes([low[-1] + 1])

    def _item(self, kv: Any) -> KeyValue:
        key = kv.key.decode("utf-8", errors="replace").removeprefix(f"{self._config.prefix}/")
        return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)

    def _compare(self, compare: Compare) -> list[Any]:
        key, equal = self._raw(compare.key), rpc_pb2.Compare.EQUAL
        wire = []
        if compare.create_revision is not None:
            target = rpc_pb2.Compare.CREATE
            wire.append(rpc_pb2.Compare(result=equal, target=target, key=key, create_revision=compare.create_revision))
        if compare.mod_revision is not None:
            wire.append(
                rpc_pb2.Compare(result=equal, target=rpc_pb2.Compare.MOD, key=key, mod_revision=compare.mod_revision)
            )
        if compare.exists is not None:
            result = rpc_pb2.Compare.GREATER if compare.exists else equal
            wire.append(rpc_pb2.Compare(result=result, target=rpc_pb2.Compare.CREATE, key=key, create_revision=0))
        if compare.unchanged_since is not None:
            low, high = self._bounds(compare.key)
            after = compare.unchanged_since + 1
            less, mod = rpc_pb2.Compare.LESS, rpc_pb2.Compare.MOD
            wire.append(rpc_pb2.Compare(result=less, target=mod, key=low, range_end=high, mod_revision=after))
        return wire
