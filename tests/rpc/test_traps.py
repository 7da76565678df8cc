"""The traps of grpc.aio, each on the wire: as it is in plain grpc.aio, so that a new grpcio that changes it is
noticed, and then what our servers and clients make of it.
"""

import asyncio
import gc
import itertools
from typing import Any

import grpc
import pytest
from rpc.harness import BIG, EVENT, Ends, Plain, Running, Serving, Writing, alarms, in_write, soon

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client import AsyncClient
from headrace.control.errors import Failure, Reason
from headrace.rpc.calls import is_call_over
from support.scripted import until

PROMPT = "the prompt"


async def in_sleep(context: Any) -> None:
    await asyncio.Event().wait()


async def in_first_write(context: Any) -> None:
    await context.write(BIG)


async def in_later_write(context: Any) -> None:
    await context.write(EVENT)
    await context.write(BIG)


# A client that leaves: CancelledError, or ExecuteBatchError inside a write


async def test_plain_a_blocked_write_raises_another_error_and_then_the_cancel_hits_the_cleanup() -> None:
    ends = Ends()

    async def handler(frames: Any, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        ends.entered.set()
        try:
            await in_write(context)
        except BaseException as error:
            ends.errors.append(error)
            ends.cancelling = task.cancelling() + context.cancelled() + context.done()
            try:
                await asyncio.sleep(60)
            except BaseException as second:
                ends.errors.append(second)
        ends.cleaned.set()

    async with Plain(handler) as plain:
        call = plain.call()
        await soon(ends.entered.wait())
        call.cancel()
        await soon(ends.cleaned.wait())
    first, second = ends.errors
    assert type(first).__name__ == "ExecuteBatchError"
    assert is_call_over(first)
    assert ends.cancelling == 0, "nothing on the task or the context told that the call is over"
    assert isinstance(second, asyncio.CancelledError), "an await of the cleanup was cut"


@pytest.mark.parametrize("how", ["cancel", "deadline", "stop"])
@pytest.mark.parametrize("where", [in_sleep, in_first_write, in_later_write])
async def test_a_call_that_ends_from_outside_has_one_outcome_wherever_its_handler_was(
    where: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Ends()

    async def body(request: Any, context: Any) -> None:
        ends.entered.set()
        try:
            await where(context)
        finally:
            ends.cleaned.set()

    async with Running(Writing(body)) as running:
        call = running.call(timeout_s=0.5 if how == "deadline" else 30)
        await soon(ends.entered.wait())
        if how == "cancel":
            call.cancel()
        elif how == "stop":
            await soon(running.server.stop(0.01))
        await soon(ends.cleaned.wait())
        await until(lambda: bool(running.outcomes), "observed")
        outcome = {"cancel": "CLIENT_CANCELLED", "deadline": "DEADLINE_EXCEEDED", "stop": "DRAINING"}[how]
        assert running.outcomes == [("Generate", outcome)]
        call.cancel()
    assert not alarms(caplog)


@pytest.mark.parametrize("timeout_s", [1.2345, 1.001])
async def test_a_deadline_that_grpc_rounds_up_on_its_way_is_still_a_deadline(timeout_s: float) -> None:
    async def body(request: Any, context: Any) -> None:
        await in_sleep(context)

    async with Running(Writing(body)) as running:
        code, _, _ = await running.failure(timeout_s=timeout_s)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: bool(running.outcomes), "observed")
        assert running.outcomes == [("Generate", "DEADLINE_EXCEEDED")]


# A call that is dropped


async def test_plain_a_dropped_call_goes_on_at_its_server() -> None:
    ended = asyncio.Event()

    async def handler(frames: Any, context: Any) -> None:
        try:
            await context.write(b"one")
            await in_sleep(context)
        finally:
            ended.set()

    async with Plain(handler) as plain:

        async def leave() -> None:
            async for _ in plain.call():
                break

        await leave()
        gc.collect()
        with pytest.raises(TimeoutError):
            await soon(ended.wait(), 0.5)


@pytest.mark.parametrize("interactive", [True, False])
async def test_leaving_an_iteration_of_the_client_ends_the_call(interactive: bool) -> None:
    class Endless(Serving):
        async def GenerateInteractive(self, request: Any, context: Any) -> None:
            await self.Generate(await context.read(), context)

        async def Generate(self, request: Any, context: Any) -> None:
            await context.write(pb.GenerateEvent(sequence=1, accepted=pb.Accepted(revision="models/m/revisions/1")))
            for sequence in itertools.count(2):
                await context.write(pb.GenerateEvent(sequence=sequence, delta=pb.Delta(text="a", token_ids=[1])))
                await asyncio.sleep(0)

    async with Running(Endless()) as running, AsyncClient(running.server.endpoint) as client:
        options: Any = {} if interactive else {"interactive": False}
        async for _ in client.generate("x", model="m", **options):
            break
        gc.collect()
        await until(lambda: bool(running.outcomes), "the call ends")
        name = "GenerateInteractive" if interactive else "Generate"
        assert running.outcomes == [(name, "CLIENT_CANCELLED")]


# An internal CancelledError, and texts that leak


async def test_plain_an_internal_cancelled_error_leaves_the_client_without_a_status() -> None:
    ended = asyncio.Event()

    async def handler(frames: Any, context: Any) -> None:
        ended.set()
        raise asyncio.CancelledError

    async with Plain(handler) as plain:
        call = plain.call(timeout_s=1)
        await soon(ended.wait())
        assert await soon(call.code()) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_plain_the_text_of_an_exception_reaches_the_client() -> None:
    async def handler(frames: Any, context: Any) -> None:
        raise RuntimeError(PROMPT)

    async with Plain(handler) as plain:
        assert PROMPT in await soon(plain.call().details())


async def cancelled_inside() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(inner.cancel)
    await inner


async def raises_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fails(RuntimeError(PROMPT)))
        group.create_task(asyncio.sleep(60))


