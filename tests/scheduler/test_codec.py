"""What the Scheduler makes of the engine's words, and of the Router's."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempt_book import Attempt, Cause
from headrace.control.deadlines import Budget
from headrace.control.errors import Failure, Reason
from headrace.scheduler import codec
from headrace.scheduler.codec import engine_failure
from headrace.scheduler.queue_codec import with_load


def attempt(**fields: Any) -> Attempt:
    made = Attempt(
        token=1,
        session=1,
        replica="replicas/a",
        incarnation=1,
        record_version=9,
        input_bytes=1,
        budget=Budget(100.0, 200.0),
        max_tokens=5,
        credit_limit=5,
        admitted_at=101.0,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def end(reason: str, *, is_local: bool = True, made: Attempt | None = None, **fields: Any) -> pb.Ended:
    event = {"type": "finished", "seq": 1, "reason": reason, "usage": {"generated": 4, "emitted": 3}, **fields}
    return codec.ended_by_engine(event, made or attempt(), confirmed_at=110.0, is_local=is_local)


@pytest.mark.parametrize(
    ("engine", "public"),
    [
        ("tokens", "tokens.ids"),
        ("stop[2]", "stop.strings[2]"),
        ("messages[1].role", "conversation.messages[1].role"),
        ("stop_token_ids", "stop.token_ids"),
        ("sampling.top_p", "sampling.top_p"),
        ("guided", "guided_decoding"),
        ("guided.json_schema", "guided_decoding.json_schema"),
        ("", ""),
    ],
)
def test_a_refusal_names_the_field_as_the_caller_knows_it(engine: str, public: str) -> None:
    failure = engine_failure({"reason": "INVALID_REQUEST", "message": "Wrong.", "field": engine})
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, public)


def test_an_unknown_reason_is_the_engines_failure() -> None:
    assert engine_failure({"reason": "SOMETHING_NEW"}).reason is Reason.ENGINE_FAILED


@pytest.mark.parametrize(
    ("said", "cause", "finish", "reason"),
    [
        ("stop", None, "STOP", "NONE"),
        ("length", None, "LENGTH", "NONE"),
        ("length", Cause.CANCELLED, "LENGTH", "NONE"),  # it was over before the cancel came
        ("cancelled", None, "CANCELLED", "CLIENT_CANCELLED"),
        ("cancelled", Cause.SLOW_CONSUMER, "SLOW_CONSUMER", "SLOW_CONSUMER"),
        ("cancelled", Cause.QUEUE_TIMEOUT, "REJECTED", "QUEUE_TIMEOUT"),
        ("cancelled", Cause.EXECUTION_TIMEOUT, "DEADLINE_EXCEEDED", "EXECUTION_TIMEOUT"),
        ("cancelled", Cause.DRAINED, "DRAINED", "DRAINING"),
        ("deadline", None, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ("timeout", None, "DEADLINE_EXCEEDED", "EXECUTION_TIMEOUT"),
        ("error", None, "FAILED", "ENGINE_FAILED"),
        ("something new", None, "FAILED", "ENGINE_FAILED"),
    ],
)
def test_each_end_has_its_reason(said: str, cause: Cause | None, finish: str, reason: str) -> None:
    ended = end(said, made=attempt(cause=cause))
    assert (codec.finish_name(ended.reason), codec.reason_name(ended)) == (finish, reason)
    assert (ended.record_version, ended.output_tokens, ended.usage.generated_tokens) == (9, 3, 4)


@pytest.mark.parametrize(
    ("refusal", "finish", "metadata"),
    [
        ({"reason": "QUEUE_TIMEOUT", "metadata": {"waitedMs": 12}}, "REJECTED", {"waitedMs": "12"}),
        ({"reason": "DEADLINE_EXCEEDED"}, "DEADLINE_EXCEEDED", {}),
        ({"reason": "OVERLOADED"}, "REJECTED", {}),
    ],
    ids=["queue timeout", "deadline", "overloaded"],
)
def test_a_refusal_keeps_its_reason_and_metadata(
    refusal: dict[str, Any], finish: str, metadata: dict[str, str]
) -> None:
    ended = codec.ended_by_refusal(1, 9, engine_failure(refusal))
    assert (codec.finish_name(ended.reason), codec.reason_name(ended)) == (finish, refusal["reason"])
    assert dict(ended.error.metadata) == metadata
    assert (ended.record_version, ended.HasField("output_tokens"), ended.output_tokens) == (9, True, 0)


def test_a_refusal_by_a_drain_is_no_end_of_a_drain() -> None:
    assert codec.finish_name(codec.ended_by_refusal(1, 0, Failure(Reason.DRAINING, "")).reason) == "REJECTED"


@pytest.mark.parametrize(
    ("stopped_ns", "is_local", "admitted_at", "release_s"),
    [
        (109_750_000_000, True, 101.0, 0.25),
        (110_500_000_000, True, 101.0, 0.0),
        (109_750_000_000, False, 101.0, None),
        (109_750_000_000, True, None, None),
        (99_000_000_000, True, 101.0, None),
        (0, True, 101.0, None),
        (None, True, 101.0, None),
    ],
    ids=[
        "it took a while",
        "clocks are read in an order of their own",
        "an engine on another host",
        "it never began",
        "a clock that cannot be ours",
        "it did not happen",
        "an engine that does not say",
    ],
)
def test_the_release_is_measured_where_the_clock_is_the_same(
    stopped_ns: int | None, is_local: bool, admitted_at: float | None, release_s: float | None
) -> None:
    timing = {} if stopped_ns is None else {"stopped": stopped_ns}
    ended = end("cancelled", is_local=is_local, made=attempt(admitted_at=admitted_at), timing_ns=timing)
    assert ended.HasField("release") is (release_s is not None)
    if release_s is not None:
        assert ended.release.ToTimedelta().total_seconds() == pytest.approx(release_s)


def test_an_engine_that_does_not_say_what_it_handed_out_leaves_it_unset() -> None:
    assert not end("stop", usage={"generated": 4}).HasField("output_tokens")


def test_limits_of_a_dispatch_are_read_and_unset_ones_are_none() -> None:
    message = pb.Dispatch(attempt=1, record_version=4, credit_limit=2**40)
    message.generate.prompt = "x"
    known = codec.dispatched(message, session=1, context_tokens=10)
    assert (known.remaining_s, known.queue_s, known.execution_s) == (None, None, None)
    assert (known.record_version, known.credit_limit) == (4, codec.CREDIT_MAX)
    assert not {"deadline_ms", "queue_ms", "execution_ms"} & codec.engine_request(message)[0].keys()
    message.remaining.FromMilliseconds(5_000)
    message.queue_timeout.FromMilliseconds(0)
    message.execution_timeout.FromMicroseconds(2_500_900)
    known = codec.dispatched(message, session=1, context_tokens=10)
    assert (known.remaining_s, known.queue_s, known.execution_s) == (5.0, 0.0, 2.5009)
    assert codec.engine_request(message)[0]["execution_ms"] == 2500


def test_a_continuation_goes_to_the_engine_behind_the_prompts_own_ids_and_the_tenant_salts_the_cache() -> None:
    message = pb.Dispatch(attempt=5, tenant="tenants/a", credit_limit=9)
    message.generate.tokens.ids[:] = [1, 2]
    message.continuation.token_ids[:] = [7, 8, 9]
    message.continuation.text_bytes = 4
    request, tokens = codec.engine_request(message)
    assert (request["prompt_tokens"], list(tokens)) == (2, [1, 2, 7, 8, 9])
    assert request["continuation"] == {"tokens": 3, "text_bytes": 4}
    assert request["cache_salt"] == "tenants/a"
    bytes_of_it = codec.dispatched(message, session=1, context_tokens=10).input_bytes
    assert bytes_of_it >= message.generate.ByteSize() + message.continuation.ByteSize() - 4, "it counts as input"
    message.generate.prompt = "text"
    request, tokens = codec.engine_request(message)
    assert (request.get("prompt_tokens"), list(tokens)) == (None, [7, 8, 9])
    message.ClearField("continuation")
    message.ClearField("tenant")
    request, tokens = codec.engine_request(message)
    assert not {"continuation", "cache_salt"} & request.keys()
    assert list(tokens) == []


@pytest.mark.parametrize(
    ("priority", "said"),
    [(0, None), (1, 1), (2, 2), (3, None), (4, 4), (9, None)],
)
def test_the_engine_is_told_a_priority_that_is_not_the_middle_one(priority: int, said: int | None) -> None:
    message = pb.Dispatch(attempt=5, priority=priority, credit_limit=9)  # type: ignore[arg-type]
    message.generate.prompt = "x"
    request, _ = codec.engine_request(message)
    assert request.get("priority") == said
    assert ("priority" in request) is (said is not None)


def test_a_continuation_without_tokens_begins() -> None:
    message = pb.Dispatch(attempt=5, continuation=pb.Continuation())
    message.generate.prompt = "text"
    assert "continuation" not in codec.engine_request(message)[0]


def test_a_continuation_that_fills_the_context_is_refused_before_it_waits() -> None:
    message = pb.Dispatch(attempt=5, continuation=pb.Continuation(token_ids=range(10)))
    message.generate.prompt = "text"
    with pytest.raises(Failure) as refused:
        codec.dispatched(message, session=1, context_tokens=10)
    assert refused.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert codec.dispatched(message, session=1, context_tokens=11).token == 5
    assert codec.dispatched(message, session=1, context_tokens=0).token == 5, "no such worker: that is said instead"


def test_an_end_without_an_error_has_no_reason_and_every_reason_has_a_name() -> None:
    assert codec.reason_name(pb.Ended(reason=inference_pb2.FINISH_REASON_STOP)) == "NONE"
    for name, number in errors_pb2.Reason.items():
        error = errors_pb2.Error(reason=number)
        assert f"REASON_{codec.reason_name(pb.Ended(error=error))}" == name


def test_a_tenants_weight_travels_and_none_is_one() -> None:
    for said, weight in ((7, 7), (0, 1)):
        message = pb.Dispatch(tenant_weight=said)
        assert with_load(codec.dispatched(message, session=1, context_tokens=10), message).weight == weight


@pytest.mark.parametrize(
    ("guided", "written"),
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"choice": {"strings": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({}, {}),
    ],
)
def test_a_guide_is_written_as_the_engine_reads_it(guided: dict[str, Any], written: dict[str, Any]) -> None:
    message = pb.Dispatch(attempt=1)
    message.generate.prompt = "x"
    request, _ = codec.engine_request(message)
    assert "guided" not in request
    message.generate.guided_decoding.CopyFrom(inference_pb2.GuidedDecoding(**guided))
    request, _ = codec.engine_request(message)
    assert request["guided"] == written
