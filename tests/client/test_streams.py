"""What both clients hand on, and how each end of a request is told; over real gRPC."""

import asyncio
import math
from typing import Any

import grpc
import pytest

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client import Accepted, Delta, FinishReason, HeadraceError, Notice, NoticeKind, Terminal
from headrace.control.errors import RULES, Failure, InvalidRequest, Reason, Violation
from headrace.rpc.status import to_proto
from support.scripted import good, raising

INTERRUPTED = Failure(Reason.STREAM_INTERRUPTED, "The worker was lost.", metadata={"tokensDelivered": "2"})


async def test_events_are_typed_and_the_answer_is_whole(serve: Any, ask: Any) -> None:
    heard = await ask((await serve(good)).target)
    assert heard.error is None
    assert heard.kinds == ["Accepted", "Delta", "Notice", "Delta", "Terminal"]
    accepted, first, notice, second, terminal = heard.events
    assert isinstance(accepted, Accepted)
    assert (accepted.request, accepted.effective_effort) == ("requests/r1", sdk.Effort.LOW)
    assert (accepted.requested_effort, accepted.snapshot_version) == (None, 7)
    assert first == Delta(2, "Hel", (1, 2))
    assert notice == Notice(3, NoticeKind.PAUSED, "waiting", 1)
    assert second.logprobs == (sdk.TokenLogprob(3, -0.5, (sdk.Alternative(3, -0.5),)),)
    assert isinstance(terminal, Terminal)
    answer = heard.answer
    assert (answer.text, answer.token_ids) == ("Hello", (1, 2, 3))
    assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, sdk.StopMatch("string", "\n"))
    assert answer.usage == sdk.Usage(prompt_tokens=3, generated_tokens=2, sent_tokens=2)
    assert answer.timing == sdk.Timing(total_s=1.5)
    assert (answer.revision, answer.replica) == ("models/m/revisions/0123456789ab", "replicas/a")
    assert len(answer.logprobs) == 1


async def test_the_request_carries_what_was_asked_for(serve: Any, ask: Any) -> None:
    service = await serve(good)
    await ask(
        service.target,
        messages=[{"role": "system", "content": "brief"}, sdk.Message("user", "hi")],
        max_tokens=5,
        temperature=0.0,
        top_k=0,
        seed=9,
        stop="\n",
        stop_token_ids=[4],
        ignore_eos=True,
        top_logprobs=0,
        reasoning_effort="high",
    )
    assert service.requests[0] == pb.GenerateRequest(
        model="chat",
        conversation=pb.Conversation(
            messages=[pb.Message(role=pb.ROLE_SYSTEM, content="brief"), pb.Message(role=pb.ROLE_USER, content="hi")]
        ),
        max_tokens=5,
        sampling=pb.SamplingParameters(temperature=0.0, top_k=0, seed=9),
        stop=pb.StopConditions(strings=["\n"], token_ids=[4], ignore_eos=True),
        top_logprobs=0,
        reasoning_effort=pb.REASONING_EFFORT_HIGH,
    )


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason_has_its_exception(serve: Any, ask: Any, reason: Reason) -> None:
    service = await serve(raising(Failure(reason, "It failed.", field="seed", metadata={"limitTokens": "7"})))
    error = (await ask(service.target, retry=None)).error
    assert type(error) is sdk.errors._BY_REASON[reason]
    assert (error.reason, error.code, error.message) == (reason, RULES[reason].code, "It failed.")
    assert error.metadata == {"limitTokens": "7"}
    assert error.retry_after_s == RULES[reason].retry_after_s
    assert (error.field, error.calls, error.answer.text) == ("seed", 1, "")
    assert not isinstance(error, grpc.RpcError)


async def test_every_violation_reaches_the_caller(serve: Any, ask: Any) -> None:
    violations = (Violation("model", "is required"), Violation("sampling.top_p", "must be above 0 up to 1"))
    error = (await ask((await serve(raising(InvalidRequest(violations)))).target)).error
    assert isinstance(error, sdk.InvalidRequest)
    assert (error.violations, error.field) == (violations, "model")


