"""Connections break while requests run that were made to be resumed: are the transcripts whole?"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from bench.cutting_proxy import CuttingProxy
from headrace.client import AsyncClient, Delta, Event, Terminal
from support import stack as stacks

REQUESTS = 100
TOGETHER = 10
TOKENS = 120

Transcript = tuple[tuple[int, ...], str, str]


async def read(client: AsyncClient, prompt: str, **options: Any) -> tuple[Transcript, list[Event]]:
    """Ids, text and end of one request, and its events."""
    events: list[Event] = []
    async for event in client.generate(prompt, model=stacks.SYNTHETIC, max_tokens=TOKENS, timeout_s=60.0, **options):
        events.append(event)
    ids = tuple(i for event in events if isinstance(event, Delta) for i in event.token_ids)
    text = "".join(event.text for event in events if isinstance(event, Delta))
    last = events[-1]
    assert isinstance(last, Terminal)
    return (ids, text, last.finish_reason.name), events


async def broken(proxy: CuttingProxy, number: int, chance: random.Random) -> tuple[Transcript, list[Event]]:
    """One request through the proxy, on a channel of its own."""
    async with AsyncClient(proxy.endpoint) as client:
        return await read(
            client,
            f"resumed {number}",
            on_disconnect="continue",
            interactive=chance.random() < 0.7,
        )


async def run(router: str, requests: int) -> dict[str, Any]:
    """Pairs of undisturbed and broken requests."""
    chance = random.Random(11)
    identical = contiguous = 0
    async with AsyncClient(router) as direct, CuttingProxy(router) as proxy:

        async def cutting() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.2, 0.9))
                proxy.cut()

        cuts = asyncio.create_task(cutting())
        for first in range(0, requests, TOGETHER):
            numbers = range(first, min(first + TOGETHER, requests))
            truths = await asyncio.gather(*(read(direct, f"resumed {number}") for number in numbers))
            answers = await asyncio.gather(*(broken(proxy, number, chance) for number in numbers))
            for (truth, _), (answer, events) in zip(truths, answers, strict=True):
                identical += truth == answer
                contiguous += [event.sequence for event in events] == list(range(1, len(events) + 1))
        cuts.cancel()
        return {"requests": requests, "cuts": proxy.cuts, "identical": identical, "contiguous": contiguous}


async def measure(stack: stacks.RunningStack, scale: float) -> tuple[dict[str, Any], list[Any]]:
    """Run it against a stack."""
    requests = max(TOGETHER, round(REQUESTS * scale))
    figures = await run(stack.router, requests)
    cuts = figures["cuts"]
    return figures, [
        ("connections broken", str(cuts), f">= {requests // TOGETHER}", cuts * TOGETHER >= requests),
        ("transcripts identical to undisturbed ones", f"{figures['identical']} of {requests}", f"{requests}",
         figures["identical"] == requests),
        ("with sequences from 1 without a gap", f"{figures['contiguous']} of {requests}", f"{requests}",
         figures["contiguous"] == requests),
    ]  # fmt: skip
