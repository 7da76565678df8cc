"""The port of operators and other Routers: who may call it, and what the start says where anybody could."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.router.v1 import router_service_pb2 as router_pb
from headrace.api.router.v1.router_service_pb2_grpc import RouterServiceStub
from headrace.control import proof
from headrace.control.errors import Reason
from headrace.router.settings import RouterSettings, is_loopback
from headrace.rpc.proving import Secret
from headrace.runtime.settings import SettingsError, load_settings
from router.harness import DEADLINE_S, Harness, collect, failure, running
from router.test_elsewhere import CONTINUE, PLAIN, asked, begun, interactive, resume
from router.two import KEY, two
from support.memory_store import MemoryStore

SECRET, OTHER = "s" * 32, "o" * 32
EXPLAIN = "/headrace.api.router.v1.RouterService/ExplainRoute"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return path


def rewrite(path: Path, text: str) -> None:
    """As a Secret's volume does: another file under the same name."""
    beside = path.with_name("beside")
    beside.write_text(text)
    beside.replace(path)


async def explained(h: Harness, *metadata: tuple[str, str]) -> grpc.aio.AioRpcError | None:
    async with grpc.aio.insecure_channel(h.admin.endpoint) as channel:
        generate = pb.GenerateRequest(model="chat", prompt="x")
        request = router_pb.ExplainRouteRequest(generate=generate)
        try:
            await RouterServiceStub(channel).ExplainRoute(request, timeout=DEADLINE_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error
    return None


async def test_only_proven_calls_are_answered(file: Path) -> None:
    async with running(store=MemoryStore(), admin_secret_file=str(file)) as h:
        now_ms = round(time.time() * 1000)
        assert await explained(h, *Secret(str(file), "x").metadata(EXPLAIN)) is None
        for value in (
            None,
            SECRET,
            proof.prove(OTHER, EXPLAIN, now_ms),
            proof.prove(SECRET, EXPLAIN, now_ms - 200_000),
        ):
            refused = failure(await explained(h, *([] if value is None else [(proof.HEADER, value)])))
            assert refused.reason is Reason.UNAUTHENTICATED
            assert SECRET not in refused.message
        seen = {"method": "ExplainRoute", "outcome": "UNAUTHENTICATED"}
        assert h.metrics.registry.get_sample_value("headrace_router_calls_total", seen) == 4


async def test_every_method_is_closed_but_health(file: Path) -> None:
    async with (
        running(store=MemoryStore(), admin_secret_file=str(file)) as h,
        grpc.aio.insecure_channel(h.admin.endpoint) as channel,
    ):
        stub = RouterServiceStub(channel)
        frames = [router_pb.ResumeRequestRequest(resume=router_pb.Resumption())]
        calls: dict[str, Any] = {
            "ExplainRoute": stub.ExplainRoute(router_pb.ExplainRouteRequest(), timeout=DEADLINE_S),
            "LookUpRequest": stub.LookUpRequest(router_pb.LookUpRequestRequest(), timeout=DEADLINE_S),
            "RelayRequest": stub.RelayRequest(router_pb.RelayRequestRequest(), timeout=DEADLINE_S),
            "ResumeRequest": stub.ResumeRequest(iter(frames), timeout=DEADLINE_S),
        }
        assert set(calls) == set(router_pb.DESCRIPTOR.services_by_name["RouterService"].methods_by_name)
        for call in calls.values():
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        names = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listing: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(names)
        assert await listing.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        assert await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S), "probes have no secret"


async def test_routers_prove_all_their_calls(file: Path) -> None:
    async with two(admin_secret_file=str(file)) as t:
        name, call, dispatch = await begun(t, **CONTINUE)
        assert isinstance(await asked(t.b, "GetRequest", name), pb.Request)
        there = await interactive(t.b, name, 1)
        await t.a.scheduler.deltas(dispatch.attempt, "x")
        assert (await there.read()).delta.text == "x"
        await collect(call)
        first, keyed = await t.begun()
        duplicate = t.b.generate(**KEY)
        await duplicate.read()
        await t.a.scheduler.end(keyed.attempt)
        assert (await collect(duplicate))[1] is None
        assert (await collect(first))[1] is None


