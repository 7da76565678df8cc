"""A link to a Scheduler that does not answer gives up in time, so that it can try again."""

from __future__ import annotations

import asyncio
import socket

import pytest

from headrace.router import links
from headrace.router.links import SchedulerLink
from headrace.rpc.channels import internal_channel


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
