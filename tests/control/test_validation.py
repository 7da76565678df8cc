"""Bad requests: each field that is wrong is named, nothing that was sent is repeated, and a refusal stays small."""

import math
import time

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control import validation
from headrace.control.errors import Failure, InvalidRequest, Reason
from headrace.control.resources import Effort, Engine, Execution, RequestPolicy, Revision, Sampling
from headrace.control.validation import RequestLimits
from headrace.router.codec import check_request, complete_request, resolve_efforts
from headrace.rpc.status import to_status

LIMITS = RequestLimits()
SECRET = "xyzzy-secret"


def request(**fields: object) -> pb.GenerateRequest:
    base: dict[str, object] = {"model": "chat", "prompt": "hello"}
    if fields.keys() & {"conversation", "tokens"}:
        del base["prompt"]
    return pb.GenerateRequest(**{**base, **fields})


def conversation(*turns: tuple[int, str]) -> pb.Conversation:
    return pb.Conversation(messages=[pb.Message(role=role, content=content) for role, content in turns])


def sampling(**fields: float) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingParameters(**fields))


def stop(**fields: object) -> pb.GenerateRequest:
    return request(stop=pb.StopConditions(**fields))


def refused_fields(bad: pb.GenerateRequest, limits: RequestLimits = LIMITS) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        check_request(bad, limits)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert SECRET not in str(to_status(caught.value))
    assert to_status(caught.value).ByteSize() < 4096
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(
    ("bad", "fields"),
    [
        pytest.param(request(model=""), ["model"], id="no model"),
        pytest.param(request(model=SECRET.upper()), ["model"], id="a model that is no name"),
        pytest.param(request(model="m" * 100_000), ["model"], id="a model of 100,000 characters"),
        pytest.param(request(model="aliases/"), ["model"], id="an alias without an id"),
        pytest.param(request(model="models/m/revisions/xyz"), ["model"], id="a revision without a digest"),
        pytest.param(request(prompt=""), ["prompt"], id="empty prompt"),
        pytest.param(pb.GenerateRequest(model="chat"), ["prompt"], id="no input at all"),
        pytest.param(pb.GenerateRequest(), ["model", "prompt"], id="nothing at all"),
        pytest.param(request(conversation=conversation()), ["conversation.messages"], id="no message"),
        pytest.param(
            request(conversation=conversation((2, "a"), (1, "b"), (2, "c"), (9, SECRET))),
            ["conversation.messages[3].role"],
            id="a role that does not exist",
        ),
        pytest.param(
            request(conversation=conversation((0, ""))),
            ["conversation.messages[0].role", "conversation.messages[0].content"],
            id="a message without role and content",
        ),
        pytest.param(
            request(conversation=conversation(*[(2, "a")] * 1025)), ["conversation.messages"], id="1,025 messages"
        ),
        pytest.param(request(tokens=pb.TokenInput()), ["tokens.ids"], id="no token"),
        pytest.param(request(tokens=pb.TokenInput(ids=[-1, -2])), ["tokens.ids[0]"], id="negative tokens"),
        pytest.param(request(tokens=pb.TokenInput(ids=[5, 6, -2])), ["tokens.ids[2]"], id="a negative token"),
        pytest.param(request(max_tokens=0), ["max_tokens"], id="max_tokens 0"),
        pytest.param(request(max_tokens=8193), ["max_tokens"], id="max_tokens above the limit"),
        pytest.param(request(top_logprobs=21), ["top_logprobs"], id="top_logprobs 21"),
        pytest.param(request(reasoning_effort=77), ["reasoning_effort"], id="an effort that does not exist"),
        pytest.param(request(recovery=77), ["recovery"], id="a recovery that does not exist"),
        pytest.param(request(on_disconnect=-1), ["on_disconnect"], id="an on_disconnect that does not exist"),
        pytest.param(request(affinity_key="é" * 65), ["affinity_key"], id="an affinity key of 130 bytes"),
        pytest.param(stop(strings=[SECRET] * 10_000), ["stop.strings"], id="10,000 stop strings"),
        pytest.param(stop(strings=["a", ""]), ["stop.strings[1]"], id="an empty stop string"),
        pytest.param(stop(strings=["é" * 129]), ["stop.strings[0]"], id="a stop string of 258 bytes"),
        pytest.param(stop(token_ids=list(range(65))), ["stop.token_ids"], id="65 stop tokens"),
        pytest.param(stop(token_ids=[1, -7]), ["stop.token_ids[1]"], id="a negative stop token"),
        pytest.param(sampling(temperature=-0.1), ["sampling.temperature"], id="temperature -0.1"),
        pytest.param(sampling(temperature=10.1), ["sampling.temperature"], id="temperature 10.1"),
        pytest.param(sampling(temperature=math.nan), ["sampling.temperature"], id="temperature NaN"),
        pytest.param(sampling(temperature=math.inf), ["sampling.temperature"], id="temperature infinite"),
        pytest.param(sampling(top_p=0), ["sampling.top_p"], id="top_p 0"),
        pytest.param(sampling(top_p=1.5), ["sampling.top_p"], id="top_p 1.5"),
        pytest.param(sampling(min_p=-0.1), ["sampling.min_p"], id="min_p -0.1"),
        pytest.param(sampling(repetition_penalty=0), ["sampling.repetition_penalty"], id="repetition_penalty 0"),
        pytest.param(sampling(presence_penalty=2.1), ["sampling.presence_penalty"], id="presence_penalty 2.1"),
        pytest.param(sampling(frequency_penalty=-9), ["sampling.frequency_penalty"], id="frequency_penalty -9"),
    ],
)
def test_a_bad_request_is_refused_by_field(bad: pb.GenerateRequest, fields: list[str]) -> None:
    assert refused_fields(bad) == fields


