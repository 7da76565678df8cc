from collections.abc import AsyncIterator

import pytest

from support.scripted import Asker, Script, Scripted, Serve, start


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start scripted services; all are stopped at the end."""
    running: list[Scripted] = []

    async def serve_scripts(*scripts: Script) -> Scripted:
        running.append(await start(*scripts))
        return running[-1]

    yield serve_scripts
    for service in running:
        await service.server.stop(0)


@pytest.fixture(params=["aio", "blocking", "aio-plain", "blocking-plain"])
def ask(request: pytest.FixtureRequest) -> Asker:
    """Each test runs with both clients, in both forms."""
    return Asker(request.param)
