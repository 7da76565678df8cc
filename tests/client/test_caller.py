"""`headrace generate` and `request` under load and in a fleet: options, keys, TLS, and what they tell aside."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.rpc.server import Server
from headrace.rpc.tls import TlsFiles, server_credentials
from support.certificates import make_certificates
from support.scripted import SERVICE, Play, Scripted, good, raising

KEY = "s3cret-key"


async def headrace(target: str, *arguments: str, **environ: str) -> tuple[int | None, str, str]:
    settings = {"HEADRACE_ROUTER": target, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace.cli.main", *arguments, env={**kept, **settings}, stdout=-1, stderr=-1
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def generate(target: str, *arguments: str, **environ: str) -> tuple[int | None, str, str]:
    return await headrace(target, "generate", "hi", "--model", "m", *arguments, **environ)


async def keyed(play: Play) -> None:
    """Says by which key it was called."""
    told = [value for name, value in play.context.invocation_metadata() if name == "authorization"]
    names = play.context.auth_context().get("x509_common_name", [b"nobody"])
    await play.accept()
    await play.delta(f"{told} {names[0].decode()}", 1)
    await play.finish()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def secure(certificates: Path) -> AsyncIterator[str]:
    """A Router that lets in whoever has a certificate."""
    files = TlsFiles(*(str(certificates / name) for name in ("server.pem", "server.key", "ca.pem")))
    scripted = Scripted((keyed,))
    server = Server("127.0.0.1:0", credentials=server_credentials(files, "router"))
    server.add(SERVICE, scripted)
    await server.start()
    yield server.endpoint
    await server.stop(0)


def tls_options(certificates: Path) -> list[str]:
    return [
        "--tls-ca", str(certificates / "ca.pem"),
        "--tls-cert", str(certificates / "client.pem"),
        "--tls-key", str(certificates / "client.key"),
    ]  # fmt: skip


async def test_options_reach_the_router(serve: Any) -> None:
    service = await serve(good)
    options = ("--priority", "batch", "--idempotency-key", "k-1", "--recover", "--affinity", "session-7")
    code, output, errors = await generate(service.target, *options, "--quiet")
    assert (code, output, errors) == (0, "Hello\n", "")
    (request,) = service.requests
    assert (request.priority, request.recovery) == (pb.PRIORITY_BATCH, pb.RECOVERY_CONTINUE)
    assert (request.idempotency_key, request.affinity_key) == ("k-1", "session-7")
    code, _, errors = await generate(service.target, "--priority", "urgent")
    assert code == 2
    assert "sheddable" in errors


async def test_several_routers(serve: Any) -> None:
    async def gone(play: Play) -> None:
        await play.accept()
        await play.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    lost, there = await serve(gone), await serve(good)
    for _ in range(2):
        code, output, _ = await generate(f"{lost.target},{there.target}")
        assert (code, output) == (0, "Hello\n")
    assert there.calls == 2


async def test_a_key_comes_from_a_file_or_the_environment_and_is_never_shown(serve: Any, tmp_path: Path) -> None:
    service = await serve(keyed)
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    said = f"['Bearer {KEY}'] nobody\n"
    assert (await generate(service.target, "--api-key-file", str(file), "--quiet"))[:2] == (0, said)
    assert (await generate(service.target, "--quiet", HEADRACE_API_KEY=KEY))[:2] == (0, said)
    both = await generate(service.target, "--quiet", HEADRACE_API_KEY="other", HEADRACE_API_KEY_FILE=str(file))
    assert both[:2] == (0, said), "the file wins"
    assert (await generate(service.target, "--quiet"))[1] == "[] nobody\n"
    code, _, errors = await generate(service.target, "--api-key-file", str(tmp_path / "none"))
    assert (code, errors) == (
        2,
        f"headrace: --api-key-file: cannot read {tmp_path / 'none'}: No such file or directory\n",
    )


async def test_no_key_goes_to_another_machine_in_plain_text() -> None:
    code, _, errors = await generate("models.example:50051", HEADRACE_API_KEY=KEY)
    assert (code, errors) == (
        2,
        "headrace: an API key is not sent to models.example:50051 in plain text\n"
        "  connect with --tls or --tls-ca FILE; in a network that you trust: --allow-plaintext-key\n",
    )
    code, _, errors = await generate(
        "models.invalid:50051", "--allow-plaintext-key", "--timeout", "1", HEADRACE_API_KEY=KEY
    )
    assert code == 1, "it tries"
    assert "does not answer" in errors or "longer than its deadline" in errors


async def test_tls_with_certificates_on_both_sides(secure: str, certificates: Path) -> None:
    tls = tls_options(certificates)
    assert (await generate(secure, *tls, "--quiet", HEADRACE_API_KEY=KEY))[1] == f"['Bearer {KEY}'] client\n"
    environ = dict(zip(("HEADRACE_TLS_CA", "HEADRACE_TLS_CERT", "HEADRACE_TLS_KEY"), tls[1::2], strict=True))
    assert (await generate(secure, "--quiet", **environ))[1] == "[] client\n"
    credentials = grpc.ssl_channel_credentials(
        *((certificates / n).read_bytes() for n in ("ca.pem", "client.key", "client.pem"))
    )
    async with sdk.AsyncClient(secure, credentials=credentials, api_key=KEY) as client:
        assert (await client.generate("hi", model="m").read()).text == f"['Bearer {KEY}'] client"


async def test_a_tls_that_does_not_fit_says_so(secure: str, certificates: Path) -> None:
    code, _, errors = await generate(secure, "--tls", "--timeout", "5")
    assert code == 1
    assert f"headrace: the router at {secure} and this command do not agree on TLS: CERTIFICATE_VERIFY_FAILED" in errors
    assert "--tls-ca" in errors
    code, _, errors = await generate(secure, "--timeout", "5")
    assert (code, errors.splitlines()[0]) == (1, f"headrace: something at {secure} takes the connection and closes it")
    code, _, errors = await generate(secure, *tls_options(certificates)[:4])
    assert (code, errors) == (2, "headrace: --tls-cert and --tls-key need each other\n")
    code, _, errors = await generate(secure, "--tls-ca", str(certificates / "none.pem"))
    assert code == 2
    assert errors.startswith("headrace: --tls-ca: cannot read ")


async def test_a_continuation_and_a_replay_are_told_aside(serve: Any) -> None:
    async def continued(play: Play) -> None:
        await play.context.send_initial_metadata([("headrace-idempotent-replay", "true")])
        await play.accept()
        await play.delta("a", 1)
        notice = pb.Notice(kind=pb.Notice.KIND_CONTINUED, message="replicas/b.", attempt=2)
        notice.exactness = pb.Notice.EXACTNESS_EXACT
        await play.send(notice=notice)
        await play.delta("b", 2)
        await play.finish()

    service = await serve(continued)
    code, output, errors = await generate(service.target, "--recover", "--idempotency-key", "k")
    assert (code, output) == (0, "ab\n")
    told = errors.splitlines()
    assert told[0] == "requests/r1 was made before with this idempotency key: this is what comes, or came, of it"
    assert told[1] == "the worker was lost; attempt 2 goes on, exact: replicas/b."
    assert (await generate(service.target, "--recover", "--quiet"))[1:] == ("ab\n", "")


@pytest.mark.parametrize(
    ("failure", "code", "expected"),
    [
        (Failure(Reason.UNAUTHENTICATED, "No key."), 2, "UNAUTHENTICATED: No key.\n  say who calls: --api-key-file "),
        (Failure(Reason.PERMISSION_DENIED, "Not that model."), 2, "PERMISSION_DENIED: Not that model.\n"),
        (Failure(Reason.IDEMPOTENCY_KEY_REUSED, "Other content."), 2, "IDEMPOTENCY_KEY_REUSED: Other content.\n"),
        (Failure(Reason.IDEMPOTENCY_ORIGIN_LOST, "Gone."), 1, "IDEMPOTENCY_ORIGIN_LOST: Gone.\n"),
        (
            Failure(
                Reason.QUOTA_EXCEEDED, "Used up.", metadata={"tenant": "tenants/acme", "quota": "requests"},
                retry_after_s=0.01,
            ),
            1,
            "QUOTA_EXCEEDED: Used up.\n  Send less, or later; QuotaFailure names the limit.\n  tenants/acme\n",
        ),
    ],
    ids=lambda value: value.reason.value if isinstance(value, Failure) else "",
)  # fmt: skip
async def test_refusals_say_what_to_do(serve: Any, failure: Failure, code: int, expected: str) -> None:
    service = await serve(raising(failure))
    ended, _, errors = await generate(service.target)
    assert ended == code
    assert errors.startswith(f"headrace: {expected}")


async def test_questions_about_a_request_carry_the_key(serve: Any, monkeypatch: Any) -> None:
    async def asked(_self: Any, request: Any, context: Any) -> pb.Request:
        told = [value for name, value in context.invocation_metadata() if name == "authorization"]
        return pb.Request(name=request.request, revision=told[0] if told else "nobody")

    monkeypatch.setattr(Scripted, "GetRequest", asked)
    monkeypatch.setattr(Scripted, "CancelRequest", asked)
    service = await serve(good)
    for command in ("show", "cancel"):
        code, output, _ = await headrace(service.target, "request", command, "r1", HEADRACE_API_KEY=KEY)
        assert code == 0
        assert f'"Bearer {KEY}"' in output
