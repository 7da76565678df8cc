"""A link gives up a Scheduler that does not answer, and keeps its count in line with what a Scheduler has."""

from __future__ import annotations

import asyncio
import socket

import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.control.errors import Reason
from headrace.router import links
from headrace.router.links import SchedulerLink
from headrace.rpc.channels import internal_channel
from router.harness import collect, failure, running, soon, until


async def test_a_peer_that_accepts_and_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "WELCOME_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        link = SchedulerLink(endpoint, router="routers/test", incarnation="1")
        async with internal_channel(endpoint) as channel:
            async with asyncio.timeout(5) as bound:
                with pytest.raises(TimeoutError):
                    await link._session(channel)
            assert not bound.expired(), "given up by its own deadline, not by the test's"
        assert not link.is_up


async def test_an_attempt_that_the_scheduler_does_not_know_is_lost_and_one_that_nobody_knows_is_cancelled() -> None:
    async with running(replicas=1) as h:
        link = h.routes.links[0]
        gone = asyncio.create_task(collect(h.generate()))
        await h.admitted()
        kept = asyncio.create_task(collect(h.generate()))
        second = await h.admitted()
        link.ask_inventory()
        asked = await soon(h.scheduler.inventories)
        await h.scheduler.send(inventory=sp.Inventory(number=asked, attempts=[second.attempt, 77]))
        _, error = await gone
        assert failure(error).reason is Reason.WORKER_LOST_BEFORE_OUTPUT
        cancel = await soon(h.scheduler.cancels)
        assert (cancel.attempt, cancel.cause) == (77, pb.FINISH_REASON_CANCELLED)
        assert (link.attempts, link.inventory.lost, link.inventory.unknown) == (1, 1, 1)
        await h.scheduler.end(second.attempt)
        assert (await kept)[1] is None
        assert link.attempts == 0


async def test_an_end_that_does_not_count_leaves_nothing_behind() -> None:
    """The Scheduler has ended it, this side did not believe it: without the question it would count for ever."""
    async with running(replicas=1) as h:
        link = h.routes.links[0]
        answer = asyncio.create_task(collect(h.generate()))
        dispatch = await h.admitted()
        await h.scheduler.end(dispatch.attempt, record_version=dispatch.record_version + 1)
        link.ask_inventory()
        asked = await soon(h.scheduler.inventories)
        assert link.attempts == 1
        await h.scheduler.send(inventory=sp.Inventory(number=asked))
        assert failure((await answer)[1]).reason is Reason.WORKER_LOST_BEFORE_OUTPUT
        await until(lambda: not list(h.service.sessions))
        assert link.attempts == 0
        assert h.service.sessions.resources.references == 0


async def test_it_is_asked_now_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ASK_EVERY_S", 0.05)
    async with running(replicas=1) as h:
        assert [await soon(h.scheduler.inventories) for _ in range(3)] == [1, 2, 3]
