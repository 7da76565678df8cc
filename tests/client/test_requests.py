"""The record of a request, asked for or cancelled by its name, over real gRPC."""

import asyncio
import datetime
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.request import build_request
from headrace.control.errors import Failure, Reason
from headrace.rpc.status import to_proto
from support.scripted import Play

NAME = "requests/r1"


async def silent(play: Play) -> None:
    await asyncio.sleep(60)


RECORD = pb.Request(
    name=NAME,
    state=pb.Request.STATE_TERMINAL,
    version=9,
    revision="models/m/revisions/0123456789ab",
    replica="replicas/a",
    attempts=2,
    last_sequence=12,
    attached=True,
    finish_reason=pb.FINISH_REASON_CANCELLED,
    error=to_proto(Failure(Reason.CLIENT_DISCONNECTED, "Nobody read it.")),
    usage=pb.Usage(prompt_tokens=3, generated_tokens=9, sent_tokens=8, acknowledged_tokens=7, proposed_tokens=11),
    timing=pb.Timing(cancel_to_stopped=Duration(nanos=5_000_000), cancel_to_freed=Duration(seconds=1)),
    receive_time=Timestamp(seconds=1_700_000_000),
)


@pytest.mark.parametrize("method", ["get_request", "cancel_request"])
async def test_the_record_of_a_request(serve: Any, ask: Any, method: str) -> None:
    service = await serve(silent)
    service.records[NAME] = RECORD
    async with ask.client(service.target) as client:
        info = await ask.wait(getattr(client, method), NAME)
    failure = info.failure
    assert (failure.reason, failure.message) == (Reason.CLIENT_DISCONNECTED, "Nobody read it.")
    assert info == sdk.RequestInfo(
        name=NAME,
        state=sdk.RequestState.TERMINAL,
        version=9,
        revision="models/m/revisions/0123456789ab",
        replica="replicas/a",
        attempts=2,
        last_sequence=12,
        attached=True,
        finish_reason=sdk.FinishReason.CANCELLED,
        failure=failure,
        usage=sdk.Usage(3, 0, 11, 9, 8, 7, 0),
        timing=sdk.Timing(cancel_to_stopped_s=0.005, cancel_to_freed_s=1.0),
        receive_time=datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC),
    )
    assert (service.asked or service.cancelled) == [NAME]


async def test_what_a_record_leaves_out(serve: Any, ask: Any) -> None:
    service = await serve(silent)
    service.records[NAME] = pb.Request(name=NAME, state=99)  # type: ignore[arg-type]
    async with ask.client(service.target) as client:
        info = await ask.wait(client.get_request, NAME)
    assert (info.state, info.finish_reason, info.failure, info.receive_time) == (
        sdk.RequestState.UNKNOWN,
        None,
        None,
        None,
    )
    assert info.timing == sdk.Timing()


async def test_all_routers_are_asked_for_a_request(serve: Any, ask: Any) -> None:
    services = [await serve(silent) for _ in range(3)]
    services[1].records[NAME] = RECORD
    async with ask.client([service.target for service in services]) as client:
        for _ in range(3):
            assert (await ask.wait(client.get_request, NAME)).name == NAME
        with pytest.raises(sdk.NotFound) as caught:
            await ask.wait(client.cancel_request, "requests/none")
    assert caught.value.reason is Reason.NOT_FOUND
    assert all(service.cancelled == ["requests/none"] for service in services)


async def test_a_request_that_a_dead_router_may_have_is_not_called_unknown(serve: Any, ask: Any) -> None:
    services = [await serve(silent), await serve(silent)]
    await services[0].server.stop(0)
    async with ask.client([service.target for service in services]) as client:
        for _ in range(2):
            with pytest.raises(sdk.Unavailable):
                await ask.wait(client.get_request, NAME)
        with pytest.raises(sdk.InvalidRequest):
            await ask.wait(client.get_request, 5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"priority": "batch"}, {"priority": pb.PRIORITY_BATCH}),
        ({"priority": sdk.Priority.CRITICAL}, {"priority": pb.PRIORITY_CRITICAL}),
        ({"recovery": "continue"}, {"recovery": pb.RECOVERY_CONTINUE}),
        ({"recovery": "interrupt"}, {"recovery": pb.RECOVERY_INTERRUPT}),
        ({"idempotency_key": "k-1", "affinity_key": "s"}, {"idempotency_key": "k-1", "affinity_key": "s"}),
        ({"priority": None, "recovery": None, "idempotency_key": None, "affinity_key": None}, {}),
    ],
)
def test_options_of_a_request_under_load(options: Any, expected: dict[str, Any]) -> None:
    assert build_request("chat", "hi", options) == pb.GenerateRequest(model="chat", prompt="hi", **expected)


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"priority": "urgent"}, "priority", "must be sheddable, batch, standard or critical"),
        ({"priority": 2}, "priority", "must be sheddable, batch, standard or critical"),
        ({"recovery": "retry"}, "recovery", "must be interrupt or continue"),
        ({"on_disconnect": "resume"}, "on_disconnect", "must be cancel or continue"),
        ({"idempotency_key": 7}, "idempotency_key", "has the wrong type"),
        ({"affinity_key": 7}, "affinity_key", "has the wrong type"),
    ],
)
def test_options_that_cannot_be_sent(options: Any, field: str, text: str) -> None:
    with pytest.raises(sdk.InvalidRequest) as caught:
        build_request("chat", "hi", options)
    assert [(v.field, v.description) for v in caught.value.violations] == [(field, text)]


async def test_what_events_tell_of_priorities_attempts_and_continuations(serve: Any, ask: Any) -> None:
    async def continued(play: Play) -> None:
        await play.accept(effective_priority=pb.PRIORITY_BATCH)
        await play.delta("a", 1)
        notice = pb.Notice(kind=pb.Notice.KIND_CONTINUED, message="Another.", attempt=2)
        notice.exactness = pb.Notice.EXACTNESS_APPROXIMATE
        await play.send(notice=notice)
        first = pb.AttemptRecord(
            attempt=1, replica="replicas/a", cause=pb.AttemptRecord.CAUSE_FIRST,
            finish_reason=pb.FINISH_REASON_INTERRUPTED, usage=pb.Usage(generated_tokens=1), delivered=True,
        )  # fmt: skip
        await play.finish(attempt_records=[first, pb.AttemptRecord(attempt=2, cause=99)])

    heard = await ask((await serve(continued)).target, recovery="continue")
    assert heard.error is None
    accepted, _, notice, terminal = heard.events
    assert accepted.effective_priority is sdk.Priority.BATCH
    assert (notice.kind, notice.exactness, notice.attempt) == (
        sdk.NoticeKind.CONTINUED,
        sdk.Exactness.APPROXIMATE,
        2,
    )
    assert terminal.attempt_records == (
        sdk.AttemptRecord(
            1, "replicas/a", sdk.AttemptCause.FIRST, sdk.FinishReason.INTERRUPTED, sdk.Usage(generated_tokens=1), True
        ),
        sdk.AttemptRecord(2, "", sdk.AttemptCause.UNKNOWN, None, sdk.Usage(), False),
    )
