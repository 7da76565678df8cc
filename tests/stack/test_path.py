"""The whole path, with real parts: client -> Router -> Scheduler -> Triton -> engine, Registry and etcd beside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.api.registry.v1 import registry_service_pb2 as registry_pb2
from headrace.api.registry.v1.registry_service_pb2_grpc import RegistryServiceStub
from headrace.cli.weights import default_model
from headrace.client import AsyncClient
from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from stack.engine_stats import engine_stats, workers
from stack.waiting import until, until_async
from support.stack import MODEL, SYNTHETIC, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

DEADLINE_S = 60.0
TOKENS = 24

# Greedy decoding takes the likeliest token; at these prompts it leads the second by 2.4 in logit or more for 24 tokens.
# llama.cpp's kernels round differently for different batch sizes, so only such prompts can be compared across them.
DECISIVE = [
    "1\n2\n3\n4\n5\n6\n",
    "= = = = = = = = = =",
    "la la la la la la la la la",
    "Chapter 1\nChapter 2\nChapter 3\nChapter 4\n",
    "x x x x x x x x x x",
    "1900 1901 1902 1903 1904",
    "* * * * * * * * * *",
    "one, one, one, one, one, one, one,",
    "item 1, item 2, item 3, item 4, item 5,",
    "- - - - - - - - - - - -",
    "knock knock knock knock knock knock",
    "1 1 1 1 1 1 1 1",
    "no no no no no no no no",
    "1, 2, 3, 4, 5, 6, 7,",
    "1a 2a 3a 4a 5a 6a",
    "A1 A2 A3 A4 A5 A6 A7",
]


def bare_greedy(prompts: list[str], adapter: Path | None = None) -> list[list[int]]:
    """What llama.cpp alone makes of each prompt, one at a time, in a process of its own; with an adapter, if named."""
    script = Path(__file__).resolve().parents[1] / "bench/bare_llamacpp.py"
    done = subprocess.run(
        [sys.executable, script, default_model(lambda text: None), "--tokens", str(TOKENS), "--concurrency", "1",
         "--prompts", json.dumps(prompts), "--adapter", adapter or ""],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return [json.loads(line)["ids"][0] for line in done.stdout.splitlines()]


Events = list[pb.GenerateEvent]


async def read(
    stack: RunningStack, *, timeout_s: float = DEADLINE_S, events: Events | None = None, **fields: Any
) -> Events:
    """All events of one request, over a connection of its own; raises what the call ends with."""
    events = [] if events is None else events
    async with grpc.aio.insecure_channel(stack.router) as channel:
        async for event in InferenceServiceStub(channel).Generate(pb.GenerateRequest(**fields), timeout=timeout_s):
            events.append(event)
    return events


def greedy(prompt: str, model: str = MODEL, tokens: int = TOKENS) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "sampling": {"temperature": 0.0},
        "stop": {"ignore_eos": True},
    }


def check_story(events: list[pb.GenerateEvent]) -> pb.Terminal:
    """Numbered from 1 without a gap; accepted first; one terminal, last."""
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds.count("terminal") == 1
    assert kinds[-1] == "terminal"
    return events[-1].terminal


def ids_of(events: list[pb.GenerateEvent]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


async def test_one_greedy_stream_equals_llama_cpp_token_for_token(stack: RunningStack) -> None:
    # Even one at a time: what other tests left in the prefix cache decides how many tokens its prefill computes.
    prompts = DECISIVE[:6]
    expected = await asyncio.to_thread(bare_greedy, prompts)
    for prompt, ids in zip(prompts, expected, strict=True):
        events = await read(stack, **greedy(prompt))
        assert ids_of(events) == ids
        terminal = check_story(events)
        assert terminal.finish_reason == pb.FINISH_REASON_LENGTH
        assert (terminal.usage.generated_tokens, terminal.usage.sent_tokens) == (TOKENS, TOKENS)


async def test_sixteen_greedy_streams_at_once_equal_llama_cpp_token_for_token(stack: RunningStack) -> None:
    expected = await asyncio.to_thread(bare_greedy, DECISIVE)
    answers = await asyncio.gather(*(read(stack, **greedy(prompt)) for prompt in DECISIVE))
    for prompt, events, ids in zip(DECISIVE, answers, expected, strict=True):
        check_story(events)
        assert ids_of(events) == ids, prompt


@pytest.mark.parametrize("model", [MODEL, SYNTHETIC])
async def test_usage_is_what_the_engine_counted(stack: RunningStack, model: str) -> None:
    before = engine_stats(stack, model)
    answers = await asyncio.gather(*(read(stack, **greedy(f"number {n}", model, 5 + n)) for n in range(8)))
    usages = [check_story(events).usage for events in answers]
    await until(lambda: engine_stats(stack, model)["active"] == 0)
    after = engine_stats(stack, model)
    assert [usage.generated_tokens for usage in usages] == [5 + n for n in range(8)]
    assert sum(u.generated_tokens for u in usages) == after["generated_tokens"] - before["generated_tokens"]
    assert sum(u.prompt_tokens for u in usages) == after["prompt_tokens"] - before["prompt_tokens"]
    assert all(usage.sent_tokens == len(ids_of(events)) for usage, events in zip(usages, answers, strict=True))


async def test_a_cancelled_request_leaves_nothing_behind(stack: RunningStack) -> None:
    async with AsyncClient(stack.router) as client:
        stream = client.generate("to be cancelled", model=SYNTHETIC, max_tokens=2000)
        async for piece in stream.text():
            assert piece
            break
        stream.cancel()
    await until(lambda: engine_stats(stack, SYNTHETIC)["active"] == 0)
    stats = engine_stats(stack, SYNTHETIC)
    assert (stats["waiting"], stats["kv_reserved"]) == (0, 0)


async def test_killing_the_registry_and_etcd_does_not_disturb_a_stream(stack: RunningStack) -> None:
    stack.expect_restart(2)
    before = {part: stack.pid(part) for part in ("registry", "etcd")}
    gaps: list[float] = []
    async with AsyncClient(stack.router) as client:
        stream = client.generate("a long answer", model=SYNTHETIC, max_tokens=400)
        last, killed = time.monotonic(), False
        async for event in stream:
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            if event.sequence == 20 and not killed:
                killed = True
                for pid in before.values():
                    os.kill(pid, signal.SIGKILL)
        assert stream.answer.usage is not None
        assert stream.answer.usage.generated_tokens == 400
        # And what comes after is served from what the Router knows.
        again = await client.generate("afterwards", model=SYNTHETIC, max_tokens=5).read()
        assert again.usage is not None
        assert again.usage.generated_tokens == 5
    assert killed
    assert max(gaps[1:]) < 2.0, "the stream stood still"
    await until(lambda: all(stack.pid(part) != pid for part, pid in before.items()))
    await until(lambda: snapshot_version(stack) > 0)
    await until(lambda: stack.run("status").returncode == 0)


def snapshot_version(stack: RunningStack) -> int:
    with grpc.insecure_channel(stack.registry) as channel:
        try:
            answer = RegistryServiceStub(channel).GetSnapshot(registry_pb2.GetSnapshotRequest(), timeout=5)
        except grpc.RpcError:
            return 0
    return int(answer.snapshot.version)


async def test_a_killed_triton_ends_its_streams_truthfully_and_comes_back(stack: RunningStack) -> None:
    pid = workers(stack)[SYNTHETIC].pid
    events: Events = []
    reading = asyncio.create_task(read(stack, events=events, **greedy("cut off", SYNTHETIC, 3000)))
    await until(lambda: len(events) >= 5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        await reading
    failure = status.from_rpc_error(caught.value)
    assert failure is not None
    assert failure.reason is Reason.STREAM_INTERRUPTED
    terminal = check_story(events)
    assert terminal.finish_reason == pb.FINISH_REASON_INTERRUPTED
    assert terminal.usage.sent_tokens == len(ids_of(events)) > 0

    async def answers() -> bool:
        try:
            return bool(check_story(await read(stack, **greedy("again", SYNTHETIC, 3))))
        except grpc.RpcError:
            return False

    await until_async(answers)
    assert workers(stack)[SYNTHETIC].pid not in (0, pid)
    assert workers(stack)[SYNTHETIC].restarts >= 1


BAD = {
    "unknown model": ({"model": "nope"}, Reason.MODEL_NOT_FOUND, "model"),
    "no model": ({"model": ""}, Reason.INVALID_REQUEST, "model"),
    "empty prompt": ({"prompt": ""}, Reason.INVALID_REQUEST, "prompt"),
    "prompt longer than the context": ({"prompt": "word " * 5000}, Reason.CONTEXT_LENGTH_EXCEEDED, "prompt"),
    "10 MB prompt": ({"prompt": "x" * 10_000_000}, Reason.REQUEST_TOO_LARGE, "prompt"),
    "negative temperature": ({"sampling": {"temperature": -0.1}}, Reason.INVALID_REQUEST, "sampling.temperature"),
    "absurd temperature": ({"sampling": {"temperature": 1e30}}, Reason.INVALID_REQUEST, "sampling.temperature"),
    "top_p of zero": ({"sampling": {"top_p": 0.0}}, Reason.INVALID_REQUEST, "sampling.top_p"),
    "min_p that is no number": ({"sampling": {"min_p": float("nan")}}, Reason.INVALID_REQUEST, "sampling.min_p"),
    "max_tokens of zero": ({"max_tokens": 0}, Reason.INVALID_REQUEST, "max_tokens"),
    "more output than the context": ({"max_tokens": 4096}, Reason.CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
    "10,000 stop strings": ({"stop": {"strings": ["s"] * 10_000}}, Reason.INVALID_REQUEST, "stop.strings"),
    "unknown effort": ({"reasoning_effort": 77}, Reason.INVALID_REQUEST, "reasoning_effort"),
    "unknown role": (
        {"conversation": {"messages": [{"role": 9, "content": "x"}]}},
        Reason.INVALID_REQUEST,
        "conversation.messages[0].role",
    ),
    "token id out of the vocabulary": ({"tokens": {"ids": [10_000_000]}}, Reason.INVALID_REQUEST, "tokens.ids"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_precisely_before_any_engine_work(stack: RunningStack, name: str) -> None:
    changes, reason, field = BAD[name]
    fields = {"model": MODEL, **({} if {"tokens", "conversation"} & set(changes) else {"prompt": "x"}), **changes}
    before = engine_stats(stack, MODEL)
    with pytest.raises(grpc.RpcError) as caught:
        await read(stack, **fields)
    failure = status.from_rpc_error(caught.value)
    assert failure is not None
    assert failure.reason is reason
    assert failure.field.startswith(field)
    after = engine_stats(stack, MODEL)
    assert {k: after[k] for k in ("steps", "prompt_tokens")} == {k: before[k] for k in ("steps", "prompt_tokens")}


async def test_invalid_utf8_names_its_field(stack: RunningStack) -> None:
    good = pb.GenerateRequest(model=MODEL, prompt="ab").SerializeToString()
    assert (await refused(stack, good.replace(b"ab", b"\xff\xfe"))).field == "prompt"


async def test_bytes_that_are_no_request_are_refused(stack: RunningStack) -> None:
    assert (await refused(stack, b"\xff\xff\xff")).reason is Reason.INVALID_REQUEST


async def test_a_deadline_that_has_passed_is_refused(stack: RunningStack) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await read(stack, timeout_s=1e-6, **greedy("x"))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_deadline_in_the_middle_ends_with_a_terminal_event_and_its_usage(stack: RunningStack) -> None:
    events: Events = []
    with pytest.raises(grpc.RpcError) as caught:
        await read(stack, timeout_s=1.0, events=events, **greedy("x", SYNTHETIC, 3000))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    terminal = check_story(events)
    assert terminal.finish_reason == pb.FINISH_REASON_DEADLINE_EXCEEDED
    assert terminal.usage.sent_tokens == len(ids_of(events)) > 10


async def refused(stack: RunningStack, data: bytes) -> Failure:
    async with grpc.aio.insecure_channel(stack.router) as channel:
        call = channel.unary_stream("/headrace.api.inference.v1.InferenceService/Generate")(data, timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    failure = status.from_rpc_error(caught.value)
    assert failure is not None
    return failure