def test_everything_that_is_wrong_is_named_at_once() -> None:
    bad = pb.GenerateRequest(
        max_tokens=0,
        top_logprobs=99,
        sampling=pb.SamplingParameters(temperature=math.nan, top_p=7),
        stop=pb.StopConditions(strings=[""]),
        reasoning_effort=9,
    )
    assert refused_fields(bad) == [
        "model",
        "prompt",
        "max_tokens",
        "sampling.temperature",
        "sampling.top_p",
        "stop.strings[0]",
        "top_logprobs",
        "reasoning_effort",
    ]


def test_a_refusal_names_a_bounded_number_of_fields() -> None:
    assert len(refused_fields(request(conversation=conversation(*[(0, "")] * 1000)))) == validation.VIOLATIONS_MAX


@pytest.mark.parametrize(
    ("bad", "field", "metadata"),
    [
        (request(prompt="é" * 524_289), "prompt", {"limitBytes": "1048576", "requestBytes": "1048578"}),
        (
            request(conversation=conversation((2, "a" * 600_000), (3, "b" * 600_000))),
            "conversation.messages",
            {"limitBytes": "1048576", "requestBytes": "1200000"},
        ),
        (
            request(tokens=pb.TokenInput(ids=[1] * 131_073)),
            "tokens.ids",
            {"limitTokens": "131072", "requestTokens": "131073"},
        ),
    ],
    ids=["prompt", "conversation", "tokens"],
)
def test_an_input_that_is_too_large_is_refused_first(
    bad: pb.GenerateRequest, field: str, metadata: dict[str, str]
) -> None:
    with pytest.raises(Failure) as caught:
        check_request(bad, LIMITS)
    assert (caught.value.reason, caught.value.field) == (Reason.REQUEST_TOO_LARGE, field)
    assert caught.value.metadata == metadata


@pytest.mark.parametrize(
    "good",
    [
        request(),
        request(model="aliases/chat-prod"),
        request(affinity_key="é" * 64, recovery=pb.RECOVERY_CONTINUE, on_disconnect=pb.ON_DISCONNECT_CONTINUE),
        request(model="models/gemma/revisions/0123456789ab"),
        request(prompt="a" * 1_048_576),
        request(prompt="é" * 524_288),
        request(conversation=conversation((1, "be brief"), (2, "hello"))),
        request(tokens=pb.TokenInput(ids=[0])),
        request(max_tokens=1),
        request(max_tokens=8192, top_logprobs=0, reasoning_effort=4),
        stop(strings=["\n"] * 16, token_ids=[0] * 64, ignore_eos=True),
        stop(strings=["é" * 128]),
        sampling(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=10, presence_penalty=-2, seed=0),
        sampling(temperature=10, min_p=1, frequency_penalty=2, seed=2**32 - 1),
    ],
)
def test_what_is_inside_the_limits_passes(good: pb.GenerateRequest) -> None:
    check_request(good, LIMITS)


@given(st.sampled_from(sorted(validation.SAMPLING_RANGES)), st.floats(width=32))
def test_a_sampling_value_passes_exactly_when_it_is_in_its_range(field: str, value: float) -> None:
    allowed = validation.SAMPLING_RANGES[field]
    above = value > allowed.low if allowed.low_excluded else value >= allowed.low
    expected = math.isfinite(value) and above and value <= allowed.high
    assert (validation.sampling_violation(field, value) is None) == expected


