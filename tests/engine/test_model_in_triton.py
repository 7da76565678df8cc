"""`model.py` in the real Triton, spoken to as a stock client does: raw requests on one ModelStreamInfer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from headrace.engine import contract
from headrace.engine.contract import Reply, StepBatch
from headrace.triton.process import TritonPlan, start_triton
from headrace.triton.workspace import DEFAULT_CACHE_DIR, find_model_repository, prepare_triton

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

SLOTS = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    plan = TritonPlan(
        files=prepare_triton(DEFAULT_CACHE_DIR),
        model_repository=find_model_repository(None),
        engine_config={
            "engine": "synthetic",
            "revision": "r",
            "incarnation": "i",
            "slots": SLOTS,
            "context_tokens": 100_000,
        },
        directory=Path(tmp_path_factory.mktemp("worker")),
        threads=1,
    )
    process = start_triton(plan)
    async with grpc.aio.insecure_channel(process.target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if (await stub.ModelReady(service_pb2.ModelReadyRequest(name="llm"))).ready:
                        break
                await asyncio.sleep(0.1)
    yield process.target
    await process.stop(10)


class Stream:
    """Requests out, answers sorted by the id of their request."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self._in: dict[str, asyncio.Queue[Any]] = {}
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.call = stub.ModelStreamInfer(self._requests())
        self._reader = asyncio.create_task(self._read())
        self._count = 0

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield await self._out.get()

    async def _read(self) -> None:
        async for response in self.call:
            assert not response.error_message
            self._in[response.infer_response.id].put_nowait(response.infer_response)

    def send(self, op: str, document: Any = None, tokens: list[int] | None = None) -> str:
        return self.send_raw(contract.encode_op(op, document, tokens))

    def send_raw(self, inputs: list[contract.RawInput]) -> str:
        self._count += 1
        request = service_pb2.ModelInferRequest(model_name="llm", id=str(self._count))
        for name, datatype, shape, raw in inputs:
            tensor = request.inputs.add(name=name, datatype=datatype)
            tensor.shape.extend(shape)
            request.raw_input_contents.append(raw)
        self._in[request.id] = asyncio.Queue()
        self._out.put_nowait(request)
        return request.id

    async def next(self, name: str) -> StepBatch | Reply:
        """Decoding checks every tensor's datatype."""
        async with asyncio.timeout(20):
            return contract.decode_response(await self._in[name].get())

    async def step(self, name: str) -> StepBatch:
        batch = await self.next(name)
        assert isinstance(batch, StepBatch)
        return batch

    async def ask(self, op: str, document: Any = None) -> dict[str, Any]:
        reply = await self.next(self.send(op, document))
        assert isinstance(reply, Reply)
        assert reply.final
        return reply.document

    async def close(self) -> None:
        self.call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected(target: str) -> AsyncIterator[Stream]:
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stream = Stream(channel)
        try:
            yield stream
        finally:
            await stream.close()


def requests(count: int, **fields: Any) -> dict[str, Any]:
    return {"requests": [{"seq": seq, "prompt": f"{seq}", "max_tokens": 9, **fields} for seq in range(count)]}


async def test_a_stream_begins_with_hello_and_counts_without_gaps(target: str) -> None:
    async with connected(target) as stream:
        events = stream.send("events", {"owner": "test"})
        hello = await stream.step(events)
        assert hello.number == 1
        assert hello.events[0]["type"] == "hello"
        assert hello.events[0]["contract"] == contract.CONTRACT
        assert hello.events[0]["engine"]["slots"] == SLOTS
        assert await stream.ask("generate", requests(SLOTS, top_logprobs=2)) == {"ok": True}
        ended: set[int] = set()
        number = 1
        generated: dict[int, int] = {}
        while len(ended) < SLOTS:
            batch = await stream.step(events)
            assert batch.number == number + 1
            number = batch.number
            for part in batch.parts():
                assert part.seq not in ended
                part.text.decode()
                assert part.logprobs is not None
                assert len(part.logprobs) == len(part.token_ids)
                generated[part.seq] = generated.get(part.seq, 0) + len(part.token_ids)
            ended |= {event["seq"] for event in batch.events if event["type"] == "finished"}
        assert generated == dict.fromkeys(range(SLOTS), 9)


