"""The engine client against an engine that breaks its contract, or is slow to take an operation."""

import asyncio
import contextlib
import math
import time

import pytest

from headrace.control.deadlines import Budget
from headrace.triton import engine_client
from headrace.triton.engine_client import EngineClient
from headrace.triton.event_stream import EngineLost
from support.scripted_engine import admitted, finished, scripted_engine


class Sink:
    def __init__(self):
        self.batches, self.refused = [], []

    def on_batch(self, batch):
        self.batches.append(batch)

    def on_refused(self, seqs, error):
        self.refused.append((tuple(seqs), error["reason"]))


@contextlib.asynccontextmanager
async def connected(engine):
    sink = Sink()
    client = EngineClient(engine.target, owner="schedulers/test", sink=sink)
    running = None
    try:
        await client.open(5)
        running = asyncio.create_task(client.run())
        yield client, sink, running
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await client.close()


async def test_a_gap_in_the_event_stream_loses_the_engine_and_nothing_behind_it_is_taken():
    async with scripted_engine() as engine, connected(engine) as (_, sink, running):
        await engine.say(1, 7)
        await engine.say(1, 8)
        await engine.tell(finished(1, "stop"), skip=1)
        with pytest.raises(EngineLost, match="the event stream has a gap: message 5 came instead of 4"):
            await asyncio.wait_for(running, 5)
        assert [batch.number for batch in sink.batches] == [2, 3]


@pytest.mark.parametrize("number", [0, 2])
async def test_a_stream_that_does_not_begin_at_its_beginning_is_not_opened(number):
    async with scripted_engine(first_number=number) as engine:
        with pytest.raises(EngineLost, match=f"begins with message {number}"):
            async with connected(engine):
                pass


async def test_what_expires_while_it_waits_for_an_operation_is_refused_here(monkeypatch):
    monkeypatch.setattr(engine_client, "OPERATIONS_OUT_MAX", 1)
    async with scripted_engine() as engine, connected(engine) as (client, sink, _):
        engine.hold = frozenset({"credit"})
        client.credit(9, 1)
        await engine.until(lambda: engine.asked("credit"))
        now = time.monotonic()
        client.generate({"seq": 1}, budget=Budget(now, now + 0.05))
        client.generate({"seq": 2}, budget=Budget(now, math.inf, queue_s=0.05))
        client.generate({"seq": 3}, budget=Budget(now, now + 60, queue_s=30))
        await asyncio.sleep(0.1)
        engine.release.set()
        await engine.until(lambda: engine.asked("generate"))
        (generate,) = engine.asked("generate")
        (request,) = generate["requests"]
        assert request["seq"] == 3
        assert request["deadline_ms"] <= 59_900
        assert request["queue_ms"] <= 29_900
        assert sink.refused == [((1,), "DEADLINE_EXCEEDED"), ((2,), "QUEUE_TIMEOUT")]


async def test_a_credit_that_waits_for_a_sequence_that_ends_is_not_sent(monkeypatch):
    monkeypatch.setattr(engine_client, "OPERATIONS_OUT_MAX", 1)
    async with scripted_engine() as engine, connected(engine) as (client, sink, _):
        engine.hold = frozenset({"ping"})
        pinging = asyncio.create_task(client.ping())
        await engine.until(lambda: engine.asked("ping"))
        for seq in (1, 2, 3):
            client.credit(seq, 10)
        await engine.tell(admitted(1), finished(1, "stop"))
        async with asyncio.timeout(5):
            while not sink.batches:
                await asyncio.sleep(0.01)
        client.cancel([2])
        engine.release.set()
        await pinging
        await engine.until(lambda: engine.asked("cancel"))
        assert engine.asked("credit") == [{"limits": [[3, 10]]}]


async def test_an_engine_that_was_condemned_is_lost_for_that_reason():
    async with scripted_engine() as engine, connected(engine) as (client, _, running):
        client.condemn("it is of no use")
        with pytest.raises(EngineLost, match="it is of no use"):
            await asyncio.wait_for(running, 5)


@pytest.mark.parametrize(
    ("target", "is_local"),
    [
        ("127.0.0.1:8001", True),
        ("127.9.9.9:8001", True),
        ("localhost:8001", True),
        ("[::1]:8001", True),
        ("unix:/run/triton.sock", True),
        ("10.0.0.1:8001", False),
        ("host.example:8001", False),
        ("localhost.example:8001", False),
    ],
)
async def test_whose_clock_an_engine_reads(target, is_local):
    client = EngineClient(target, owner="schedulers/test", sink=Sink())
    assert client.is_local is is_local
    await client.close()


@pytest.mark.parametrize("knows", [True, False])
async def test_a_priority_is_only_told_to_an_engine_whose_contract_has_it(knows):
    async with scripted_engine(**({"priority": True} if knows else {})) as engine, connected(engine) as (client, _, _):
        client.generate({"seq": 1, "prompt": "x", "priority": 4, "credit": 9})
        await engine.until(lambda: engine.asked("generate"))
        (request,) = engine.asked("generate")[0]["requests"]
        assert request == {"seq": 1, "prompt": "x", "credit": 9, **({"priority": 4} if knows else {})}
