"""etcd for the fault suite: one member, or three with a proxy before each one's peer port, and maintenance calls."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aetcd.rpc import rpc_pb2

from faults.proxy import Proxy
from headrace.adapters.etcd import EtcdStore
from headrace.adapters.etcd_process import EtcdProcess
from headrace.adapters.etcd_settings import EtcdConfig
from support.etcd import eventually, free_port

QUOTA_BYTES = 24 * 1024 * 1024
_FROM = re.compile(rb"X-Server-From: ([0-9a-f]+)")


class Members:
    """The members of one etcd, and the ways between them."""

    def __init__(self, processes: list[EtcdProcess], peers: list[Proxy]) -> None:
        self.processes = processes
        self.peers = peers
        self.cut_off: set[str] = set()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of each, for clients."""
        return tuple(process.endpoint for process in self.processes)

    async def status(self, index: int) -> Any:
        """What member `index` says of itself."""
        store = EtcdStore(EtcdConfig((self.endpoints[index],)))
        try:
            return await store._unary("Maintenance/Status", rpc_pb2.StatusRequest(), rpc_pb2.StatusResponse, 3.0)
        finally:
            await store.aclose()

    async def leader(self) -> int:
        """Index of the member that leads, by what a majority says; -1 when there is none."""
        leaders, ids = [], {}
        for index, process in enumerate(self.processes):
            if process.pid is None:
                continue
            with contextlib.suppress(Exception):
                status = await self.status(index)
                ids[status.header.member_id] = index
                leaders.append(status.leader)
        for leader in set(leaders):
            if leader in ids and leaders.count(leader) > len(self.processes) // 2:
                return ids[leader]
        return -1

    async def cut_off_member(self, index: int) -> None:
        """Neither hear nor be heard by the other members. Connections say in their first bytes who opened them."""
        member = f"{(await self.status(index)).header.member_id:x}"
        for number, peer in enumerate(self.peers):
            if number == index:
                peer.blocked = lambda origin: True
            else:
                peer.blocked = lambda origin, member=member: origin in (member, "")

    def heal(self) -> None:
        """Join all members again."""
        for peer in self.peers:
            peer.heal()
            peer.cut()  # what a connection has lost cannot be made good


def _origin(data: bytes) -> str:
    found = _FROM.search(data)
    return found[1].decode() if found else ""


@contextlib.asynccontextmanager
async def members(directory: Path, count: int) -> AsyncIterator[Members]:
    """Run `count` members while the block runs."""
    async with contextlib.AsyncExitStack() as stack:
        peers: list[Proxy] = []
        processes: list[EtcdProcess] = []
        ports = [free_port() for _ in range(count)]
        if count > 1:
            for port in ports:
                peers.append(await stack.enter_async_context(Proxy(port, identify=_origin)))
        cluster = ",".join(f"m{n}=http://{peer.endpoint}" for n, peer in enumerate(peers))
        for number in range(count):
            arguments: tuple[str, ...] = ()
            if count > 1:
                arguments = (
                    f"--name=m{number}",
                    f"--listen-peer-urls=http://127.0.0.1:{ports[number]}",
                    f"--initial-advertise-peer-urls=http://{peers[number].endpoint}",
                    f"--initial-cluster={cluster}",
                    "--heartbeat-interval=200",
                    "--election-timeout=2000",
                )
            process = EtcdProcess(directory / f"etcd-{number}", quota_bytes=QUOTA_BYTES, arguments=arguments)
            processes.append(process)
            stack.push_async_callback(_end, process)
            await process.start(wait_ready=count == 1)
        found = Members(processes, peers)
        if count > 1:
            await eventually(lambda: _has_leader(found), 30, "a leader of the etcd cluster")
        yield found


async def _has_leader(found: Members) -> bool:
    return await found.leader() >= 0


async def _end(process: EtcdProcess) -> None:
    if process.pid is not None:
        process.resume()
    await process.kill()


async def compact(store: EtcdStore, revision: int = 0) -> int:
    """Compact up to `revision`, or the head; returns it."""
    revision = revision or (await store.head()).revision
    request = rpc_pb2.CompactionRequest(revision=revision, physical=True)
    await store._unary("KV/Compact", request, rpc_pb2.CompactionResponse, 10)
    return revision


async def defragment(store: EtcdStore) -> None:
    """Give free pages back; the member stands still meanwhile."""
    await store._unary("Maintenance/Defragment", rpc_pb2.DefragmentRequest(), rpc_pb2.DefragmentResponse, 30)


async def alarms(store: EtcdStore) -> list[Any]:
    """Alarms that are raised."""
    request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET)
    return list((await store._unary("Maintenance/Alarm", request, rpc_pb2.AlarmResponse, 5)).alarms)


async def disarm(store: EtcdStore) -> None:
    """Take the alarms back."""
    for alarm in await alarms(store):
        request = rpc_pb2.AlarmRequest(
            action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=alarm.memberID, alarm=alarm.alarm
        )
        await store._unary("Maintenance/Alarm", request, rpc_pb2.AlarmResponse, 5)
