"""A worker is killed in the middle of an answer, and another one goes on: two Schedulers, real Tritons, one Router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.registry.v1 import registry_service_pb2 as registry_pb2
from headrace.api.registry.v1 import resources_pb2
from headrace.api.registry.v1.registry_service_pb2_grpc import RegistryServiceStub
from headrace.api.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from headrace.api.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from headrace.control.errors import Reason
from headrace.rpc import status
from stack.test_path import DECISIVE, Events, check_story, greedy, ids_of, read
from stack.waiting import until
from support.etcd import free_port
from support.stack import COMMAND, MODEL, SYNTHETIC, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

TOKENS = 150
KILL_AT = 40


@contextlib.asynccontextmanager
async def second_scheduler(
    stack: RunningStack, directory: Path
) -> AsyncIterator[tuple[list[str], subprocess.Popen[bytes]]]:
    """Another Scheduler with workers for both models; both Schedulers' addresses, and its process."""
    address = f"127.0.0.1:{free_port()}"
    command = [*COMMAND, "scheduler", "--name", "second", "--listen", address, "--etcd", stack.etcd]
    command += ["--state-dir", str(directory), "--engines", "synthetic,llamacpp"]
    with (directory / "second.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield [stack.scheduler, address], process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ready(stack: RunningStack, model: str) -> int:
    """Replicas of a model that serve, as the Router's snapshot has them."""
    with grpc.insecure_channel(stack.registry) as channel:
        answer = RegistryServiceStub(channel).GetSnapshot(registry_pb2.GetSnapshotRequest(), timeout=5)
    return sum(
        replica.revision.split("/")[1] == model and replica.state == resources_pb2.Replica.STATE_READY
        for replica in answer.snapshot.replicas
    )


def pid_of(schedulers: list[str], replica: str) -> int:
    """The Triton behind a replica."""
    for address in schedulers:
        with grpc.insecure_channel(address) as channel:
            state = SchedulerServiceStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=10)
        for worker in state.workers:
            if worker.replica == replica:
                return int(worker.pid)
    raise AssertionError(f"nobody has {replica}")


async def cut_off(stack: RunningStack, schedulers: list[str], at: int, **fields: Any) -> Events:
    """The events of a request whose worker is killed after `at` tokens."""
    events: Events = []
    reading = asyncio.create_task(read(stack, events=events, **fields))

    def is_far() -> bool:
        return reading.done() or len(ids_of(events)) >= at

    while not is_far():
        await asyncio.sleep(0.01)
    assert not reading.done(), "it was over before its worker could be killed"
    os.kill(await asyncio.to_thread(pid_of, schedulers, events[0].accepted.replica), signal.SIGKILL)
    try:
        await reading
    except grpc.RpcError as error:
        failure = status.from_rpc_error(error)
        assert failure is not None
        assert failure.reason is Reason.STREAM_INTERRUPTED, failure
    return events


def text_of(events: Events) -> str:
    return "".join(event.delta.text for event in events)


def check_continued(events: Events, whole: Events) -> None:
    told, expected = check_story(events), check_story(whole)
    (notice,) = [event.notice for event in events if event.HasField("notice")]
    assert (notice.kind, notice.attempt) == (pb.Notice.KIND_CONTINUED, 2)
    assert notice.exactness == pb.Notice.EXACTNESS_EXACT
    assert text_of(events) == text_of(whole)
    assert ids_of(events) == ids_of(whole)
    assert (told.finish_reason, told.stop) == (expected.finish_reason, expected.stop)
    first, second = told.attempt_records
    assert (first.finish_reason, second.cause) == (pb.FINISH_REASON_INTERRUPTED, pb.AttemptRecord.CAUSE_CONTINUATION)
    assert 10 <= first.usage.generated_tokens < expected.usage.generated_tokens
    assert told.usage.prompt_tokens == expected.usage.prompt_tokens, "counted once"
    assert told.usage.sent_tokens == expected.usage.sent_tokens
    assert told.usage.generated_tokens == first.usage.generated_tokens + second.usage.generated_tokens
    assert told.usage.generated_tokens == expected.usage.generated_tokens, "nothing was computed twice"


async def test_a_killed_workers_answer_is_continued_to_the_same_transcript(stack: RunningStack, tmp_path: Path) -> None:
    request = greedy("a long story of rivers", SYNTHETIC, TOKENS)
    goes_on = {**request, "recovery": pb.RECOVERY_CONTINUE}
    async with second_scheduler(stack, tmp_path) as (schedulers, process):
        await until(lambda: ready(stack, SYNTHETIC) == 2 and ready(stack, MODEL) == 2)
        whole = await read(stack, **request)
        assert len(ids_of(whole)) == TOKENS
        check_continued(await cut_off(stack, schedulers, KILL_AT, **goes_on), whole)

        # With a stop string, behind the cut.
        await until(lambda: ready(stack, SYNTHETIC) == 2)
        stop = text_of(whole)[-60:-48]
        stopping = {**request, "stop": {"ignore_eos": True, "strings": [stop]}}
        stopped = await read(stack, **stopping)
        assert check_story(stopped).stop.string == stop
        stopping["recovery"] = pb.RECOVERY_CONTINUE
        check_continued(await cut_off(stack, schedulers, KILL_AT, **stopping), stopped)

        # Without being asked for.
        await until(lambda: ready(stack, SYNTHETIC) == 2)
        events = await cut_off(stack, schedulers, KILL_AT, **request)
        assert check_story(events).finish_reason == pb.FINISH_REASON_INTERRUPTED
        assert text_of(whole).startswith(text_of(events))

        # llama.cpp's own, where rounding cannot decide.
        decisive = {**greedy(DECISIVE[0], MODEL, 60), "recovery": pb.RECOVERY_CONTINUE}
        decided = await read(stack, **decisive)
        check_continued(await cut_off(stack, schedulers, 10, **decisive), decided)
        for model in (SYNTHETIC, MODEL):
            await until(lambda model=model: ready(stack, model) == 2)  # type: ignore[misc]

        # A whole Scheduler is killed, with everything behind it.
        running: list[Events] = [[] for _ in range(3)]
        readings = [asyncio.create_task(read(stack, events=events, **goes_on)) for events in running]
        while not all(len(ids_of(events)) >= KILL_AT for events in running):
            await asyncio.sleep(0.01)
        process.kill()
        await asyncio.gather(*readings)
        hit = [events for events in running if check_story(events).attempts == 2]
        assert hit, "none of three ran on it"
        for events in hit:
            check_continued(events, whole)
        assert all(text_of(events) == text_of(whole) for events in running)
    await until(lambda: ready(stack, SYNTHETIC) == 1 and ready(stack, MODEL) == 1)
