"""`headrace snapshot` against a real Registry: what it shows, compares, and the way back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli import main
from support.etcd import etcd_process
from support.registry import Registry, running


class Terminal(io.StringIO):
    """What a command prints to; a terminal, when a test says so."""

    is_one = False

    def isatty(self) -> bool:
        return self.is_one


Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    # The Registry runs in this process: its log must not get into what a command prints.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    try:
        async with etcd_process(tmp_path / "etcd") as etcd, running(etcd.endpoint) as started:
            yield started
    finally:
        structlog.reset_defaults()


@pytest.fixture
def headrace(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command line in a thread, on this test's Registry."""
    monkeypatch.setenv("HEADRACE_REGISTRY", f"127.0.0.1:{registry.port}")

    def run(arguments: tuple[object, ...]) -> tuple[int, str, str]:
        out, err = Terminal(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main.run([str(a) for a in arguments])
        return code, out.getvalue(), err.getvalue()

    return lambda *arguments: asyncio.to_thread(run, arguments)


async def document(headrace: Command, *arguments: object) -> Any:
    code, out, err = await headrace("snapshot", *arguments)
    assert code == 0, err
    return json.loads(out)


async def test_a_bad_change_is_found_and_taken_back(registry: Registry, headrace: Command) -> None:
    old = await registry.add("m")
    good = (await registry.shows(lambda s: s.aliases)).version
    new = await registry.add("m", slots=3)
    revoked = resources_pb2.Revocation(name="replicas/r1", reason="it lies")
    await registry.stub.Revoke(pb.RevokeRequest(revocation=revoked), timeout=5)
    await registry.shows(lambda s: len(s.revisions) == 2 and s.aliases[0].targets[0].revision == new and s.revocations)

    now, before = await document(headrace, "show"), await document(headrace, "show", good)
    assert (now["aliases"][0]["targets"], before["aliases"][0]["targets"]) == (f"{new} 100 %", f"{old} 100 %")
    assert now["revocations"] == [{"name": "replicas/r1", "reason": "it lies", "ends running": "no"}]
    kept = await document(headrace, "history")
    assert kept[0]["version"] == now["version"]
    assert good in [root["version"] for root in kept]
    assert [(row["what"], row["name"], bool(row["before"])) for row in await document(headrace, "diff", good)] == [
        ("alias", "aliases/m", True),
        ("revision", new, False),
        ("revocation", "replicas/r1", False),
    ]
    assert await document(headrace, "diff", now["version"], now["version"]) == []

    assert await document(headrace, "rollback", good) == {"version": good, "changed": ["aliases/m"]}
    await registry.shows(lambda s: s.aliases[0].targets[0].revision == old)
    assert (await document(headrace, "show"))["version"] > now["version"]
    assert (await document(headrace, "rollback", good))["changed"] == []


@pytest.mark.parametrize("command", ["show", "diff", "rollback"])
async def test_a_version_that_is_not_kept_is_an_error_that_says_where_to_look(headrace: Command, command: str) -> None:
    code, out, err = await headrace("snapshot", command, 900)
    assert (code, out) == (1, "")
    assert "headrace snapshot history" in err


async def test_people_get_tables(registry: Registry, headrace: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    named = await registry.add("m")
    version = (await registry.shows(lambda s: s.aliases)).version
    monkeypatch.setattr(Terminal, "is_one", True)
    for arguments, words in (
        (("show",), named),
        (("history",), str(version)),
        (("diff", version), "no difference"),
        (("rollback", version), f"the aliases are those of snapshot {version}"),
    ):
        code, out, err = await headrace("snapshot", *arguments)
        assert code == 0, err
        assert words in out.replace("\n", ""), arguments
