"""A request of one Router, asked for by name at another one, on the real stack: processes, etcd, a synthetic engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.client import AsyncClient, Delta, FinishReason
from headrace.control.errors import Failure, Reason
from headrace.control.idempotency import PATIENCE_S
from headrace.rpc import status
from stack.engine_stats import engine_stats
from stack.routers import routers
from stack.waiting import until
from support.etcd import TcpProxy
from support.stack import SYNTHETIC, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

DEADLINE_S = 60.0
MARGIN_S = 10.0
LOST, UNREACHABLE = Reason.IDEMPOTENCY_ORIGIN_LOST, Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE


def generate(stub: Any, tokens: int) -> Any:
    request = pb.GenerateRequest(
        model=SYNTHETIC, prompt="once", max_tokens=tokens, stop={"ignore_eos": True},
        on_disconnect=pb.ON_DISCONNECT_CONTINUE,
    )  # fmt: skip
    return stub.Generate(request, timeout=DEADLINE_S)


def resume(stub: Any, name: str, after: int) -> Any:
    return stub.ResumeGenerate(pb.ResumeGenerateRequest(request=name, after_sequence=after), timeout=DEADLINE_S)


async def read(call: Any, seen: list[pb.GenerateEvent]) -> Failure | None:
    """All events, and how the call ended unless well."""
    try:
        while (event := await call.read()) is not grpc.aio.EOF:
            seen.append(event)
    except grpc.aio.AioRpcError as error:
        if (failure := status.from_rpc_error(error)) is None:
            raise
        return failure
    return None


async def refusal(call: Any) -> Failure | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return status.from_rpc_error(error)
    return None


class Balancer(TcpProxy):
    """Gives each connection to the next of several ports."""

    def __init__(self, ports: list[int]) -> None:
        super().__init__(ports[0])
        self._next = itertools.cycle(ports)
        self.connections = 0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._target_port = next(self._next)
        self.connections += 1
        await super()._accept(reader, writer)


async def test_a_client_behind_a_balancer_needs_to_know_no_router(stack: RunningStack, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(16))
    before = engine_stats(stack, SYNTHETIC)["generated_tokens"]
    async with contextlib.AsyncExitStack() as opened:
        both = await opened.enter_async_context(routers(stack, tmp_path, "--admin-secret-file", str(secret)))
        balancer = await opened.enter_async_context(Balancer([int(r.address.rpartition(":")[2]) for r in both]))
        client = await opened.enter_async_context(AsyncClient(f"127.0.0.1:{balancer.port}"))
        stream = client.generate(
            "once", model=SYNTHETIC, max_tokens=400, ignore_eos=True, on_disconnect="continue", timeout_s=DEADLINE_S
        )
        tokens = 0
        async for event in stream:
            if isinstance(event, Delta):
                tokens += len(event.token_ids)
                if tokens // 100 >= balancer.connections:
                    balancer.reset()
        answer = stream.answer
        assert (tokens, answer.finish_reason) == (400, FinishReason.LENGTH)
        assert balancer.connections >= 4, "a connection for each hundred tokens, each at the other Router"
        assert engine_stats(stack, SYNTHETIC)["generated_tokens"] - before == 400, "one execution"
        found = []
        for _ in range(4):
            async with AsyncClient(f"127.0.0.1:{balancer.port}") as another:
                found.append(await another.get_request(answer.request))
        assert len({str(info) for info in found}) == 1


async def test_it_is_looked_up_resumed_and_cancelled_at_the_other_one(stack: RunningStack, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as opened:
        a, b = [
            InferenceServiceStub(await opened.enter_async_context(router.channel()))
            for router in await opened.enter_async_context(routers(stack, tmp_path))
        ]
        short = generate(a, 40)
        events = [await short.read() for _ in range(5)]
        name = events[0].request
        rest: list[pb.GenerateEvent] = []
        assert await read(resume(b, name, 5), rest) is None
        whole: list[pb.GenerateEvent] = []
        assert await read(resume(a, name, 0), whole) is None
        assert whole == events + rest
        assert whole[-1].terminal.usage.generated_tokens == 40
        records = [await stub.GetRequest(pb.GetRequestRequest(request=name)) for stub in (a, b)]
        assert records[0] == records[1]
        assert records[0].state == pb.Request.STATE_TERMINAL

        long = generate(a, 4000)
        name = (await long.read()).request
        assert (await b.GetRequest(pb.GetRequestRequest(request=name))).finish_reason == 0
        ended = await b.CancelRequest(pb.CancelRequestRequest(request=name))
        assert ended.finish_reason == pb.FINISH_REASON_CANCELLED
        failure = await read(long, [])
        assert failure is not None
        assert failure.reason is Reason.CLIENT_CANCELLED
        assert await b.GetRequest(pb.GetRequestRequest(request=name)) == await a.GetRequest(
            pb.GetRequestRequest(request=name)
        )
        await until(lambda: engine_stats(stack, SYNTHETIC)["active"] == 0)


async def test_a_killed_router_is_told_truthfully_at_the_other_one(stack: RunningStack, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as opened:
        one, other = await opened.enter_async_context(routers(stack, tmp_path))
        a = InferenceServiceStub(await opened.enter_async_context(one.channel()))
        b = InferenceServiceStub(await opened.enter_async_context(other.channel()))
        call = generate(a, 4000)
        name = (await call.read()).request
        resumed = resume(b, name, 1)
        reading = asyncio.create_task(read(resumed, seen := []))
        await until(lambda: len(seen) >= 5)
        one.kill()
        killed = time.monotonic()
        broken = await reading
        assert broken is not None
        assert broken.reason is UNREACHABLE, "the stream broke, and it is not known yet what of"
        asking = [refusal(b.GetRequest(pb.GetRequestRequest(request=name), timeout=DEADLINE_S)) for _ in range(2)]
        asking.append(read(resume(b, name, len(seen) + 1), []))
        told = await asyncio.gather(*asking)
        assert {failure and failure.reason for failure in told} <= {LOST, UNREACHABLE}, "never NOT_FOUND"
        assert told[-1] is not None
        assert told[-1].reason is LOST
        assert time.monotonic() - killed < PATIENCE_S + MARGIN_S
        for ask in (
            b.GetRequest(pb.GetRequestRequest(request=name), timeout=DEADLINE_S),
            b.CancelRequest(pb.CancelRequestRequest(request=name), timeout=DEADLINE_S),
        ):
            lost = await refusal(ask)
            assert lost is not None
            assert lost.reason is LOST
        await until(lambda: engine_stats(stack, SYNTHETIC)["active"] == 0)
