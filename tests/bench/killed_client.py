"""A client that opens streams and waits to be killed: `python killed_client.py TARGET MODEL STREAMS SEED`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys

from headrace.client import AsyncClient, HeadraceError


async def main(target: str, model: str, streams: int, seed: int) -> None:
    chance = random.Random(seed)
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:

        async def one(number: int) -> None:
            await asyncio.sleep(chance.uniform(0, 0.4))
            stream = client.generate(
                f"stream {seed}-{number} " + "word " * chance.randrange(200),
                model=model,
                max_tokens=chance.randrange(1, 3000),
                interactive=chance.random() < 0.7,
            )
            sys.stdout.write("o")  # one more was opened
            sys.stdout.flush()
            with contextlib.suppress(HeadraceError):
                async for _event in stream:
                    if chance.random() < 0.02:
                        await asyncio.sleep(chance.uniform(0, 1))  # some do not read for a while

        for number in range(streams):
            group.create_task(one(number))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
