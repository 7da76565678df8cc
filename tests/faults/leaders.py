"""Faults of the Registry that leads: killed while it publishes, or held up until another one leads."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

from faults.examine import HEALED, Breaking, Proof
from faults.proxy import Way
from faults.readers import held_by
from faults.rig import Rig, Service
from headrace.runtime.snapshot_follower import ROOT_KEY
from support.etcd import eventually

ROOT = ROOT_KEY.encode()
LIKELY_S = 30.0


def killed_while_publishing(*, arrives: bool) -> Breaking:
    """The leader is killed with its transaction on the way, which arrives or does not; another one takes over."""

    async def killed(rig: Rig) -> AsyncIterator[Proof]:
        leader = await rig.leading()
        caught = asyncio.Event()

        def strike(way: Way, data: bytes) -> None:
            if way is Way.UP and ROOT in data and not caught.is_set():
                caught.set()
                for proxy in leader.proxies:
                    proxy.hold(Way.DOWN if arrives else Way.UP)
                assert leader.part is not None
                if not arrives:
                    leader.part.kill()

        await _trap(leader, strike, caught)
        if arrives:
            await asyncio.sleep(0.1)
            assert leader.part is not None
            leader.part.kill()
        assert leader.part is not None
        await asyncio.wait([leader.part.ended], timeout=5)
        yield "killed between sending a publication and its answer", caught.is_set() and not leader.is_up
        yield HEALED
        heir = await rig.leading()
        yield f"{heir.name} leads after {leader.name}", heir is not leader
        for proxy in leader.proxies:
            proxy.heal()
        await rig.start(leader)
        await rig.serving(leader)

    return killed


async def late_write(rig: Rig) -> AsyncIterator[Proof]:
    """The leader stops in the middle of publishing; when another one leads and has published, its write arrives."""
    leader = await rig.leading()
    caught = asyncio.Event()

    def strike(way: Way, data: bytes) -> None:
        if way is Way.UP and ROOT in data and not caught.is_set():
            caught.set()
            for proxy in leader.proxies:
                proxy.hold(Way.UP)
            os.kill(leader.pid, signal.SIGSTOP)

    await _trap(leader, strike, caught)
    held = sum(proxy.held_chunks for proxy in leader.proxies)
    other = next(service for service in rig.of("registry") if service is not leader)
    try:
        await eventually(lambda: _leads(rig, other), LIKELY_S, "the other Registry leads")
        before = (await held_by(rig.store)).version
        await eventually(lambda: _has_published(rig, before), LIKELY_S, "the new leader has published")
        published = (await held_by(rig.store)).version
        yield f"{other.name} has published version {published} meanwhile", published > before
        for proxy in leader.proxies:
            proxy.heal()
        await asyncio.sleep(0.5)  # the late write arrives here, at an etcd that must refuse it
        after = (await held_by(rig.store)).version
        yield f"a late write was held back ({held} chunks); the store went on to {after}", after >= published
    finally:
        os.kill(leader.pid, signal.SIGCONT)
    yield HEALED


async def _trap(leader: Service, strike: Callable[[Way, bytes], None], caught: asyncio.Event) -> None:
    for proxy in leader.proxies:
        proxy.trap = strike
    try:
        await asyncio.wait_for(caught.wait(), LIKELY_S)
    finally:
        for proxy in leader.proxies:
            proxy.trap = lambda way, data: None
    await asyncio.sleep(0.05)


async def _leads(rig: Rig, service: Service) -> bool:
    return await rig.leading() is service


async def _has_published(rig: Rig, version: int) -> bool:
    return (await held_by(rig.store)).version > version


LEADERS: dict[str, Breaking] = {
    "leader killed, its publication lost": killed_while_publishing(arrives=False),
    "leader killed, its publication arrives": killed_while_publishing(arrives=True),
    "old leader's write arrives late": late_write,
}