async def test_at_full_speed_steps_travel_together(target: str) -> None:
    async with connected(target) as stream:
        events = stream.send("events")
        await stream.ask("generate", requests(SLOTS, max_tokens=1000, ignore_eos=True))
        ended = tokens = steps = responses = 0
        while ended < SLOTS:
            batch = await stream.step(events)
            ended += sum(event["type"] == "finished" for event in batch.events)
            tokens += len(batch.token_ids)
            steps += batch.steps
            responses += bool(batch.seqs)
        assert tokens == SLOTS * 1000
        assert responses < steps


async def test_losing_the_stream_ends_its_sequences(target: str) -> None:
    async with connected(target) as stream:
        events = stream.send("events")
        await stream.step(events)
        await stream.ask("generate", requests(3, max_tokens=50_000, ignore_eos=True, credit=5))
        while (await stream.ask("stats"))["stats"]["paused"] < 3:
            await asyncio.sleep(0.01)
    async with connected(target) as other:
        async with asyncio.timeout(2):
            while True:
                stats = (await other.ask("stats"))["stats"]
                if stats["active"] == stats["kv_reserved"] == 0:
                    break
                await asyncio.sleep(0.02)
        reply = await other.ask("generate", requests(1))
        assert not reply["ok"], "there is no stream to tell the outcome on"


async def test_a_cancel_is_confirmed_when_its_slot_is_free(target: str) -> None:
    async with connected(target) as stream:
        events = stream.send("events")
        await stream.ask("generate", requests(2, max_tokens=50_000, ignore_eos=True, credit=5))
        assert await stream.ask("cancel", {"seqs": [1, 77], "reason": "deadline"}) == {"ok": True}
        finished = None
        while finished is None:
            batch = await stream.step(events)
            finished = next((event for event in batch.events if event["type"] == "finished"), None)
        assert (finished["seq"], finished["reason"]) == (1, "deadline")
        assert (await stream.ask("stats"))["stats"]["active"] == 1


async def test_run_streams_one_sequence_and_ends_with_final(target: str) -> None:
    async with connected(target) as stream:
        name = stream.send("run", {"seq": 1, "prompt": "x", "max_tokens": 40, "ignore_eos": True})
        ids: list[int] = []
        while True:
            batch = await stream.step(name)
            ids += batch.token_ids
            if batch.final:
                break
        assert len(ids) == 40
        assert batch.events[-1]["type"] == "finished"
        refused = await stream.ask("run", {"seq": 1, "prompt": ""})
        assert refused["error"]["field"] == "prompt"


async def test_nothing_a_client_sends_brings_a_traceback_back(target: str) -> None:
    def element(data: bytes) -> bytes:
        return len(data).to_bytes(4, "little") + data

    wrong = [
        [("op", "BYTES", [1], element(b"\xff\xfe"))],
        [("op", "BYTES", [1], element(b"generate")), ("request", "BYTES", [1], element(b"{\xff"))],
        [("op", "BYTES", [1], element(b"generate")), ("request", "BYTES", [1], element(b'{"requests":7}'))],
        [
            ("op", "BYTES", [1], element(b"generate")),
            ("request", "BYTES", [1], element(b'{"requests":[{"seq":1,"prompt_tokens":9}]}')),
            ("tokens", "INT32", [1], b"\1\0\0\0"),
        ],
    ]
    async with connected(target) as stream:
        events = stream.send("events")
        await stream.step(events)
        for inputs in wrong:
            reply = await stream.next(stream.send_raw(inputs))
            assert isinstance(reply, Reply)
            assert reply.error["reason"] == "INVALID_REQUEST"
            assert "Traceback" not in str(reply.document)
        assert (await stream.ask("ping"))["ok"] is True
