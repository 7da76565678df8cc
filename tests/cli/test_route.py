"""`headrace route explain` against a real Router's RouterService: what it prints, and how it finds the Router."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from router.harness import Harness, running, until

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as sp
from headrace.cli import main
from headrace.rpc.server import Server


class ServicesOnly:
    """Answers ListServices as a Registry would."""

    def __init__(self) -> None:
        self.services: list[resources_pb2.ServiceRecord] = []

    async def ListServices(self, request: Any, context: Any) -> pb.ListServicesResponse:
        return pb.ListServicesResponse(services=self.services)

    def __getattr__(self, name: str) -> Any:
        async def unknown(request: Any, context: Any) -> None:
            raise AssertionError(name)

        return unknown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
async def router(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Harness]:
    """A Router with three replicas, and who says where it is; parametrized with True: with a secret."""
    secret = {}
    if getattr(request, "param", False):
        (tmp_path / "secret").write_text("s" * 32)
        secret = {"admin_secret_file": str(tmp_path / "secret")}
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    registry, listing = Server("127.0.0.1:0"), ServicesOnly()
    registry.add(pb.DESCRIPTOR.services_by_name["RegistryService"], listing)
    await registry.start()
    try:
        async with running(replicas=3, **secret) as h:
            await h.admin.start()
            listing.services = [
                resources_pb2.ServiceRecord(name="registries/g", endpoint="127.0.0.1:1"),
                resources_pb2.ServiceRecord(name="routers/dead", endpoint="x", admin_endpoint="127.0.0.1:1"),
                resources_pb2.ServiceRecord(name="routers/test", endpoint=h.target, admin_endpoint=h.admin.endpoint),
            ]
            monkeypatch.setenv("HEADRACE_REGISTRY", f"127.0.0.1:{registry.port}")
            monkeypatch.setenv("HEADRACE_ROUTER", h.target)
            monkeypatch.setenv("COLUMNS", "250")
            monkeypatch.delenv("HEADRACE_MODEL", raising=False)
            yield h
            await h.admin.stop(0)
    finally:
        await registry.stop(0)
        structlog.reset_defaults()


async def run(*arguments: str, out: io.StringIO | None = None) -> tuple[int, str, str]:
    printed, err = out or io.StringIO(), io.StringIO()

    def call() -> int:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(err):
            return main.run(["route", "explain", *arguments])

    code = await asyncio.to_thread(call)
    return code, printed.getvalue(), err.getvalue()


async def busy(h: Harness) -> None:
    load = sp.ReplicaLoad(replica="replicas/r1", active=4, waiting=3, slots=4)
    load.queue_wait.FromMilliseconds(7500)
    await h.scheduler.send(load=sp.LoadReport(replicas=[load]))
    await until(lambda: h.routes.routing.loads.standing("replicas/r1").report is not None)  # type: ignore[union-attr]


async def test_piped_it_is_json(router: Harness) -> None:
    await busy(router)
    code, out, err = await run("chat", "--prompt", "hello")
    assert code == 0, err
    told = json.loads(out)
    assert (told["router"], told["snapshot"], told["replicas"], told["refusal"]) == ("routers/test", 5, 3, None)
    assert told["chosen"] in ("replicas/r0", "replicas/r2")
    by_name = {c["replica"]: c for c in told["candidates"]}
    assert by_name[told["chosen"]]["why"] == "chosen"
    assert by_name["replicas/r1"]["why"].startswith("queue_wait +7.")
    assert by_name["replicas/r1"]["score"] == pytest.approx(sum(by_name["replicas/r1"]["parts"].values()), abs=1e-4)
    assert by_name["replicas/r1"]["load_age"] < 10
    assert by_name["replicas/r0"]["load_age"] is None


async def test_on_a_terminal_it_is_a_table(router: Harness) -> None:
    await busy(router)
    code, out, err = await run("chat", out=Terminal())
    assert code == 0, err
    assert "replicas/r1" in out
    assert "queue_wait +7." in out
    assert "It would go to replicas/r" in out
    assert "slow_start" not in out, "what is nought everywhere is left out"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "no model was named"),
        (("nope",), 1, "MODEL_NOT_FOUND"),
        (("chat", "--prompt", ""), 2, "INVALID_REQUEST"),
        (("chat", "--tenant", "nobody"), 1, "NOT_FOUND"),
        (("chat", "--router", "other"), 1, "no Router routers/other is registered"),
        (("chat", "--router", "dead"), 1, "does not answer"),
    ],
)
async def test_what_cannot_be_explained_says_why(
    router: Harness, arguments: tuple[str, ...], code: int, words: str
) -> None:
    got, out, err = await run(*arguments)
    assert (got, out) == (code, "")
    assert words in err


@pytest.mark.parametrize("router", [True], indirect=True)
async def test_a_router_with_a_secret_is_asked_with_it(
    router: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = await run("chat")
    assert (code, out) == (1, "")
    assert "does not trust this call" in err
    assert "--admin-secret-file" in err
    file = tmp_path / "secret"
    code, out, err = await run("chat", "--admin-secret-file", str(file))
    assert code == 0, err
    assert json.loads(out)["router"] == "routers/test"
    monkeypatch.setenv("HEADRACE_ADMIN_SECRET_FILE", str(file))
    code, out, err = await run("chat")
    assert code == 0, err
    for content, words in (("t" * 32, "another secret"), ("short", "holds no secret")):
        file.with_name("other").write_text(content)
        code, out, err = await run("chat", "--admin-secret-file", str(file.with_name("other")))
        assert code == (1 if words == "another secret" else 2)
        assert words in err
        assert content not in err
