"""The engine client against the real Triton and the synthetic engine."""

import asyncio
import contextlib
import os
import signal
import time

import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace.engine.contract import merge
from headrace.triton import engine_client, event_stream
from headrace.triton.engine_client import EngineClient
from headrace.triton.event_stream import EngineLost
from headrace.triton.process import TritonPlan, start_triton
from headrace.triton.workspace import DEFAULT_CACHE_DIR, find_model_repository, prepare_triton

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

REVISION = "models/m/revisions/0123456789ab"


class Sink:
    def __init__(self):
        self.batches, self.events, self.refused = [], [], []
        self._news = asyncio.Event()

    def on_batch(self, batch):
        self.batches.append(batch)
        self.events += batch.events
        self._news.set()

    def on_refused(self, seqs, error):
        self.refused.append((tuple(seqs), error))
        self._news.set()

    async def until(self, condition, timeout_s=20):
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def of(self, kind, seq):
        return [e for e in self.events if e["type"] == kind and e["seq"] == seq] if self.events else []

    def tokens(self, seq):
        return [t for batch in self.batches for part in batch.parts() if part.seq == seq for t in part.token_ids]


def plan(tmp_path):
    return TritonPlan(
        files=prepare_triton(DEFAULT_CACHE_DIR),
        model_repository=find_model_repository(None),
        engine_config={
            "engine": "synthetic",
            "revision": REVISION,
            "incarnation": "i",
            "slots": 16,
            "context_tokens": 8192,
            "max_waiting": 256,
        },
        directory=tmp_path,
        threads=1,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def triton(tmp_path_factory):
    process = start_triton(plan(tmp_path_factory.mktemp("worker")))
    yield process
    await process.stop(10)


@contextlib.asynccontextmanager
async def connected(target, owner="schedulers/test"):
    sink = Sink()
    client = EngineClient(target, owner=owner, sink=sink)
    running = None
    try:
        async with asyncio.timeout(60):
            await client.wait_loaded()
        await client.open(10)
        running = asyncio.create_task(client.run())
        yield client, sink, running
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await client.close()


def request(seq, **fields):
    return {"seq": seq, "prompt": "hello", "max_tokens": 10, "ignore_eos": True, "credit": -1, **fields}


async def test_the_hello_says_what_the_engine_is(triton):
    async with connected(triton.target) as (client, _, _):
        assert (client.hello["revision"], client.hello["slots"]) == (REVISION, 16)
        assert (await client.ping())["ok"] is True


async def test_sequences_submitted_together_go_out_as_one_operation(triton):
    async with connected(triton.target) as (client, sink, _):
        sent = []
        encode = client._encode

        def spy(operation):
            sent.append(operation.op)
            return encode(operation)

        client._encode = spy
        for seq in range(1, 41):
            client.generate(request(seq))
        for seq in range(1, 41):
            client.credit(seq, 5)
        client.cancel([3], "cancelled")
        client.cancel([4], "cancelled")
        await sink.until(lambda: all(sink.of("finished", seq) for seq in range(1, 41)))
        assert sent == ["generate", "credit", "cancel"]
        numbers = [batch.number for batch in sink.batches]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_credits_only_rise_and_the_last_one_counts(triton):
    async with connected(triton.target) as (client, sink, _):
        client.generate(request(201, max_tokens=100, credit=3))
        await sink.until(lambda: len(sink.tokens(201)) == 3)
        for limit in (10, 30, 20):
            client.credit(201, limit)
        await sink.until(lambda: len(sink.tokens(201)) == 30)
        client.cancel([201])
        await sink.until(lambda: sink.of("finished", 201))
        assert sink.of("finished", 201)[0]["reason"] == "cancelled"
        assert len(sink.tokens(201)) == 30


async def test_the_columns_add_up_to_what_the_engine_says(triton):
    async with connected(triton.target) as (client, sink, _):
        for seq in range(301, 317):
            client.generate(request(seq, max_tokens=500))
        await sink.until(lambda: all(sink.of("finished", seq) for seq in range(301, 317)))
        whole = merge(sink.batches)
        assert sum(whole.token_counts) == len(whole.token_ids)
        for seq in range(301, 317):
            assert len(sink.tokens(seq)) == sink.of("finished", seq)[0]["usage"]["emitted"] == 500


async def test_a_refused_request_is_an_event_and_a_refused_operation_names_its_sequences(triton):
    async with connected(triton.target) as (client, sink, _):
        client.generate(request(401, max_tokens=100_000))
        await sink.until(lambda: sink.of("refused", 401))
        client.generate(request(-5))
        await sink.until(lambda: sink.refused)
        assert sink.refused[0][0] == (-5,)
        assert sink.refused[0][1]["reason"] == "INVALID_REQUEST"


async def test_an_idle_engine_is_heard_of(triton):
    async with connected(triton.target) as (client, sink, running):
        await sink.until(lambda: any(e["type"] == "alive" for e in sink.events), 5)
        assert client.stats["slots"] == 16
        assert not running.done()


async def test_a_new_owner_supersedes_the_old_one(triton):
    async with connected(triton.target, "schedulers/old") as (client, sink, running):
        client.generate(request(501, max_tokens=1000, credit=5))
        await sink.until(lambda: len(sink.tokens(501)) == 5)
        async with connected(triton.target, "schedulers/new") as (_, other, _):
            with pytest.raises(EngineLost, match="another Scheduler took it over"):
                await asyncio.wait_for(running, 5)
            await other.until(lambda: other.batches, 5)
            assert not other.tokens(501)


async def test_an_engine_that_is_not_there_is_lost_not_waited_for(triton):
    client = EngineClient("127.0.0.1:1", owner="schedulers/test", sink=Sink())
    with pytest.raises(EngineLost):
        await client.open(2)
    await client.close()


async def test_a_frozen_server_is_noticed_within_seconds(tmp_path):
    process = start_triton(plan(tmp_path))
    try:
        async with connected(process.target) as (client, sink, running):
            client.generate(request(1, max_tokens=1000, credit=5))
            await sink.until(lambda: sink.tokens(1))
            os.kill(process.pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(EngineLost, match=r"silent|UNAVAILABLE"):  # the ping may be faster
                await asyncio.wait_for(running, 10)
            assert time.monotonic() - started < engine_client.SILENCE_MAX_S + 2
    finally:
        process.kill()
        await process.wait_exit()


async def test_our_own_standstill_is_not_the_engines_silence(triton):
    async with connected(triton.target) as (client, _, running):
        time.sleep(engine_client.SILENCE_MAX_S + 1)
        assert (await client.ping())["ok"] is True
        assert not running.done()


async def test_a_server_that_shuts_down_is_lost(tmp_path):
    process = start_triton(plan(tmp_path))
    async with connected(process.target) as (client, _, running):
        os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 15
        while not running.done():
            assert time.monotonic() < deadline
            client.credit(1, int(time.monotonic() * 1000))
            await asyncio.sleep(0.1)
        with pytest.raises(EngineLost):
            await running
    await process.stop(10)


async def test_a_stock_client_can_still_run_one_request(triton):
    """The debugging door of the contract is open beside the event stream."""
    async with connected(triton.target) as (client, _, _):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(client._channel)
        assert (await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="llm"), timeout=5)).name == "llm"


async def test_the_event_stream_goes_on_as_one_request_after_another_and_nothing_is_lost(triton, monkeypatch):
    monkeypatch.setattr(event_stream, "REQUEST_RESPONSES_MAX", 2)
    async with connected(triton.target) as (client, sink, running):
        for seq in range(1, 9):
            client.generate(request(seq, max_tokens=3000))
        await sink.until(lambda: all(sink.of("finished", seq) for seq in range(1, 9)))
        assert [len(sink.tokens(seq)) for seq in range(1, 9)] == [3000] * 8
        assert {sink.of("finished", seq)[0]["reason"] for seq in range(1, 9)} == {"length"}
        assert client._events.request > 3
        assert not running.done()
        async with connected(triton.target, owner="schedulers/other"):
            with pytest.raises(EngineLost, match="another Scheduler took it over"):
                async with asyncio.timeout(10):
                    await running
