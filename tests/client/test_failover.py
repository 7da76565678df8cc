"""Several Routers: a lost one is failed over once, under one key, before the first output; over real gRPC."""

import asyncio
import uuid
from typing import Any

import grpc
import pytest

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from support.scripted import KEPT, Play, Script, good, raising


async def cut_off(play: Play) -> None:
    """What a client sees when its Router dies."""
    await play.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def accepted_then_cut(play: Play) -> None:
    await play.accept()
    await cut_off(play)


async def kept_then_cut(play: Play) -> None:
    if not play.after:
        await play.accept(retention=KEPT)
    await cut_off(play)


async def kept_then_resumed(play: Play) -> None:
    if not play.after:
        await play.accept(retention=KEPT)
        await cut_off(play)
    await play.delta("Hello", 1)
    await play.finish()


async def output_then_cut(play: Play) -> None:
    await play.accept()
    await play.delta("a", 1)
    await cut_off(play)


async def endless(play: Play) -> None:
    await play.accept()
    await play.delta("a", 1)
    await asyncio.sleep(60)


async def pair(serve: Any, first: Script, then: Script = good) -> tuple[Any, Any, list[str]]:
    """Two Routers that play `first` for the first call that reaches either of them, and `then` for all further ones."""
    calls = 0

    async def script(play: Play) -> None:
        nonlocal calls
        calls += 1
        await (first if calls == 1 else then)(play)

    one, other = await serve(script), await serve(script)
    return one, other, [one.target, other.target]


@pytest.mark.parametrize("first", [cut_off, accepted_then_cut])
async def test_a_lost_router_is_failed_over_under_one_key(serve: Any, ask: Any, first: Script) -> None:
    one, other, targets = await pair(serve, first)
    heard = await ask(targets)
    assert heard.error is None
    assert heard.answer.text == "Hello"
    assert (one.calls, other.calls) == (1, 1), "another one"
    (key,), (again,) = ([request.idempotency_key for request in service.requests] for service in (one, other))
    assert key == again
    assert uuid.UUID(key).version == 4


async def test_addresses_may_have_commas_between_them(serve: Any, ask: Any) -> None:
    one, other, targets = await pair(serve, cut_off)
    assert (await ask(", ".join(targets))).error is None
    assert (one.calls, other.calls) == (1, 1)


async def test_it_is_failed_over_once(serve: Any, ask: Any) -> None:
    one, other, targets = await pair(serve, accepted_then_cut, accepted_then_cut)
    error = (await ask(targets)).error
    assert type(error) is sdk.Unavailable
    assert (one.calls, other.calls, error.calls) == (1, 1, 2)


async def test_after_output_nothing_is_run_again(serve: Any, ask: Any) -> None:
    one, other, targets = await pair(serve, output_then_cut)
    error = (await ask(targets)).error
    assert type(error) is sdk.Interrupted
    assert error.answer.text == "a"
    assert one.calls + other.calls == 1


origin_lost = raising(Failure(Reason.IDEMPOTENCY_ORIGIN_LOST, "It ran in a Router that is gone."))


async def test_the_answer_about_a_callers_key_stands(serve: Any, ask: Any) -> None:
    one, other, targets = await pair(serve, accepted_then_cut, origin_lost)
    error = (await ask(targets, idempotency_key="mine")).error
    assert type(error) is sdk.OriginLost
    assert one.calls + other.calls == 2


@pytest.mark.parametrize("is_lost_again", [False, True])
async def test_under_its_own_key_it_runs_once_more_where_the_router_that_ran_it_is_gone(
    serve: Any, ask: Any, is_lost_again: bool
) -> None:
    keys: list[str] = []

    async def script(play: Play) -> None:
        keys.append(play.request.idempotency_key)
        if len(keys) == 1:
            await accepted_then_cut(play)
        await (origin_lost if len(keys) == 2 or is_lost_again else good)(play)

    heard = await ask([(await serve(script)).target, (await serve(script)).target])
    if is_lost_again:
        assert type(heard.error) is sdk.OriginLost
    else:
        assert (heard.error, heard.answer.text) == (None, "Hello")
    assert (len(keys), len(set(keys)), keys[0]) == (3, 2, keys[1])


async def test_what_can_be_resumed_is_resumed_where_it_was(serve: Any, ask: Any) -> None:
    one, other, targets = await pair(serve, kept_then_resumed, kept_then_resumed)
    heard = await ask(targets, on_disconnect="continue")
    assert heard.error is None
    assert sorted([one.calls, other.calls]) == [0, 2]


