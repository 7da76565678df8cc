"""When the clients call again and when they do not, and how they share several Routers; over real gRPC."""

import asyncio
import socket
from typing import Any

import grpc
import pytest

from headrace import client as sdk
from headrace.client import RetryPolicy
from headrace.control.errors import Failure, Reason
from support.scripted import Play, Script, good, raising

OVERLOADED = Failure(Reason.OVERLOADED, "Full.", retry_after_s=0.01)
LOST = Failure(Reason.WORKER_LOST_BEFORE_OUTPUT, "The worker was lost.", retry_after_s=0.01)


def plain(code: grpc.StatusCode, *trailers: tuple[str, str], first: Script | None = None) -> Script:
    async def script(play: Play) -> None:
        if first is not None:
            await first(play)
        await play.context.abort(code, "plain", trailers)

    return script


async def accepted(play: Play) -> None:
    await play.accept()


async def accepted_and_noticed(play: Play) -> None:
    await play.accept()
    await play.send(notice={"kind": 2, "message": "waiting"})


async def some_output(play: Play) -> None:
    await play.accept()
    await play.delta("ab", 1)


def lost_after(first: Script) -> Script:
    async def script(play: Play) -> None:
        await first(play)
        await play.finish("FAILED", failure=LOST)
        raise LOST

    return script


UNAVAILABLE = plain(grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(
    ("first", "calls"),
    [
        pytest.param(raising(OVERLOADED), 2, id="overloaded"),
        pytest.param(raising(Failure(Reason.DRAINING, "Draining.")), 2, id="draining"),
        pytest.param(raising(LOST), 1, id="a worker lost before output: the Router has tried others"),
        pytest.param(UNAVAILABLE, 2, id="a plain UNAVAILABLE"),
        pytest.param(lost_after(accepted), 1, id="the same after accepted, as a terminal event"),
        pytest.param(lost_after(accepted_and_noticed), 1, id="and after a notice"),
        pytest.param(raising(Failure(Reason.QUOTA_EXCEEDED, "Used up.", retry_after_s=0.01)), 2, id="a quota"),
        pytest.param(raising(Failure(Reason.IDEMPOTENCY_KEY_REUSED, "Reused.")), 1, id="a key reused"),
        pytest.param(raising(Failure(Reason.IDEMPOTENCY_ORIGIN_LOST, "Lost.")), 1, id="an origin lost"),
        pytest.param(raising(Failure(Reason.OVERLOADED, "All.", retry_after_s=-1.0)), 1, id="told not to"),
        pytest.param(lost_after(some_output), 1, id="lost after output"),
        pytest.param(plain(grpc.StatusCode.UNAVAILABLE, first=accepted), 1, id="a plain UNAVAILABLE after accepted"),
        pytest.param(plain(grpc.StatusCode.UNAVAILABLE, first=some_output), 1, id="or after output"),
        pytest.param(plain(grpc.StatusCode.RESOURCE_EXHAUSTED), 1, id="a plain RESOURCE_EXHAUSTED"),
        pytest.param(plain(grpc.StatusCode.ABORTED), 1, id="a plain ABORTED"),
        pytest.param(raising(Failure(Reason.MODEL_NOT_FOUND, "None.")), 1, id="no such model"),
        pytest.param(raising(Failure(Reason.DEADLINE_EXCEEDED, "Late.")), 1, id="a deadline"),
        pytest.param(raising(Failure(Reason.ENGINE_FAILED, "Broken.")), 1, id="a broken engine"),
    ],
)
async def test_what_is_tried_again(serve: Any, ask: Any, first: Script, calls: int) -> None:
    service = await serve(first, good)
    heard = await ask(service.target)
    assert service.calls == calls
    if calls == 2:
        assert heard.error is None
        assert heard.answer.text == "Hello", "nothing of the first call is left"
        assert heard.kinds[-5:] == ["Accepted", "Delta", "Notice", "Delta", "Terminal"]
    else:
        assert heard.error.calls == 1


async def test_three_calls_are_all(serve: Any, ask: Any) -> None:
    service = await serve(raising(OVERLOADED))
    error = (await ask(service.target)).error
    assert isinstance(error, sdk.Overloaded)
    assert (service.calls, error.calls, error.retry_after_s) == (3, 3, 0.01)


async def test_without_a_policy_there_is_one_call(serve: Any, ask: Any) -> None:
    service = await serve(UNAVAILABLE)
    error = (await ask(service.target, retry=None)).error
    assert isinstance(error, sdk.Unavailable)
    assert service.calls == 1


@pytest.mark.parametrize(
    ("trailer", "calls", "wait_s"), [("200", 2, 0.2), ("0", 2, 0.0), ("-1", 1, 0.0), ("later", 1, 0.0)]
)
async def test_pushback_is_kept(serve: Any, ask: Any, trailer: str, calls: int, wait_s: float) -> None:
    service = await serve(plain(grpc.StatusCode.UNAVAILABLE, ("grpc-retry-pushback-ms", trailer)), good)
    await ask(service.target)
    assert service.calls == calls
    assert service.at[-1] - service.at[0] >= wait_s * 0.99


async def test_the_delay_of_a_failure_is_kept(serve: Any, ask: Any) -> None:
    service = await serve(raising(Failure(Reason.OVERLOADED, "Full.", retry_after_s=0.25)), good)
    await ask(service.target)
    assert service.at[1] - service.at[0] >= 0.24


async def test_no_wait_is_begun_that_reaches_the_deadline(serve: Any, ask: Any) -> None:
    service = await serve(raising(Failure(Reason.OVERLOADED, "Full.", retry_after_s=30)), good)
    started = asyncio.get_running_loop().time()
    error = (await ask(service.target, timeout_s=5)).error
    assert isinstance(error, sdk.Overloaded), "the real failure, not the deadline"
    assert asyncio.get_running_loop().time() - started < 3
    assert service.calls == 1


async def test_later_calls_have_only_the_time_that_is_left(serve: Any, ask: Any) -> None:
    left: list[float] = []

    async def full(play: Play) -> None:
        left.append(play.context.time_remaining())
        raise Failure(Reason.OVERLOADED, "Full.", retry_after_s=0.2)

    # gRPC sends a deadline again that is up to 3 % longer, if its header table has one: so the steps are larger here.
    await ask((await serve(full)).target, timeout_s=2)
    assert 1.5 < left[0] < 2.1
    assert left[0] - left[1] >= 0.15
    assert left[1] - left[2] >= 0.15


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_no_service_is_unavailable_after_three_calls(ask: Any) -> None:
    error = (await ask(closed_port(), retry=RetryPolicy(backoff_first_s=0.001))).error
    assert isinstance(error, sdk.Unavailable)
    assert (error.code, error.reason, error.calls) == ("UNAVAILABLE", None, 3)


async def test_a_retry_goes_to_the_next_router(serve: Any, ask: Any) -> None:
    service = await serve(good)
    for _ in range(3):  # wherever chance lets it start
        heard = await ask([closed_port(), service.target])
        assert heard.error is None
    assert service.calls == 3


async def test_requests_take_turns_among_routers(serve: Any) -> None:
    services = [await serve(good), await serve(good)]
    async with sdk.AsyncClient([service.target for service in services]) as client:
        for _ in range(6):
            await client.generate("hi", model="chat").read()
    assert [service.calls for service in services] == [3, 3]
