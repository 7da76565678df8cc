"""200 calls with one idempotency key through two Routers: undisturbed, and with the Router that has it killed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

import grpc
from stack.test_idempotency import Transcript, keyed, read

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.idempotency import PATIENCE_S
from overload import truth
from overload.levels import Row
from overload.rig import ALIAS, OverloadRig
from support.etcd import eventually

CALLS = 200
CHANNELS = 4
"""To each Router."""
TOKENS = 40
LONG_TOKENS = 150
SEEN = 5
"""Events that every caller has when the Router is killed."""
BOUND_S = PATIENCE_S + 10.0
Asked = tuple[Transcript, float]


async def measure(rig: OverloadRig, calls: int) -> tuple[dict[str, Any], list[Row]]:
    """Both."""
    figures = {"undisturbed": await _undisturbed(rig, calls), "killed": await _killed(rig, calls)}
    return figures, _rows(figures, calls)


async def _undisturbed(rig: OverloadRig, calls: int) -> dict[str, Any]:
    generated, ended = await rig.generated(), await truth.ended(rig)
    request = keyed(TOKENS, model=ALIAS)
    async with contextlib.AsyncExitStack() as stack:
        channels = [await _channel(stack, router) for router in rig.routers for _ in range(CHANNELS)]
        began = time.monotonic()
        told = await asyncio.gather(*(read(channels[n % len(channels)], request) for n in range(calls)))
        took_s = time.monotonic() - began
    await truth.settled(rig)
    return {
        "calls": len(told),
        "failed": dict(Counter(failure.reason.value for _, failure in told if failure is not None)),
        "transcripts": len({tuple(events) for events, _ in told}),
        "events": len(told[0][0]),
        "executions": await truth.ended(rig) - ended,
        "generated": await rig.generated() - generated,
        "took_s": took_s,
    }


async def _killed(rig: OverloadRig, calls: int) -> dict[str, Any]:
    """The first call makes r1 the owner; half of the others go to each Router."""
    generated, ended = await rig.generated(), await truth.ended(rig)
    request = keyed(LONG_TOKENS, model=ALIAS)
    owner, other = rig.routers
    seen: list[list[bytes]] = [[] for _ in range(calls)]
    async with contextlib.AsyncExitStack() as stack:
        to_owner = [await _channel(stack, owner) for _ in range(CHANNELS)]
        to_other = [await _channel(stack, other) for _ in range(CHANNELS)]
        asking = [asyncio.create_task(_ask(to_owner[0], to_other[0], request, seen[0]))]
        await eventually(lambda: bool(seen[0]), 20, "the first call was accepted")
        for number in range(1, calls):
            first = (to_owner if number % 2 else to_other)[number // 2 % CHANNELS]
            asking.append(asyncio.create_task(_ask(first, to_other[number // 2 % CHANNELS], request, seen[number])))
        await eventually(lambda: all(len(events) >= SEEN for events in seen), 20, "all callers read")
        began = time.monotonic()
        await rig.kill(rig.services["r1"])
        _, hung = await asyncio.wait(asking, timeout=BOUND_S)
        took_s = time.monotonic() - began
        for task in hung:
            task.cancel()
        await asyncio.gather(*hung, return_exceptions=True)
    told = [task.result() for task in asking if task not in hung]
    await rig.start(rig.services["r1"])
    await rig.serving(rig.services["r1"])
    await truth.settled(rig)
    return {
        "calls": calls,
        "hung": len(hung),
        "told": dict(Counter(answer for answer, _ in told)),
        "wrong": sum(not is_true for _, is_true in told),
        "slowest_s": took_s,
        "executions": await truth.ended(rig) - ended,
        "generated": await rig.generated() - generated,
        "tokens": LONG_TOKENS,
    }


async def _ask(
    first: grpc.aio.Channel, other: grpc.aio.Channel, request: pb.GenerateRequest, seen: list[bytes]
) -> tuple[str, bool]:
    """Read; where the Router is lost, ask the other one. Returns what was said last, and whether it was true."""
    try:
        events, failure = await read(first, request, seen)
        lost = ""
    except grpc.aio.AioRpcError as error:
        lost = f"{error.code().name}, then "
        events, failure = await read(other, request)
    if failure is None:
        terminal = pb.GenerateEvent.FromString(events[-1]).terminal
        return f"{lost}a whole answer", terminal.usage.generated_tokens == request.max_tokens
    is_true = failure.reason.value == "IDEMPOTENCY_ORIGIN_LOST"
    if not lost:  # what it has read is what it is told to have read
        is_true = is_true and failure.metadata.get("eventsWritten") == str(len(events))
    return lost + failure.reason.value, is_true


async def _channel(stack: contextlib.AsyncExitStack, router: str) -> grpc.aio.Channel:
    channel = grpc.aio.insecure_channel(router, options=[("grpc.use_local_subchannel_pool", 1)])
    return await stack.enter_async_context(channel)


def _rows(figures: dict[str, Any], calls: int) -> list[Row]:
    plain, killed = figures["undisturbed"], figures["killed"]
    found: list[Row] = [
        (f"{calls} calls with one key, two Routers: that failed", str(plain["failed"] or 0), "0", not plain["failed"]),
        ("    different transcripts", str(plain["transcripts"]), "1", plain["transcripts"] == 1),
        (
            "    attempts, and tokens generated",
            f"{plain['executions']}, {plain['generated']}",
            f"1, {TOKENS}",
            (plain["executions"], plain["generated"]) == (1, TOKENS),
        ),
        ("    all answered after, s", f"{plain['took_s']:.1f}", "", None),
        (f"{calls} calls, the Router that has the key killed: that hung", str(killed["hung"]), "0", not killed["hung"]),
    ]
    found += [(f"    {answer}", str(count), "", None) for answer, count in killed["told"].items()]
    found += [
        ("    told what is not true", str(killed["wrong"]), "0", killed["wrong"] == 0),
        (
            "    the last one was answered after, s",
            f"{killed['slowest_s']:.1f}",
            f"< {BOUND_S:.0f}",
            killed["slowest_s"] < BOUND_S,
        ),
        (
            "    attempts, and tokens generated",
            f"{killed['executions']}, {killed['generated']}",
            f"1, <= {killed['tokens']}",
            killed["executions"] == 1 and killed["generated"] <= killed["tokens"],
        ),
    ]
    return found