async def test_and_elsewhere_if_that_router_does_not_come_back(serve: Any, ask: Any) -> None:
    gone, there = await serve(kept_then_cut), await serve(good)
    async with ask.client([gone.target, there.target]) as client:
        for _ in range(2):  # one of them starts at the Router that is lost
            heard = await ask.reading(client.generate("hi", model="chat", on_disconnect="continue")).rest()
            assert heard.error is None
    assert (gone.calls, there.calls) == (2, 2), "asked for the rest once"
    assert len({request.idempotency_key for request in there.requests}) == 2


@pytest.mark.parametrize(
    ("several", "given", "retried"),
    [(False, None, True), (False, "mine", True), (True, "mine", True), (True, None, False)],
)
async def test_a_key_is_made_where_it_is_of_use(
    serve: Any, ask: Any, several: bool, given: str | None, retried: bool
) -> None:
    service = await serve(good)
    target = [service.target, service.target] if several else service.target
    options = {} if retried else {"retry": None}
    heard = await ask(target, idempotency_key=given, **options)
    assert heard.error is None
    assert service.requests[0].idempotency_key == (given or "")


async def test_without_the_store_of_keys_it_goes_on_as_if_there_were_none(serve: Any, ask: Any) -> None:
    async def storeless(play: Play) -> None:
        if play.request.idempotency_key:
            raise Failure(Reason.STORE_UNAVAILABLE, "Not started, for it could run twice.", retry_after_s=0.01)
        await good(play)

    service = await serve(storeless)
    async with ask.client([service.target, service.target]) as client:
        heard = [await ask.reading(client.generate("hi", model="chat")).rest() for _ in range(5)]
        assert [one.error for one in heard] == [None] * 5
        assert service.calls == 1 + 5, "and makes no more keys for a while"
        heard = [await ask.reading(client.generate("hi", model="chat", idempotency_key="mine")).rest()]
    assert type(heard[0].error) is sdk.Unavailable, "a key that the caller gave is never dropped"
    assert [bool(request.idempotency_key) for request in service.requests[6:]] == [True] * 3


@pytest.mark.parametrize("key", [None, "mine"])
async def test_failing_over_can_be_switched_off(serve: Any, ask: Any, key: str | None) -> None:
    one, other, targets = await pair(serve, accepted_then_cut)
    error = (await ask(targets, retry=sdk.RetryPolicy(fails_over=False), idempotency_key=key)).error
    assert type(error) is sdk.Unavailable
    assert one.calls + other.calls == 1
    assert (one.requests + other.requests)[0].idempotency_key == (key or "")


async def test_a_request_with_a_key_outlives_its_call_so_leaving_it_ends_it(serve: Any, ask: Any) -> None:
    service = await serve(endless)
    service.records["requests/r1"] = pb.Request(name="requests/r1")
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", idempotency_key="k"))
        await reading.through(2)
        await reading.leave()
    assert service.cancelled == ["requests/r1"] or service.plays[0].cancels == 1


async def test_leaving_what_failed_over_ends_it_wherever_it_is(serve: Any, ask: Any) -> None:
    one, other, targets = await pair(serve, accepted_then_cut, endless)
    one.records["requests/r1"] = other.records["requests/r1"] = pb.Request(name="requests/r1")
    async with ask.client(targets) as client:
        reading = ask.reading(client.generate("hi", model="chat"))
        while not isinstance(await reading.next(), sdk.Delta):
            pass
        await reading.leave()
    if not ask.interactive:  # a frame reaches it through the other Router
        assert (one.cancelled, other.cancelled) == (["requests/r1"], ["requests/r1"])
    assert one.active + other.active == 0


@pytest.mark.parametrize("first", [cut_off, raising(Failure(Reason.DRAINING, "Draining."))])
async def test_a_router_that_is_there_is_preferred(serve: Any, ask: Any, first: Script) -> None:
    gone, there = await serve(first), await serve(good)
    async with ask.client([gone.target, there.target]) as client:
        heard = [await ask.reading(client.generate("hi", model="chat")).rest() for _ in range(8)]
    assert [one.error for one in heard] == [None] * 8
    assert (gone.calls, there.calls) == (1, 8), "the others do not ask there again"