async def fails(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("bug", [cancelled_inside, raises_in_a_group, lambda: fails(ValueError(PROMPT))])
async def test_a_bug_is_internal_with_an_error_id_and_no_text(bug: Any) -> None:
    async def body(request: Any, context: Any) -> None:
        await context.write(EVENT)
        await bug()

    async with Running(Writing(body)) as running:
        code, failure, error = await running.failure()
        assert code is grpc.StatusCode.INTERNAL
        assert failure is not None
        assert failure.metadata["errorId"] in failure.message
        assert PROMPT not in repr(error)
        assert running.outcomes == [("Generate", "INTERNAL")]


async def test_a_failure_out_of_a_task_group_is_that_failure() -> None:
    async def body(request: Any, context: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails(Failure(Reason.OVERLOADED, "Full.")))
            group.create_task(asyncio.sleep(60))

    async with Running(Writing(body)) as running:
        code, failure, _ = await running.failure()
        assert (code, failure and failure.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Full.")
        assert running.outcomes == [("Generate", "OVERLOADED")]


async def test_a_bug_in_the_cleanup_of_a_cancelled_call_is_a_bug() -> None:
    entered = asyncio.Event()

    async def body(request: Any, context: Any) -> None:
        entered.set()
        try:
            await in_sleep(context)
        finally:
            raise RuntimeError(PROMPT)

    async with Running(Writing(body)) as running:
        call = running.call()
        await soon(entered.wait())
        call.cancel()
        await until(lambda: bool(running.outcomes), "observed")
        assert running.outcomes == [("Generate", "INTERNAL")]


# CANCELLED at the client, completed at the server


async def test_a_call_can_be_ok_at_its_server_and_cancelled_at_its_client() -> None:
    async def body(request: Any, context: Any) -> None:
        await context.write(EVENT)

    async with Running(Writing(body)) as running:
        call = running.call()
        await until(lambda: bool(running.outcomes), "completed")
        call.cancel()
        assert await soon(call.code()) is grpc.StatusCode.CANCELLED
        assert running.outcomes == [("Generate", "OK")]


async def test_outcomes_at_the_server_add_up_to_the_calls_whatever_their_clients_saw() -> None:
    started: list[str] = []
    seen: dict[str, grpc.StatusCode] = {}

    async def body(request: Any, context: Any) -> None:
        started.append(request.model)
        for _ in range(5):
            await context.write(EVENT)

    async def trial(running: Running, number: int) -> None:
        call = running.call(pb.GenerateRequest(model=str(number)).SerializeToString(), timeout_s=60)
        for _ in range(number % 30):
            await asyncio.sleep(0)
        if number % 3:
            await call.read()
        call.cancel()
        seen[str(number)] = await call.code()

    async with Running(Writing(body)) as running:
        for first in range(0, 300, 10):
            await asyncio.gather(*(trial(running, first + offset) for offset in range(10)))
        await until(lambda: len(running.outcomes) >= len(started), "all observed")
        await running.server.stop(10)
        assert len(running.outcomes) == len(started) == len(set(started))
        counted = {outcome for _, outcome in running.outcomes}
        assert counted <= {"OK", "CLIENT_CANCELLED"}
        ok_seen = sum(code is grpc.StatusCode.OK for code in seen.values())
        assert sum(outcome == "OK" for _, outcome in running.outcomes) >= ok_seen