async def test_routers_with_other_secrets_are_no_concern_of_the_callers(file: Path) -> None:
    async with two(admin_secret_file=str(file)) as t:
        name, _, _ = await begun(t, **PLAIN)
        await t.begun()
        rewrite(file, f"{OTHER}\n")
        assert t.b.service.sharing.peers.secret is not None
        t.b.service.sharing.peers.secret._seen = t.b.service.sharing.peers.secret._look()  # B has not noticed
        told = [await asked(t.b, "GetRequest", name), failure((await collect(resume(t.b, name, 0)))[1])]
        told.append(failure((await collect(t.b.generate(**KEY)))[1]))
        assert {one.reason for one in told} == {Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE}  # type: ignore[union-attr]


async def test_a_new_secret_is_brought_in_beside_the_old_one(file: Path) -> None:
    async with running(store=MemoryStore(), admin_secret_file=str(file)) as h:
        old, new = Secret(str(file), "x").metadata(EXPLAIN), ((proof.HEADER, ""),)
        rewrite(file, f"{OTHER}\n{SECRET}\n")
        new = Secret(str(file), "x").metadata(EXPLAIN)
        assert new[0][1].partition(".")[2] != old[0][1].partition(".")[2]
        assert [await explained(h, *old), await explained(h, *new)] == [None, None]
        rewrite(file, "short\n")
        assert [await explained(h, *old), await explained(h, *new)] == [None, None], "what is no secret changes nothing"
        rewrite(file, f"{OTHER}\n")
        assert failure(await explained(h, *old)).reason is Reason.UNAUTHENTICATED
        assert await explained(h, *new) is None


async def test_without_proof_it_is_open_only_where_the_settings_say_so(file: Path) -> None:
    async with running(store=MemoryStore(), admin_secret_file=str(file), admin_insecure=True) as h:
        assert await explained(h) is None
        assert await explained(h, *Secret(str(file), "x").metadata(EXPLAIN)) is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('admin_listen = "10.0.0.7:50061"', "admin_secret_file"),
        ('admin_listen = "[fd00::7]:50061"', "admin_secret_file"),
        ('admin_listen = "router-1:50061"', "admin_secret_file"),
        ('admin_listen = "0.0.0.0:50061"\nadmin_insecure = true', "admin_advertise"),
        ('admin_listen = "[::]:50061"\nadmin_secret_file = "x"', "admin_advertise"),
        ('admin_listen = "10.0.0.7:50061"\nadmin_insecure = true', ""),
        ('admin_listen = "10.0.0.7:50061"\nadmin_secret_file = "x"', ""),
        ('admin_listen = "0.0.0.0:50061"\nadmin_secret_file = "x"\nadmin_advertise = "r:50061"', ""),
        ('admin_listen = "127.0.0.2:50061"', ""),
        ('admin_listen = "[::1]:0"', ""),
        ('admin_listen = "localhost:50061"', ""),
    ],
)
def test_a_port_that_others_reach_needs_a_secret_or_the_start_fails(tmp_path: Path, lines: str, says: str) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(f"[router]\n\n{lines}\n")
    if not says:
        loaded = load_settings(RouterSettings, "router", file=file)
        assert is_loopback(loaded.admin_listen) == ("admin_" not in lines.partition("\n")[2] and "10.0" not in lines)
        return
    with pytest.raises(SettingsError) as refused:
        load_settings(RouterSettings, "router", file=file)
    assert f"router setting 'admin_listen' ({file}, line 3): " in str(refused.value)
    assert f"set {says}" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot read"), (b"\xff\xfe", "not UTF-8"), (b"short", "line 1"), (b"", "empty")]
)
def test_a_file_that_holds_no_secret_stops_the_start(file: Path, content: bytes | None, says: str) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        Secret(str(file), "router setting 'admin_secret_file'")
    assert str(refused.value).startswith("router setting 'admin_secret_file': ")
    assert says in str(refused.value)
    assert "short" not in str(refused.value)