def ending(finish: str, failure: Failure | None, status: Failure | None, *, text: str = "ab") -> Any:
    async def script(play: Any) -> None:
        await play.accept()
        if text:
            await play.delta(text, 1)
        await play.finish(finish, failure=failure)
        if status:
            raise status

    return script


@pytest.mark.parametrize(
    ("finish", "reason", "kind"),
    [
        ("INTERRUPTED", Reason.STREAM_INTERRUPTED, sdk.Interrupted),
        ("DRAINED", Reason.DRAINING, sdk.Interrupted),
        ("CANCELLED", Reason.CLIENT_CANCELLED, sdk.Cancelled),
        ("CANCELLED", Reason.CLIENT_DISCONNECTED, sdk.Cancelled),
        ("DEADLINE_EXCEEDED", Reason.DEADLINE_EXCEEDED, sdk.DeadlineExceeded),
        ("DEADLINE_EXCEEDED", Reason.EXECUTION_TIMEOUT, sdk.DeadlineExceeded),
        ("SLOW_CONSUMER", Reason.SLOW_CONSUMER, sdk.SlowConsumer),
        ("FAILED", Reason.ENGINE_FAILED, sdk.ServiceError),
    ],
)
async def test_a_bad_end_is_an_event_and_then_an_exception_with_what_arrived(
    serve: Any, ask: Any, finish: str, reason: Reason, kind: type[HeadraceError]
) -> None:
    failure = Failure(reason, "It ended.")
    service = await serve(ending(finish, failure, failure))
    heard = await ask(service.target)
    assert heard.kinds == ["Accepted", "Delta", "Terminal"]
    assert type(heard.error) is kind
    assert heard.error.reason is reason
    assert (heard.error.answer.text, heard.error.answer.finish_reason) == ("ab", FinishReason[finish])
    assert heard.error.answer.usage.generated_tokens == 2
    assert service.calls == 1, "nothing is sent again after output"


async def test_a_request_that_waited_too_long_for_a_slot_may_be_sent_again_by_its_caller(serve: Any, ask: Any) -> None:
    failure = Failure(Reason.QUEUE_TIMEOUT, "All slots were busy.", retry_after_s=2.0)
    service = await serve(ending("REJECTED", failure, failure, text=""))
    heard = await ask(service.target)
    assert heard.kinds == ["Accepted", "Terminal"]
    assert type(heard.error) is sdk.Overloaded
    assert (heard.error.retry_after_s, service.calls) == (2.0, 1)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        pytest.param(ending("STOP", None, INTERRUPTED), "means OK, and with status ABORTED", id="STOP with an error"),
        pytest.param(
            ending("FAILED", Failure(Reason.ENGINE_FAILED, "x"), None), "means INTERNAL, and with", id="error with OK"
        ),
        pytest.param(ending("CANCELLED", None, None), "means an error, and with status OK", id="CANCELLED with OK"),
        pytest.param(
            ending("FAILED", Failure(Reason.ENGINE_FAILED, "x"), INTERRUPTED), "with status ABORTED", id="other codes"
        ),
        pytest.param(ending("STOP", Failure(Reason.OVERLOADED, "x"), None), "STOP, which means RES", id="STOP, why?"),
    ],
)
async def test_a_status_that_contradicts_the_terminal_event_is_a_protocol_error(
    serve: Any, ask: Any, script: Any, says: str
) -> None:
    heard = await ask((await serve(script)).target)
    assert isinstance(heard.error, sdk.ProtocolError)
    assert says in str(heard.error)
    assert heard.error.answer.text == "ab"


async def no_terminal(play: Any) -> None:
    await play.accept()
    await play.delta("ab", 1)


async def empty(play: Any) -> None:
    pass


async def output_first(play: Any) -> None:
    await play.delta("ab", 1)


async def after_the_end(play: Any) -> None:
    await good(play)
    await play.delta("more", 9)


async def unreadable(play: Any) -> None:
    await play.accept()
    event = pb.GenerateEvent(sequence=2, delta=pb.Delta(text="ab"))
    await play.context.write(_Raw(event.SerializeToString().replace(b"ab", b"\xff\xfe")))


