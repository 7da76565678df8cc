"""The Scheduler's own way to an engine, with every message checked on the way in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from conformance import tensors
from conformance.providers import Running
from conformance.watch import FOREVER, Heard, Watch
from headrace.engine.contract import RawInput, Reply, StepBatch, decode_response, encode_op
from headrace.triton.engine_client import EngineClient, EngineSink
from headrace.triton.event_stream import EventStream
from headrace.triton.wire import infer_request

_names = itertools.count(1)
# Unlike the names of another test's sequences, as the Scheduler's attempt tokens are.
_seqs = itertools.count(1000)


class CheckedStream(EventStream):
    """`EventStream`, and each message passes the table of tensors first."""

    def __init__(self, sink: EngineSink, call: Any, owner: str) -> None:
        super().__init__(call, owner)
        self._sink = sink

    def decode(self, response: Any) -> StepBatch | None:
        """See EventStream."""
        if response is not grpc.aio.EOF and not response.error_message:
            tensors.check(response.infer_response)
        return super().decode(response)

    async def read(self) -> StepBatch | None:
        """See EventStream. The engine is lost with its last word, of which the Scheduler wants no more."""
        batch = await super().read()
        if batch is not None and batch.final:
            self._sink.on_batch(batch)
        return batch


class CheckedClient(EngineClient):
    """`EngineClient`, and each message passes the table of tensors first."""

    def __init__(self, target: str, *, owner: str, sink: EngineSink) -> None:
        super().__init__(target, owner=owner, sink=sink)
        self._event_stream = functools.partial(CheckedStream, sink)  # type: ignore[assignment]

    @property
    def requests_read(self) -> int:
        """Requests that the event stream has been carried by so far."""
        assert self._events is not None
        return self._events.request

    def _on_reply(self, response: Any) -> None:
        if not response.error_message:
            tensors.check(response.infer_response)
        super()._on_reply(response)


class Session:
    """One owner of an engine. `engine` says what runs, `hello` what it says of itself."""

    def __init__(self, engine: Running, client: CheckedClient, watch: Watch, reading: asyncio.Task[None]) -> None:
        self.engine = engine
        self.client = client
        self.watch = watch
        self.reading = reading
        self.hello: Mapping[str, Any] = client.hello

    def submit(self, request: Mapping[str, Any], tokens: Sequence[int] = (), **changes: Any) -> Heard:
        """Send a REQUEST with a new sequence id."""
        document = {"seq": next(_seqs), **request, **changes}
        heard = self.watch.expect(document)
        self.client.generate(document, tokens)
        return heard

    def credit(self, heard: Heard, limit: int) -> None:
        """Let it go on to `limit`, -1 without one."""
        heard.credit = max(heard.credit, FOREVER if limit == -1 else limit)
        self.client.credit(heard.seq, FOREVER if limit == -1 else limit)

    def cancel(self, *heard: Heard, reason: str = "cancelled") -> None:
        self.client.cancel([one.seq for one in heard], reason)

    async def over(self, *heard: Heard, timeout_s: float = 60) -> None:
        """Wait for the end of each."""
        await self.watch.until(lambda: all(one.is_over for one in heard), timeout_s)

    async def admitted(self, heard: Heard) -> None:
        await self.watch.until(lambda: heard.admitted is not None or heard.is_over)
        assert heard.refused is None, heard.refused

    async def tokens(self, heard: Heard, count: int) -> None:
        """Wait until it has had so many."""
        await self.watch.until(lambda: len(heard.ids) >= count or heard.is_over)

    async def answer(self, request: Mapping[str, Any], tokens: Sequence[int] = (), **changes: Any) -> Heard:
        """One request from beginning to end; it is not refused."""
        heard = self.submit(request, tokens, **changes)
        await self.over(heard)
        assert heard.refused is None, heard.refused
        return heard

    async def stats(self) -> dict[str, Any]:
        document = await ask(self.engine.target, "stats")
        stats = document["stats"]
        assert isinstance(stats, dict)
        return stats

    async def until_stats(self, timeout_s: float = 10, **wanted: Any) -> dict[str, Any]:
        """Wait until the engine's statistics say so; each is a number or a condition on it."""
        stats: dict[str, Any] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    stats = await self.stats()
                    if all(w(stats[name]) if callable(w) else stats[name] == w for name, w in wanted.items()):
                        return stats
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"the statistics did not come to {wanted}: {stats}") from None

    async def assert_idle(self) -> None:
        """Nothing runs, waits or is held, and every sequence has had its one end."""
        await self.until_stats(active=0, waiting=0, paused=0, preempted=0, kv_reserved=0, buffered_tokens=0)
        self.client.list_sequences()
        await self.watch.until(lambda: bool(self.watch.sequences), 10)
        assert self.watch.sequences.pop() == []
        self.watch.assert_kept()


@contextlib.asynccontextmanager
async def connected(engine: Running, owner: str = "schedulers/conformance") -> AsyncIterator[Session]:
    """Own the engine for a while."""
    watch = Watch()
    client = CheckedClient(engine.target, owner=owner, sink=watch)
    reading = None
    try:
        await client.open(20)
        reading = asyncio.create_task(client.run())
        reading.add_done_callback(watch.on_lost)
        yield Session(engine, client, watch, reading)
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await client.close()


async def ask(target: str, op: str, document: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One operation on a stream of its own, as a stock client sends it; its receipt."""
    return await ask_raw(target, encode_op(op, document))


async def ask_raw(target: str, inputs: list[RawInput]) -> dict[str, Any]:
    """Any inputs, also such as the codec would not write."""
    async with grpc.aio.insecure_channel(target) as channel, asyncio.timeout(20):
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(infer_request(f"ask-{next(_names)}", inputs))
        response = await call.read()
        assert response is not grpc.aio.EOF
        assert not response.error_message, response.error_message
        tensors.check(response.infer_response)
        reply = decode_response(response.infer_response)
        assert isinstance(reply, Reply)
        assert reply.final
        await call.done_writing()
        return reply.document


async def run_alone(target: str, request: Mapping[str, Any]) -> list[StepBatch]:
    """`run`: one sequence on a stream of its own, until FINAL."""
    batches = []
    async with grpc.aio.insecure_channel(target) as channel, asyncio.timeout(60):
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(infer_request(f"run-{next(_names)}", encode_op("run", request)))
        while True:
            response = await call.read()
            assert response is not grpc.aio.EOF
            tensors.check(response.infer_response)
            batch = decode_response(response.infer_response)
            assert isinstance(batch, StepBatch)
            batches.append(batch)
            if batch.final:
                return batches
