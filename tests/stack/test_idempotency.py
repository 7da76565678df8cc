"""Idempotency keys on the real stack: two Routers of their own beside the stack's, one etcd, one synthetic engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.control.errors import Failure, Reason
from headrace.control.idempotency import PATIENCE_S
from headrace.rpc import status
from stack.engine_stats import engine_stats
from stack.routers import routers
from stack.waiting import until
from support.stack import SYNTHETIC, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

DEADLINE_S = 90.0
MARGIN_S = 10.0
SHORT = ("--idempotency-ttl-s", "2", "--resume-window-s", "1")
Transcript = tuple[list[bytes], Failure | None]


def keyed(tokens: int, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        **{
            "model": SYNTHETIC,
            "prompt": "once",
            "max_tokens": tokens,
            "stop": {"ignore_eos": True},
            "idempotency_key": uuid.uuid4().hex,
            **fields,
        }
    )


async def read(channel: grpc.aio.Channel, request: pb.GenerateRequest, seen: list[bytes] | None = None) -> Transcript:
    """All events, as bytes, and how the call ended unless well."""
    seen = [] if seen is None else seen
    try:
        async for event in InferenceServiceStub(channel).Generate(request, timeout=DEADLINE_S):
            seen.append(event.SerializeToString(deterministic=True))
    except grpc.RpcError as error:
        if (failure := status.from_rpc_error(error)) is None:
            raise
        return seen, failure
    return seen, None


async def test_200_duplicates_through_two_routers_are_one_execution(stack: RunningStack, tmp_path: Path) -> None:
    before = engine_stats(stack, SYNTHETIC)["generated_tokens"]
    async with contextlib.AsyncExitStack() as opened:
        two = await opened.enter_async_context(routers(stack, tmp_path))
        channels = [
            await opened.enter_async_context(
                grpc.aio.insecure_channel(router.address, options=[("grpc.use_local_subchannel_pool", 1)])
            )
            for router in two
            for _ in range(4)
        ]
        request = keyed(40)
        told = await asyncio.gather(*(read(channels[n % len(channels)], request) for n in range(200)))
        late = await asyncio.gather(*(read(channel, request) for channel in channels))
        other = keyed(41, idempotency_key=request.idempotency_key)
        refused = [(await read(channel, other))[1] for channel in (channels[0], channels[-1])]
    assert [failure for _, failure in [*told, *late] if failure is not None] == []
    assert len({tuple(events) for events, _ in [*told, *late]}) == 1
    terminal = pb.GenerateEvent.FromString(told[0][0][-1]).terminal
    assert terminal.usage.generated_tokens == 40
    assert engine_stats(stack, SYNTHETIC)["generated_tokens"] - before == 40, "one execution"
    assert [failure and failure.reason for failure in refused] == [Reason.IDEMPOTENCY_KEY_REUSED] * 2


async def test_a_router_that_is_killed_in_the_middle_is_told_truthfully(stack: RunningStack, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as opened:
        a, b = await opened.enter_async_context(routers(stack, tmp_path))
        to_a = await opened.enter_async_context(grpc.aio.insecure_channel(a.address))
        to_b = await opened.enter_async_context(grpc.aio.insecure_channel(b.address))
        ended, running = keyed(3), keyed(2000)
        assert (await read(to_a, ended))[1] is None
        first = InferenceServiceStub(to_a).Generate(running, timeout=DEADLINE_S)
        await first.read()
        seen: list[list[bytes]] = [[] for _ in range(20)]
        reading = [asyncio.create_task(read(to_b, running, events)) for events in seen]
        await until(lambda: all(len(events) >= 5 for events in seen))
        a.kill()
        killed = time.monotonic()
        told = await asyncio.gather(*reading)
        took_s = time.monotonic() - killed
        assert {failure and failure.reason for _, failure in told} == {Reason.IDEMPOTENCY_ORIGIN_LOST}
        assert all(failure and failure.metadata["eventsWritten"] == str(len(events)) for events, failure in told)
        assert took_s < PATIENCE_S + MARGIN_S
        before = engine_stats(stack, SYNTHETIC)["generated_tokens"]
        _, again = await read(to_b, running)
        events, past = await read(to_b, ended)
        assert again is not None
        assert again.reason is Reason.IDEMPOTENCY_ORIGIN_LOST
        assert past is not None
        assert (events, past.reason) == ([], Reason.IDEMPOTENCY_ORIGIN_LOST)
        assert past.metadata["finishReason"] == "LENGTH"
        assert past.metadata["outputTokens"] == "3"
        await until(lambda: engine_stats(stack, SYNTHETIC)["active"] == 0)
        assert engine_stats(stack, SYNTHETIC)["generated_tokens"] - before < 40, "nothing ran again"


async def test_a_key_expires_in_the_store_and_runs_again(stack: RunningStack, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as opened:
        two = await opened.enter_async_context(routers(stack, tmp_path, *SHORT))
        channels = [await opened.enter_async_context(grpc.aio.insecure_channel(router.address)) for router in two]
        request = keyed(2)
        once = [await read(channel, request) for channel in channels]
        await asyncio.sleep(2.5)
        again = [await read(channel, request) for channel in reversed(channels)]
    assert once[0] == once[1]
    assert again[0] == again[1] != once[0]
    assert all(failure is None for _, failure in [*once, *again])