class _Raw:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def SerializeToString(self) -> bytes:
        return self.data


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (no_terminal, "without a terminal event"),
        (empty, "without a terminal event"),
        (output_first, "before it accepted"),
        (after_the_end, "after the terminal one"),
        (unreadable, "cannot be read"),
    ],
)
async def test_a_broken_contract_is_a_protocol_error(serve: Any, ask: Any, script: Any, says: str) -> None:
    service = await serve(script)
    heard = await ask(service.target)
    assert type(heard.error) is sdk.ProtocolError
    assert says in str(heard.error)
    assert service.calls == 1


@pytest.mark.parametrize("sequence", [1, 2, 4, 9, 0])
async def test_a_gap_or_a_duplicate_ends_the_stream(serve: Any, ask: Any, sequence: int) -> None:
    async def script(play: Any) -> None:
        await play.accept()
        await play.delta("a", 1)
        await play.delta("b", 2, sequence=sequence)
        await play.finish()

    heard = await ask((await serve(script)).target)
    assert isinstance(heard.error, sdk.SequenceGap)
    assert heard.error.metadata == {"expectedSequence": "3", "gotSequence": str(sequence)}
    assert heard.error.answer.text == "a"


async def test_what_only_a_newer_service_knows_is_passed_over(serve: Any, ask: Any) -> None:
    async def script(play: Any) -> None:
        await play.accept()
        await play.send()
        await play.delta("a", 1)
        await play.send(terminal=pb.Terminal(finish_reason=99))

    heard = await ask((await serve(script)).target)
    assert heard.kinds == ["Accepted", "Delta", "Terminal"]
    assert heard.answer.finish_reason is FinishReason.UNKNOWN


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan])
async def test_a_deadline_already_past_makes_no_call(serve: Any, ask: Any, timeout_s: float) -> None:
    service = await serve(good)
    error = (await ask(service.target, timeout_s=timeout_s)).error
    assert isinstance(error, sdk.DeadlineExceeded)
    assert (error.field, error.calls, service.calls) == ("timeout_s", 0, 0)
    assert "timeout_s" in str(error)


async def test_a_deadline_that_passes_ends_the_request_with_what_arrived(serve: Any, ask: Any) -> None:
    async def script(play: Any) -> None:
        await play.accept()
        await play.delta("ab", 1)
        await asyncio.sleep(60)

    heard = await ask((await serve(script)).target, timeout_s=0.5)
    assert isinstance(heard.error, sdk.DeadlineExceeded)
    assert heard.error.answer.text == "ab"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"top_k": 2**40}, "sampling.top_k"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"seed": -5}, "sampling.seed"),
        ({"stop": [5]}, "stop.strings"),
        ({"stop_token_ids": [2**40]}, "stop.token_ids"),
        ({"token_ids": ["a"]}, "tokens.ids"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"model": None}, "model"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "conversation.messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "conversation.messages[1]"),
        ({"messages": [{"role": "user", "content": 5}]}, "conversation.messages[0].content"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"on_disconnect": "stay"}, "on_disconnect"),
        ({"on_disconnect": True}, "on_disconnect"),
        ({"window_tokens": -1}, "window_tokens"),
    ],
)
async def test_what_cannot_be_sent_is_refused_by_field_without_a_call(
    ask: Any, options: dict[str, Any], field: str
) -> None:
    error = (await ask("127.0.0.1:1", **options)).error
    assert isinstance(error, sdk.InvalidRequest)
    assert (error.field, error.violations[0].field, error.calls) == (field, field, 0)


@pytest.mark.parametrize("options", [{"prompt": "a", "token_ids": [1]}, {"temprature": 1}])
async def test_a_call_that_is_a_mistake_is_a_type_error(ask: Any, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="generate"):
        await ask("127.0.0.1:1", **options)


def test_the_exceptions_are_all_in_the_drawn_tree() -> None:
    drawn = sdk.errors.__doc__ or ""
    classes = [c for c in vars(sdk.errors).values() if isinstance(c, type) and issubclass(c, HeadraceError)]
    assert len(classes) >= 15
    assert [c.__name__ for c in classes if f" {c.__name__} " not in drawn and f" {c.__name__}\n" not in drawn] == []
    assert set(sdk.errors._BY_REASON) == set(Reason)
    assert to_proto(INTERRUPTED).reason
