"""A server over real gRPC: how handlers end, what is refused before them, health, reflection, start and stop."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc.harness import EVENT, INFERENCE, Running, Writing, Yielding

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.registry.v1.registry_service_pb2 import DESCRIPTOR as REGISTRY
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.rpc.channels import internal_channel
from headrace.rpc.server import Server
from headrace.runtime.settings import SettingsError
from support.scripted import until


@pytest.mark.parametrize("kind", [Writing, Yielding])
async def test_a_failure_becomes_its_status(kind: type[Writing]) -> None:
    async def body(request: Any, context: Any) -> None:
        raise Failure(Reason.OVERLOADED, "Full.", metadata={"queueDepth": "9"}, retry_after_s=0.75)

    async with Running(kind(body)) as running:
        code, failure, error = await running.failure()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failure is not None
        assert (failure.reason, failure.retry_after_s) == (Reason.OVERLOADED, 0.75)
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "750"
        assert running.outcomes == [("Generate", "OVERLOADED")]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(Reason.QUOTA_EXCEEDED, "Used up.", retry_after_s=12.345), "12345"),
        (Failure(Reason.DRAINING, "Draining."), "0"),
        (Failure(Reason.OVERLOADED, "All of them.", retry_after_s=-1.0), "-1"),
        (Failure(Reason.MODEL_NOT_FOUND, "None."), "-1"),
        (InvalidRequest((Violation("model", "is empty"),)), "-1"),
        (Failure(Reason.DEADLINE_EXCEEDED, "Late."), None),
    ],
    ids=lambda value: value.reason.value if isinstance(value, Failure) else str(value),
)
async def test_pushback_travels_with_the_status(failure: Failure, expected: str | None) -> None:
    async def body(request: Any, context: Any) -> None:
        raise failure

    async with Running(Writing(body)) as running:
        _, _, error = await running.failure()
    assert dict(error.trailing_metadata()).get("grpc-retry-pushback-ms") == expected


@pytest.mark.parametrize("kind", [Writing, Yielding])
@pytest.mark.parametrize("bug", [RuntimeError("the prompt"), KeyError("the prompt"), asyncio.CancelledError()])
async def test_a_bug_shows_an_error_id_and_never_hangs_or_leaks(kind: type[Writing], bug: BaseException) -> None:
    async def body(request: Any, context: Any) -> None:
        raise bug

    async with Running(kind(body)) as running:
        code, failure, error = await running.failure()
        assert code is grpc.StatusCode.INTERNAL
        assert failure is not None
        assert failure.reason is Reason.INTERNAL
        assert failure.metadata["errorId"] in failure.message
        assert "prompt" not in str(error)
        assert running.outcomes == [("Generate", "INTERNAL")]


@pytest.mark.parametrize("kind", [Writing, Yielding])
async def test_a_good_call_is_ok(kind: type[Writing]) -> None:
    async def body(request: Any, context: Any) -> None:
        if kind is Writing:
            await context.write(EVENT)

    async with Running(kind(body)) as running:
        assert [event async for event in running.call()] == [EVENT]
        await until(lambda: running.outcomes == [("Generate", "OK")], "observed")


async def never(request: Any, context: Any) -> None:
    raise AssertionError("a refused request reached its handler")


@pytest.mark.parametrize("kind", [Writing, Yielding])
@pytest.mark.parametrize(
    ("data", "reason", "field"),
    [
        (pb.GenerateRequest(prompt="x" * 1000).SerializeToString(), Reason.REQUEST_TOO_LARGE, "prompt"),
        (pb.GenerateRequest(prompt="x" * 10_000_000).SerializeToString(), Reason.REQUEST_TOO_LARGE, "prompt"),
        (b"\x12\x02\xff\xfe", Reason.INVALID_REQUEST, "prompt"),
        (b"\xff\xff\xff", Reason.INVALID_REQUEST, ""),
    ],
    ids=["too large", "10 MB", "invalid UTF-8", "malformed"],
)
async def test_what_cannot_be_read_is_refused_before_the_handler(
    kind: type[Writing], data: bytes, reason: Reason, field: str
) -> None:
    async with Running(kind(never)) as running:
        code, failure, _ = await running.failure(data)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure is not None
        assert (failure.reason, failure.field) == (reason, field)
        assert running.outcomes == [("Generate", reason.value)]


async def test_a_thousand_violations_still_arrive_as_a_refusal() -> None:
    async def body(request: Any, context: Any) -> None:
        raise InvalidRequest(tuple(Violation(f"conversation.messages[{n}].role", "é" * 300) for n in range(1000)))

    async with Running(Writing(body)) as running:
        code, failure, _ = await running.failure()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure is not None
        assert failure.field == "conversation.messages[0].role"


async def test_a_unary_method_maps_the_same_way() -> None:
    class Registry:
        async def everything(self, request: Any, context: Any) -> Any:
            raise Failure(Reason.NOT_FOUND, "No.", field="name", metadata={"resourceName": "aliases/a"})

        def __getattr__(self, name: str) -> Any:
            return self.everything

    server = Server("127.0.0.1:0")
    service = next(iter(REGISTRY.services_by_name.values()))
    method = next(m for m in service.methods if not m.server_streaming)
    server.add(service, Registry())
    await server.start()
    async with internal_channel(server.endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{service.full_name}/{method.name}")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await server.stop(0)


async def test_health_is_per_service_and_follows_serving_and_stop() -> None:
    async with Running(Writing(never)) as running:
        stub: Any = health_pb2_grpc.HealthStub(running.channel)

        async def health(name: str) -> str:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

        for name in ("", INFERENCE.full_name):
            assert await health(name) == "NOT_SERVING", "until the service says so"
        await running.server.set_serving(True)
        for name in ("", INFERENCE.full_name):
            assert await health(name) == "SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health("no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_draining_server_tells_watchers_and_lets_running_calls_end() -> None:
    release = asyncio.Event()

    async def body(request: Any, context: Any) -> None:
        await context.write(EVENT)
        await release.wait()

    async with Running(Writing(body)) as running:
        await running.server.set_serving(True)
        call = running.call()
        await call.read()
        stub: Any = health_pb2_grpc.HealthStub(running.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE.full_name), timeout=10)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.ensure_future(running.server.stop(10))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        release.set()
        assert await call.read() is grpc.aio.EOF
        await stopping


async def test_reflection_lists_and_describes_every_service() -> None:
    async with Running(Writing(never)) as running:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        ask = reflection_pb2.ServerReflectionRequest
        requests = [ask(list_services=""), ask(file_containing_symbol=INFERENCE.full_name)]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=10)]
        assert {service.name for service in listed.list_services_response.service} == {
            INFERENCE.full_name,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert described.file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("address", ["taken", "256.0.0.1:5", "127.0.0.1:notaport"])
async def test_an_address_that_cannot_be_bound_is_one_sentence_that_names_the_setting(address: str) -> None:
    async with Running(Writing(never)) as running:
        if address == "taken":
            address = running.server.endpoint
        second = Server(address, setting="listen")
        with pytest.raises(SettingsError, match=r"setting 'listen': cannot listen on .*Stop what uses it"):
            await second.start()
        await second.stop(0)
