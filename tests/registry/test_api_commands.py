"""`headrace alias`, `audit` and `revoke` against a real API: what they change, print and refuse."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.cli import actor
from headrace.cli.main import run
from support.registry_api import Api

GONE = "models/gone/revisions/0123456789ab"


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Command = Callable[..., Awaitable[Ended]]


@pytest.fixture
def headrace(api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line, in a thread, talking to `api`."""
    monkeypatch.setenv("HEADRACE_REGISTRY", api.endpoint)

    async def command(*arguments: str, terminal: bool = False) -> Ended:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: terminal)
            patch.setenv("COLUMNS", "300")
            code = await asyncio.to_thread(run, arguments)
        return Ended(code, *capsys.readouterr())

    return command


async def test_an_alias_is_set_listed_and_deleted(api: Api, headrace: Command) -> None:
    one, two = await api.revision("m", slots=1), await api.revision("m", slots=2)
    stored = (await headrace("alias", "set", "chat-prod", f"{one}=90", f"{two}=10", "--label", "env=prod")).document
    assert stored["name"] == "aliases/chat-prod"
    assert [(t["revision"], t["weight"], t["share"]) for t in stored["targets"]] == [(one, 90, "90%"), (two, 10, "10%")]
    assert stored["labels"] == {"env": "prod"}
    await headrace("alias", "set", "aliases/other", one)
    assert [a["name"] for a in (await headrace("alias", "list")).document] == ["aliases/chat-prod", "aliases/other"]
    assert (await headrace("alias", "list", "--label", "env=prod")).document == [stored]
    shown = (await headrace("alias", "list", terminal=True)).out
    assert f"{one} (90%)" in shown
    assert "env=prod" in shown
    deleted = await headrace("alias", "delete", "chat-prod", "--etag", stored["etag"])
    assert (deleted.code, deleted.out) == (0, "deleted aliases/chat-prod\n")
    again = await headrace("alias", "delete", "chat-prod")
    assert (again.code, "NOT_FOUND" in again.err) == (1, True)


async def test_an_alias_is_only_written_over_the_state_that_the_etag_stands_for(api: Api, headrace: Command) -> None:
    one = await api.revision()
    stored = (await headrace("alias", "set", "chat", one)).document
    changed = (await headrace("alias", "set", "chat", f"{one}=2", "--etag", stored["etag"])).document
    assert changed["etag"] != stored["etag"]
    for arguments in (["set", "chat", f"{one}=3"], ["delete", "chat"]):
        refused = await headrace("alias", *arguments, "--etag", stored["etag"])
        assert (refused.code, "ETAG_MISMATCH" in refused.err) == (1, True)
    assert (await headrace("alias", "list")).document == [changed]