@given(st.binary(max_size=200))
def test_any_message_that_parses_is_passed_or_refused(data: bytes) -> None:
    size = 0
    try:
        check_request(pb.GenerateRequest.FromString(data), LIMITS)
    except Failure as failure:
        size = to_status(failure).ByteSize()
    except DecodeError:
        pass
    assert size < 4096


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(0, 100))
def test_the_size_of_a_text_is_told_only_when_it_is_above(text: str, limit: int) -> None:
    size = len(text.encode())
    assert validation.utf8_size_above(text, limit) == (size if size > limit else 0)


def test_limits_below_1_are_refused() -> None:
    with pytest.raises(ValueError, match="messages_max must be 1 or more"):
        RequestLimits(messages_max=0)


def test_the_numbers_of_roles_and_efforts_are_those_of_the_protos() -> None:
    assert sorted(pb.Role.values()) == [0, 1, 2, 3]
    assert sorted(pb.ReasoningEffort.values()) == [0, 1, 2, 3, 4]


def test_an_ordinary_request_is_checked_in_microseconds() -> None:
    ordinary = request(max_tokens=128, sampling=pb.SamplingParameters(temperature=0.7, top_p=0.9))
    best = math.inf
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(50):
            check_request(ordinary, LIMITS)
        best = min(best, (time.perf_counter() - started) / 50)
    assert best < 100e-6, f"{best * 1e6:.1f} µs"


def revision(**policy: object) -> Revision:
    execution = Execution(Engine.SYNTHETIC, context_tokens=2048, slots=4, kv_cells=8192)
    return Revision("m", "", "", execution, RequestPolicy(**policy))  # type: ignore[arg-type]


def test_unset_sampling_takes_the_revisions_defaults_and_zero_stays_zero() -> None:
    defaults = Sampling(temperature=0.5, top_p=0.25, top_k=40)
    sent = request(sampling=pb.SamplingParameters(temperature=0))
    done = complete_request(sent, revision(default_sampling=defaults), LIMITS)
    assert done.sampling == pb.SamplingParameters(temperature=0, top_p=0.25, top_k=40)
    assert (done.model, done.prompt) == ("", "hello")
    assert sent == request(sampling=pb.SamplingParameters(temperature=0)), "the caller's message is not changed"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [pytest.param(request(), None, id="unset stays unset"), pytest.param(request(max_tokens=7), 7, id="set stays")],
)
def test_max_tokens_is_left_to_the_engine(sent: pb.GenerateRequest, expected: int | None) -> None:
    done = complete_request(sent, revision(max_output_tokens=100), LIMITS)
    assert (done.max_tokens if done.HasField("max_tokens") else None) == expected


def test_more_than_the_policy_allows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens: must be 1 to 100") as caught:
        complete_request(request(max_tokens=101), revision(max_output_tokens=100), LIMITS)
    assert caught.value.field == "max_tokens"


def test_token_ids_beyond_the_context_are_refused_with_both_numbers() -> None:
    with pytest.raises(Failure) as caught:
        complete_request(request(tokens=pb.TokenInput(ids=[1] * 2049)), revision(), LIMITS)
    assert (caught.value.reason, caught.value.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "tokens.ids")
    assert caught.value.metadata == {"limitTokens": "2048", "requestedTokens": "2049"}


@pytest.mark.parametrize(
    ("asked", "default", "effective"),
    [(0, None, None), (0, Effort.LOW, Effort.LOW), (2, Effort.LOW, Effort.LOW), (4, Effort.LOW, Effort.HIGH)],
)
def test_efforts_are_resolved_into_three(asked: int, default: Effort | None, effective: Effort | None) -> None:
    pinned = revision(default_effort=default, supported_efforts=frozenset({Effort.HIGH}))
    efforts = resolve_efforts(request(reasoning_effort=asked), pinned)
    assert (efforts.default, efforts.effective) == (default, effective)
    assert efforts.requested == (effective if asked else None)
    done = complete_request(request(reasoning_effort=asked), pinned, LIMITS)
    assert done.reasoning_effort == (list(Effort).index(effective) + 1 if effective else 0)


def test_an_unsupported_effort_is_refused_never_lowered() -> None:
    pinned = revision(default_effort=Effort.NONE, supported_efforts=frozenset({Effort.LOW}))
    with pytest.raises(Failure, match="does not support the reasoning effort high; it supports none, low") as caught:
        complete_request(request(reasoning_effort=4), pinned, LIMITS)
    assert (caught.value.reason, caught.value.field) == (Reason.EFFORT_UNSUPPORTED, "reasoning_effort")
