"""The request contract through the whole path: slow readers, preemption, broken connections, killed clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.cutting_proxy import CuttingProxy

from headrace.api.registry.v1 import registry_service_pb2 as registry_pb2
from headrace.api.registry.v1 import resources_pb2
from headrace.cli.registration import CALL_S, Admin, Execution
from headrace.client import AsyncClient, AsyncStream, Cancelled, Delta, FinishReason, RequestState
from stack.engine_stats import engine_stats
from stack.waiting import until
from support.stack import SYNTHETIC, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]
WINDOW = 32


@contextmanager
def serving(stack: RunningStack, name: str, execution: Execution) -> Iterator[None]:
    """A synthetic revision of its own, for as long as the block runs."""
    with Admin(stack.registry) as admin:
        revision = admin.add(name=name, engine=resources_pb2.Execution.ENGINE_SYNTHETIC, execution=execution)
        admin.wait_ready(revision, 60.0, lambda _text: None)
        try:
            yield
        finally:
            admin.stub.DeleteAlias(registry_pb2.DeleteAliasRequest(name=f"aliases/{name}"), timeout=CALL_S)


async def read_tokens(events: object, count: int) -> list[int]:
    """Ids of the next `count` tokens, or a few more."""
    ids: list[int] = []
    async for event in events:  # type: ignore[attr-defined]
        if isinstance(event, Delta):
            ids += event.token_ids
        if len(ids) >= count:
            break
    return ids


def idle(stack: RunningStack, model: str) -> bool:
    stats = engine_stats(stack, model)
    return not any(stats[name] for name in ("active", "waiting", "paused", "preempted", "kv_reserved"))


async def test_a_reader_that_stops_costs_a_window_and_a_step_and_goes_on_where_it_was(stack: RunningStack) -> None:
    async with AsyncClient(stack.router) as client:
        truth = await client.generate("slow", model=SYNTHETIC, max_tokens=150).read()
        stream = client.generate("slow", model=SYNTHETIC, max_tokens=150)
        events = aiter(stream)
        ids = await read_tokens(events, 10)
        await until(lambda: engine_stats(stack, SYNTHETIC)["paused"] == 1)
        record = await client.get_request(stream.answer.request)
        assert record.usage.generated_tokens <= len(ids) + WINDOW + 1
        ids += await read_tokens(events, 1000)
    assert tuple(ids) == truth.token_ids
    assert stream.answer.finish_reason is FinishReason.LENGTH
    usage = stream.answer.usage
    assert usage is not None
    assert (usage.generated_tokens, usage.sent_tokens) == (150, 150)
    assert 150 - WINDOW <= usage.acknowledged_tokens <= 150


@pytest.mark.parametrize("run_ahead", [0, 64], ids=["an engine that pauses", "an engine that runs ahead"])
async def test_who_waits_gets_the_cells_of_readers_that_stopped_and_their_answers_stay_the_same(
    stack: RunningStack, run_ahead: int
) -> None:
    execution = Execution(
        context_tokens=512, slots=2, kv_cells=700, decode_tokens_per_s=400.0, run_ahead_tokens=run_ahead
    )
    with serving(stack, "tight", execution):
        async with AsyncClient(stack.router) as client:

            def ask(prompt: str) -> AsyncStream:
                return client.generate(prompt, model="tight", max_tokens=300, timeout_s=60.0)

            prompts = ["first 🌊 reader", "second reader"]
            truths = [await ask(prompt).read() for prompt in prompts]
            streams = [ask(prompt) for prompt in prompts]
            events = [aiter(stream) for stream in streams]
            ids = [await read_tokens(one, 5) for one in events]
            # Both hold their slot and, together, nearly all cells; neither reads on. A third comes all the same.
            third = await ask("third").read()
            assert len(third.token_ids) == 300
            assert engine_stats(stack, "tight")["preemptions"] >= 1
            for number, one in enumerate(events):
                ids[number] += await read_tokens(one, 1000)
        for mine, stream, truth in zip(ids, streams, truths, strict=True):
            assert tuple(mine) == truth.token_ids
            assert stream.answer.text == truth.text
            assert stream.answer.usage == truth.usage or stream.answer.usage is not None
        await until(lambda: idle(stack, "tight"))


async def test_a_broken_connection_is_resumed_and_nobody_can_tell(stack: RunningStack) -> None:
    async with AsyncClient(stack.router) as direct, CuttingProxy(stack.router) as proxy:
        truth = await direct.generate("broken", model=SYNTHETIC, max_tokens=100).read()
        async with AsyncClient(proxy.endpoint) as client:
            stream = client.generate("broken", model=SYNTHETIC, max_tokens=100, on_disconnect="continue")
            sequences = []
            async for event in stream:
                sequences.append(event.sequence)
                if event.sequence in (1, 20, 55):
                    proxy.cut()
            answer = stream.answer
        assert proxy.cuts >= 2
    assert sequences == list(range(1, len(sequences) + 1))
    assert (answer.token_ids, answer.text, answer.finish_reason) == (truth.token_ids, truth.text, truth.finish_reason)


async def test_a_request_is_looked_up_and_ended_by_its_name(stack: RunningStack) -> None:
    async with AsyncClient(stack.router) as reader, AsyncClient(stack.router) as other:
        stream = reader.generate("to be ended", model=SYNTHETIC, max_tokens=3000)
        events = aiter(stream)
        await read_tokens(events, 3)
        name = stream.answer.request
        assert (await other.get_request(name)).attached
        record = await other.cancel_request(name)
        with pytest.raises(Cancelled) as caught:
            await read_tokens(events, 10_000)
    assert record.state is RequestState.TERMINAL
    assert record.finish_reason is FinishReason.CANCELLED
    assert record.timing.cancel_to_freed_s is not None
    assert record.timing.cancel_to_freed_s < 1.0
    assert caught.value.answer is not None
    assert caught.value.answer.usage is not None


async def test_a_killed_client_leaves_nothing_behind(stack: RunningStack) -> None:
    program = Path(__file__).parents[1] / "bench" / "killed_client.py"
    command = [sys.executable, str(program), stack.router, SYNTHETIC, "12", "3"]
    client = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        await until(lambda: engine_stats(stack, SYNTHETIC)["active"] >= 8)
    finally:
        client.kill()
        client.communicate(timeout=10)
    await until(lambda: idle(stack, SYNTHETIC))