async def test_labels_of_an_alias_stay_unless_others_are_given(api: Api, headrace: Command) -> None:
    one, two = await api.revision("m", slots=1), await api.revision("m", slots=2)
    await headrace("alias", "set", "chat", one, "--label", "a=1", "--label", "b=2")
    assert (await headrace("alias", "set", "chat", two)).document["labels"] == {"a": "1", "b": "2"}
    assert (await headrace("alias", "set", "chat", two, "--label", "c=3")).document["labels"] == {"c": "3"}
    assert (await headrace("alias", "set", "chat", two, "--no-labels")).document["labels"] == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["alias", "set", "chat", f"{GONE}=x"], "the weight must be a whole number"),
        (["alias", "set", "chat", f"{GONE}=0"], "the weight must be a whole number"),
        (["alias", "set", "chat", f"{GONE}="], "the weight must be a whole number"),
        (["alias", "set", "chat", "nonsense"], "alias.targets[0].revision"),
        (["alias", "set", "Chat", GONE], "alias.name"),
        (["alias", "set", "chat"], "Missing argument"),
        (["alias", "list", "--label", "x"], "must be KEY=VALUE"),
        (["revoke", "replicas/r"], "--reason is missing"),
        (["revoke", "nonsense", "--reason", "x"], "revocation.name"),
        (["revoke", "--reason", "x"], "NAME is missing"),
        (["revoke", "--lift"], "NAME is missing"),
        (["revoke"], "NAME is missing"),
        (["revoke", "replicas/r", "--list"], "--list takes nothing else"),
        (["revoke", "--lift", "replicas/r", "--reason", "x"], "--lift takes neither"),
        (["audit", "--limit", "0"], "--limit"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
async def test_what_cannot_be_meant_is_one_sentence_and_changes_nothing(
    api: Api, headrace: Command, arguments: list[str], says: str
) -> None:
    ended = await headrace(*arguments)
    assert ended.code == 2, ended.err
    assert says in ended.err
    assert not await api.audit()


async def test_what_does_not_exist_is_told_with_its_name(headrace: Command) -> None:
    ended = await headrace("alias", "set", "chat", GONE)
    assert ended.code == 1
    assert ended.err.startswith(f"headrace: NOT_FOUND: {GONE} does not exist.")


async def test_the_audit_shows_who_changed_what(api: Api, headrace: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "user_name", lambda: "Änne")
    one, two = await api.revision("m", slots=1), await api.revision("m", slots=2)
    await headrace("alias", "set", "chat", one)
    await headrace("alias", "set", "chat", two)
    second, first = (await headrace("audit", "aliases/chat")).document
    assert (first["method"], first["resource"], first["before"]) == ("SetAlias", "aliases/chat", None)
    assert second["before"]["targets"][0]["revision"] == first["after"]["targets"][0]["revision"] == one
    assert first["actor"].startswith("Änne (ipv4:127.0.0.1:")
    assert len((await headrace("audit")).document) == 4
    three = (await headrace("audit", "--limit", "3")).document
    assert (len(three), three[0]) == (3, second)
    lines = (await headrace("audit", "aliases/chat", terminal=True)).out.splitlines()
    assert "SetAlias" in lines[1]
    assert "targets: [{" in lines[1]
    assert lines[2].rstrip().endswith("created")


def test_the_actor_is_the_user_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_USER", raising=False)
    name = actor.user_name()
    assert name
    monkeypatch.setenv("USER", "somebody-else")
    assert actor.user_name() == name
    monkeypatch.setenv("SUDO_USER", "ada")
    assert actor.user_name() == f"ada as {name}"


async def test_something_is_revoked_listed_and_lifted(headrace: Command) -> None:
    await headrace("revoke", "replicas/r1", "--reason", "ECC errors")
    (made,) = (await headrace("revoke", GONE, "--reason", "leak", "--end-running")).document
    assert (made["name"], made["reason"], made["end_running"]) == (GONE, "leak", True)
    listed = (await headrace("revoke", "--list")).document
    assert [(r["name"], r["end_running"]) for r in listed] == [(GONE, True), ("replicas/r1", False)]
    shown = (await headrace("revoke", "--list", terminal=True)).out
    assert "ECC errors" in shown
    assert "finish" in shown
    lifted = await headrace("revoke", "--lift", "replicas/r1")
    assert (lifted.code, lifted.out) == (0, "lifted replicas/r1\n")
    assert (await headrace("revoke", "--lift", "replicas/r1")).code == 1
    assert len((await headrace("revoke", "--list")).document) == 1


@pytest.mark.parametrize("command", ["alias list", "audit", "revoke --list"])
async def test_without_a_registry_it_is_one_sentence(
    headrace: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("HEADRACE_REGISTRY", "127.0.0.1:9")
    ended = await headrace(*command.split())
    assert ended.code == 1
    assert ended.err.startswith("headrace: the registry at 127.0.0.1:9 does not answer\n")


@pytest.mark.parametrize("command", ["alias", "alias set", "alias list", "alias delete", "audit", "revoke"])
async def test_help_teaches_by_example(headrace: Command, command: str) -> None:
    ended = await headrace(*command.split(), "--help")
    assert ended.code == 0
    assert "Usage: headrace" in ended.out
    if command in ("alias", "audit", "revoke", "alias set"):
        assert f"  headrace {command}" in ended.out
