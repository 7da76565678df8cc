"""One reader in 16 stops for 10 s, in each form of the call: what is generated for it, what the others notice."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Sequence
from typing import Any

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.client import AsyncClient, Delta
from headrace.client.connect import OPTIONS
from support import stack as stacks

FAST = "fast"
"""A synthetic engine at 2,000 tokens/s for each of its 16 sequences: more than two cores can carry."""
STEADY = "steady"
"""One at 2,000 tokens/s for all 16 together, which they can: there, a rate says something about its neighbours."""
WINDOW = 32
STOP_S = 10.0
MAX_TOKENS = 60_000
READ_FIRST = 200
"""Tokens that the slow reader takes before it stops."""
OTHERS = 15
WARM_S = 1.0
ROUNDS = 3


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; the nearest one."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(share * (len(ranked) - 1)))]


async def slow_interactive(router: str, stop_s: float, model: str) -> dict[str, int]:
    """The SDK's default form."""
    async with AsyncClient(router) as client:
        stream = client.generate("slow reader", model=model, max_tokens=MAX_TOKENS, timeout_s=120.0)
        consumed = 0
        async with contextlib.aclosing(aiter(stream)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    consumed += len(event.token_ids)
                if consumed >= READ_FIRST:
                    break
            await asyncio.sleep(stop_s)
            record = await client.cancel_request(stream.answer.request)
        return {"consumed": consumed, "generated": record.usage.generated_tokens, "sent": record.usage.sent_tokens}


async def slow_plain(router: str, stop_s: float, options: list[tuple[str, int | str]]) -> dict[str, int]:
    """A plain call with these channel options, read with gRPC's own reader, which takes one message at a time."""
    async with grpc.aio.insecure_channel(router, options=options) as channel:
        stub = InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(model=FAST, prompt="slow reader", max_tokens=MAX_TOKENS), timeout=120.0)
        consumed, name, size = 0, "", 0
        while consumed < READ_FIRST:
            event: Any = await call.read()
            name, size = event.request, event.ByteSize()
            consumed += len(event.delta.token_ids)
        await asyncio.sleep(stop_s)
        record = await stub.CancelRequest(pb.CancelRequestRequest(request=name), timeout=10.0)
        call.cancel()
        usage = record.usage
        return {
            "consumed": consumed,
            "generated": usage.generated_tokens,
            "sent": usage.sent_tokens,
            "event_bytes": size,
        }


async def others_rate(router: str, model: str, during: Any, seconds: float) -> float:
    """Tokens/s of the other readers together while `during` (or nothing) goes on."""
    received = 0

    async def one(client: AsyncClient, number: int) -> None:
        nonlocal received
        # A window that suits a fast engine and a slow machine: tokens then travel many to an event.
        stream = client.generate(
            f"other {number}", model=model, max_tokens=MAX_TOKENS, window_tokens=1024, timeout_s=120.0
        )
        async for event in stream:
            if isinstance(event, Delta):
                received += len(event.token_ids)

    loop = asyncio.get_running_loop()
    async with AsyncClient(router) as client:
        tasks = [asyncio.create_task(one(client, number)) for number in range(OTHERS)]
        await asyncio.sleep(WARM_S)
        slow = asyncio.create_task(during) if during is not None else None
        await asyncio.sleep(WARM_S)
        before, at = received, loop.time()
        await asyncio.sleep(seconds - 2 * WARM_S)
        rate = (received - before) / (loop.time() - at)
        if slow is not None:
            await slow
        assert not any(task.done() for task in tasks), "a reader ended before its time"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rate


async def pairs(router: str, model: str, stop_s: float) -> tuple[dict[str, Any], dict[str, int]]:
    """The others' rate with and without a slow reader, in turn; and what was generated for that."""
    ratios, form = [], {}

    async def with_slow() -> tuple[float, dict[str, int]]:
        slow = asyncio.ensure_future(slow_interactive(router, stop_s, model))
        return await others_rate(router, model, slow_done(slow), stop_s), await slow

    for _ in range(ROUNDS):
        alone = await others_rate(router, model, None, stop_s)
        beside, form = await with_slow()
        ratios.append(beside / alone)
    return {
        "tokens_per_s_each": alone / OTHERS,
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }, form


async def measure(stack: stacks.RunningStack, scale: float) -> tuple[dict[str, Any], list[Any]]:
    """All forms of the call, and the pairs."""
    stop_s = max(3.0, STOP_S * scale)
    router = stack.router
    steady, _ = await pairs(router, STEADY, stop_s)
    fast, interactive = await pairs(router, FAST, stop_s)
    forms = {
        "interactive": interactive,
        "plain, the SDK's channel options": await slow_plain(router, stop_s, list(OPTIONS)),
        "plain, gRPC's default options": await slow_plain(router, stop_s, []),
    }
    figures = {
        "stopped_s": stop_s,
        "window_tokens": WINDOW,
        "beyond_consumed": {name: form["generated"] - form["consumed"] for name, form in forms.items()},
        "forms": forms,
        "others_steady": steady,
        "others_fast": fast,
    }
    return figures, _rows(figures)


async def slow_done(task: asyncio.Future[Any]) -> None:
    """Wait for the slow reader without taking its result."""
    await asyncio.wait({task})


def _rows(figures: dict[str, Any]) -> list[Any]:
    beyond = figures["beyond_consumed"]
    limit = WINDOW + 1
    rows: list[Any] = [
        (
            f"generated beyond what was read in {figures['stopped_s']:.0f} s, interactive, tokens",
            str(beyond["interactive"]),
            f"<= {limit}",
            beyond["interactive"] <= limit,
        )
    ]
    for name, form in figures["forms"].items():
        if name.startswith("plain"):
            sdk = "SDK" in name
            # What the receiver's window holds, in events of one token (gRPC lets half as much again in), and the
            # credit window behind it.
            window_bytes = 16_384 if sdk else 4 * 2**20
            bound = 3 * window_bytes // (2 * form["event_bytes"]) + limit
            rows.append(
                (
                    f"the same, {name} ({form['event_bytes']} bytes an event), tokens",
                    str(beyond[name]),
                    f"<= {bound}",
                    beyond[name] <= bound,
                )
            )
    steady, fast = figures["others_steady"], figures["others_fast"]
    rows += [
        ("rate of each of the 15 others at 2,000 in all, tokens/s", f"{steady['tokens_per_s_each']:.0f}", "", None),
        (
            "their rate beside the slow reader / without it",
            f"{steady['ratio']:.3f}",
            ">= 0.97",
            steady["ratio"] >= 0.97,
        ),
        ("rate of each at 2,000 each (the machine is full), tokens/s", f"{fast['tokens_per_s_each']:.0f}", "", None),
        ("their rate beside the slow reader / without it", f"{fast['ratio']:.3f}", "", None),
    ]
    return rows
