"""`headrace tenant` against a real API: what it changes, prints and refuses, and that a key is printed once, alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from headrace.api.registry.v1 import resources_pb2
from headrace.cli.main import run
from support.registry_api import Api


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Command = Callable[..., Awaitable[Ended]]


@pytest.fixture
def tenant(api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`headrace tenant`, in a thread, talking to `api`."""
    monkeypatch.setenv("HEADRACE_REGISTRY", api.endpoint)

    async def command(*arguments: str, terminal: bool = False) -> Ended:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: terminal)
            patch.setenv("COLUMNS", "300")
            code = await asyncio.to_thread(run, ["tenant", *arguments])
        return Ended(code, *capsys.readouterr())

    return command


async def test_a_tenant_is_made_changed_where_said_and_reset(tenant: Command) -> None:
    made = (
        await tenant(
            "set", "acme", "--requests-per-minute", "60", "--model", "aliases/chat", "--model", "models/m",
            "--priority-ceiling", "critical", "--certificate", "spiffe://acme", "--label", "team=a",
        )
    ).document  # fmt: skip
    assert made["name"] == "tenants/acme"
    assert made["allowed_models"] == ["aliases/chat", "models/m"]
    assert (made["requests_per_minute"], made["priority"], made["priority_ceiling"]) == (60, "standard", "critical")
    changed = (await tenant("set", "tenants/acme", "--concurrency", "2", "--model", "models/n")).document
    expected = {**made, "concurrency": 2, "allowed_models": ["models/n"]}
    assert {**changed, "etag": "", "updated": ""} == {**expected, "etag": "", "updated": ""}
    assert (await tenant("show", "acme")).document == changed
    reset = (await tenant("set", "acme", "--reset", "--concurrency", "3")).document
    assert (reset["requests_per_minute"], reset["concurrency"], reset["labels"]) == (0, 3, {})


async def test_a_key_is_printed_once_and_alone(api: Api, tenant: Command) -> None:
    await tenant("set", "acme")
    made = await tenant("key", "create", "acme", "ci", "--lifetime", "90d")
    secret = made.out.strip()
    assert made.out == f"{secret}\n"
    assert secret.startswith("hr_")
    assert "tenants/acme/keys/ci, accepted until 20" in made.err
    assert secret not in made.err
    stored = await api.store.get("tenants/acme")
    assert stored is not None
    assert resources_pb2.Tenant.FromString(stored.value).keys[0].sha256 == hashlib.sha256(secret.encode()).digest()
    shown = (await tenant("show", "acme")).document["keys"]
    assert [(key["name"], bool(key["expires"])) for key in shown] == [("tenants/acme/keys/ci", True)]
    deleted = await tenant("key", "delete", "acme", "ci")
    assert (deleted.code, deleted.out) == (0, "deleted tenants/acme/keys/ci\n")
    assert (await tenant("key", "delete", "acme", "ci")).code == 1


async def test_people_get_tables(tenant: Command) -> None:
    await tenant("set", "acme", "--concurrency", "7", "--zone", "z1")
    await tenant("key", "create", "acme", "ci")
    listed = await tenant("list", terminal=True)
    assert "tenants/acme" in listed.out
    shown = await tenant("show", "acme", terminal=True)
    assert "ci (made 20" in shown.out
    assert "priority ceiling" in shown.out
    assert [found["name"] for found in (await tenant("list")).document] == ["tenants/acme"]
    deleted = await tenant("delete", "acme")
    assert deleted.out == "deleted tenants/acme\n"
    assert (await tenant("list")).document == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("show", "none"), 1, "tenants/none does not exist"),
        (("key", "create", "none", "k"), 1, "tenants/none does not exist"),
        (("key", "create", "acme", "k", "--lifetime", "soon"), 2, "'soon' is no lifetime"),
        (("set", "acme", "--model", "chat"), 2, "must be aliases/ID or models/ID"),
        (("set", "acme", "--priority", "urgent"), 2, "urgent"),
        (("set", "acme", "--etag", "7"), 1, "is not in the state"),
    ],
)
async def test_what_cannot_be_is_one_sentence(
    tenant: Command, arguments: tuple[str, ...], code: int, words: str
) -> None:
    await tenant("set", "acme")
    ended = await tenant(*arguments)
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err


@pytest.mark.parametrize("arguments", [(), ("set",), ("key",), ("key", "create"), ("list",), ("show",), ("delete",)])
async def test_help_teaches(tenant: Command, arguments: tuple[str, ...]) -> None:
    ended = await tenant(*arguments, "--help")
    assert ended.code == 0
    assert "Usage: headrace tenant" in ended.out
