"""What a client makes of refusals beyond trying again: it holds back, names limits, and tells a replay; real gRPC."""

import time
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyProto
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from headrace import client as sdk
from headrace.control.errors import RULES, Failure, Reason
from headrace.rpc import status
from support.scripted import Play, good, raising

FULL = raising(Failure(Reason.OVERLOADED, "Full.", retry_after_s=0.0))


async def ask_often(ask: Any, target: str, times: int, **options: Any) -> list[Any]:
    async with ask.client(target, **options) as client:
        heard = [await ask.reading(client.generate("hi", model="chat")).rest() for _ in range(times)]
    return [one.error for one in heard]


async def test_a_client_that_is_refused_holds_back(serve: Any, ask: Any) -> None:
    service = await serve(FULL)
    eager = sdk.ThrottlePolicy(refusals_min=5)
    errors = await ask_often(ask, service.target, 60, retry=None, throttle=eager)
    held = [error for error in errors if type(error) is sdk.Throttled]
    assert all(type(error) in (sdk.Throttled, sdk.Overloaded) for error in errors)
    assert service.calls == 60 - len(held)
    assert len(held) >= 20
    assert all(error.calls == 0 and error.reason is None for error in held)
    assert all(type(error) is sdk.Overloaded for error in errors[:5])


async def test_it_can_be_switched_off_and_small_clients_never_notice(serve: Any, ask: Any) -> None:
    service = await serve(FULL)
    for options in ({"throttle": None}, {}):
        await ask_often(ask, service.target, 60, retry=None, **options)
    assert service.calls == 120


async def test_retries_have_a_budget(serve: Any, ask: Any) -> None:
    service = await serve(FULL)
    budget = sdk.ThrottlePolicy(retries_min=4, retry_share=0.0)
    errors = await ask_often(ask, service.target, 10, throttle=budget)
    assert all(type(error) is sdk.Overloaded for error in errors)
    assert service.calls == 10 + 4
    assert [error.calls for error in errors] == [3, 3, 1, 1, 1, 1, 1, 1, 1, 1]


async def test_a_quota_that_is_used_up_names_its_limit_and_is_tried_once_more(serve: Any, ask: Any) -> None:
    async def used_up(play: Play) -> None:
        failure = Failure(Reason.QUOTA_EXCEEDED, "Used up.", retry_after_s=0.05)
        ending = status.to_status(failure)
        quota, packed = error_details_pb2.QuotaFailure(), AnyProto()
        quota.violations.add(subject="tenants/acme", description="60 requests a minute", quota_metric="requests")
        quota.violations[0].quota_value = 60
        packed.Pack(quota)
        for index, detail in reversed(list(enumerate(ending.details))):
            if detail.Is(quota.DESCRIPTOR):
                del ending.details[index]
        ending.details.append(packed)
        wire = rpc_status.to_status(ending)
        await play.context.abort(wire.code, wire.details, wire.trailing_metadata)

    service = await serve(used_up)
    error = (await ask(service.target)).error
    assert type(error) is sdk.QuotaExceeded
    assert error.quota == (sdk.QuotaViolation("tenants/acme", "60 requests a minute", "requests", 60),)
    assert error.retry_after_s == 0.05
    assert service.calls == 2, "after the delay, and never again"
    assert service.at[1] - service.at[0] >= 0.045


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason_has_a_class(serve: Any, reason: Reason) -> None:
    async with sdk.AsyncClient((await serve(raising(Failure(reason, "x")))).target, retry=None) as client:
        with pytest.raises(sdk.HeadraceError) as caught:
            await client.generate("hi", model="chat").read()
    assert (caught.value.reason, caught.value.code) == (reason, RULES[reason].code)
    assert caught.value.quota == ()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.UNAUTHENTICATED, sdk.NotAllowed),
        (Reason.PERMISSION_DENIED, sdk.NotAllowed),
        (Reason.IDEMPOTENCY_KEY_REUSED, sdk.KeyReused),
        (Reason.IDEMPOTENCY_ORIGIN_LOST, sdk.OriginLost),
        (Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE, sdk.Unavailable),
        (Reason.DEADLINE_UNMEETABLE, sdk.Overloaded),
        (Reason.QUOTA_EXCEEDED, sdk.QuotaExceeded),
    ],
)
async def test_what_the_new_reasons_are(serve: Any, ask: Any, reason: Reason, kind: type[Exception]) -> None:
    service = await serve(raising(Failure(reason, "x", retry_after_s=0.0)))
    assert type((await ask(service.target, retry=None)).error) is kind


@pytest.mark.parametrize("sent", [None, "true", "false"])
async def test_a_replay_says_so(serve: Any, ask: Any, sent: str | None) -> None:
    async def replayed(play: Play) -> None:
        if sent is not None:
            await play.context.send_initial_metadata([("headrace-idempotent-replay", sent)])
        await good(play)

    service = await serve(replayed)
    async with ask.client(service.target) as client:
        reading = ask.reading(client.generate("hi", model="chat", idempotency_key="k"))
        assert not reading.stream.is_replay
        await reading.through(1)
        assert reading.stream.is_replay == (sent == "true")
        assert (await reading.rest()).error is None


async def test_a_refusal_is_told_at_once(serve: Any, ask: Any) -> None:
    service = await serve(raising(Failure(Reason.OVERLOADED, "Full.", retry_after_s=-1.0)))
    started = time.monotonic()
    error = (await ask(service.target)).error
    assert type(error) is sdk.Overloaded
    assert error.retry_after_s is None
    assert service.calls == 1
    assert time.monotonic() - started < 5
