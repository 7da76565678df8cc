"""Failures to statuses and back: nothing is lost, nothing outgrows a header, and foreign statuses are not ours."""

from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyProto
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from headrace.api.errors.v1 import errors_pb2
from headrace.control.errors import DOMAIN, RULES, Failure, InvalidRequest, Reason, Retry, Violation
from headrace.rpc import status


class Ended(grpc.RpcError):
    """A call that ended with a status."""

    def __init__(self, code: grpc.StatusCode, details: str, *trailers: tuple[str, Any]) -> None:
        self._ended = (code, details, trailers)

    def code(self) -> grpc.StatusCode:
        return self._ended[0]

    def details(self) -> str:
        return self._ended[1]

    def trailing_metadata(self) -> tuple[tuple[str, Any], ...]:
        return self._ended[2]


def sent(failure: Failure) -> Ended:
    wire = rpc_status.to_status(status.to_status(failure))
    return Ended(wire.code, wire.details, *wire.trailing_metadata)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_goes_to_a_status_and_back(reason: Reason) -> None:
    failure = Failure(reason, "What happened.", field="a.b", metadata={"limitTokens": "7"}, retry_after_s=1.25)
    back = status.from_rpc_error(sent(failure))
    assert back is not None
    assert (back.reason, back.message, back.field) == (reason, "What happened.", "a.b")
    assert (back.metadata, back.retry_after_s) == ({"limitTokens": "7"}, 1.25)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_status_has_an_error_info_and_the_code_of_its_rule(reason: Reason) -> None:
    wire = status.to_status(Failure(reason, "x"))
    info = error_details_pb2.ErrorInfo()
    assert wire.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason.value, DOMAIN)
    assert wire.code == grpc.StatusCode[RULES[reason].code].value[0]
    types = [detail.TypeName() for detail in wire.details]
    assert len(types) == len(set(types)), "each type at most once"
    assert ("google.rpc.RetryInfo" in types) == (RULES[reason].retry_after_s is not None)


@pytest.mark.parametrize("reason", list(Reason))
def test_pushback_says_what_the_rule_and_retry_info_say(reason: Reason) -> None:
    rule, failure = RULES[reason], Failure(reason, "x")
    trailers = dict(status.encode(failure)[2])
    if rule.retry in (Retry.NOBODY, Retry.APPLICATION):
        assert trailers[status.PUSHBACK] == "-1"
    elif rule.retry_after_s is None:
        assert status.PUSHBACK not in trailers
    else:
        assert trailers[status.PUSHBACK] == str(int(rule.retry_after_s * 1000))


@pytest.mark.parametrize(
    ("wait_s", "expected"), [(0.0, 0), (0.07, 70), (0.29, 290), (1.001, 1001), (0.0004, 1), (8.2, 8200), (-1.0, -1)]
)
def test_pushback_is_exact_never_too_early_and_the_same_as_retry_info(wait_s: float, expected: int) -> None:
    failure = Failure(Reason.OVERLOADED, "x", retry_after_s=wait_s)
    assert status.pushback_ms(failure) == expected
    retry = error_details_pb2.RetryInfo()
    found = [detail.Unpack(retry) for detail in status.to_status(failure).details]
    assert any(found) == (expected >= 0)
    assert retry.retry_delay.ToMilliseconds() == max(0, expected)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_goes_into_an_event_and_back(reason: Reason) -> None:
    failure = Failure(reason, "What happened.", field="a.b", metadata={"k": "v"}, retry_after_s=0.125)
    back = status.from_proto(status.to_proto(failure))
    assert (back.reason, back.message, back.field) == (reason, failure.message, "a.b")
    assert (back.metadata, back.retry_after_s) == ({"k": "v"}, 0.125)


def test_a_delay_that_was_not_sent_is_not_made_up() -> None:
    back = status.from_rpc_error(sent(Failure(Reason.OVERLOADED, "x", retry_after_s=-1.0)))
    assert back is not None
    assert back.retry_after_s is None


def test_the_reasons_are_those_of_the_proto() -> None:
    names = {name.removeprefix("REASON_") for name, number in errors_pb2.Reason.items() if number}
    assert names == {reason.value for reason in Reason}


def test_all_violations_come_back() -> None:
    violations = tuple(Violation(f"f{index}", "is wrong") for index in range(5))
    back = status.from_rpc_error(sent(InvalidRequest(violations)))
    assert isinstance(back, InvalidRequest)
    assert back.violations == violations
    assert str(back) == back.message == str(InvalidRequest(violations))


def test_an_unknown_model_names_the_resource() -> None:
    wire = status.to_status(Failure(Reason.MODEL_NOT_FOUND, "x", metadata={"resourceName": "aliases/a"}))
    resource = error_details_pb2.ResourceInfo()
    assert any(detail.Unpack(resource) for detail in wire.details)
    assert resource.resource_name == "aliases/a"


def test_a_status_stays_small_enough_for_a_header() -> None:
    many = tuple(Violation(f"conversation.messages[{index}].content", "x" * 1000) for index in range(1000))
    metadata = {f"key{index}": "v" * 1000 for index in range(100)}
    for failure in (InvalidRequest(many), Failure(Reason.INTERNAL, "m" * 100_000, field="f" * 9999, metadata=metadata)):
        ended = sent(failure)
        size = len(ended.details()) + sum(len(value) * 4 / 3 for _, value in ended.trailing_metadata())
        assert size < 7000
        back = status.from_rpc_error(ended)
        assert back is not None
        assert back.reason is failure.reason


def packed(*details: Any, code: int = 14) -> tuple[str, bytes]:
    wire = status_pb2.Status(code=code, message="no")
    for detail in details:
        wire.details.add().Pack(detail)
    return ("grpc-status-details-bin", wire.SerializeToString())


OURS = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain=DOMAIN)


@pytest.mark.parametrize(
    "trailers",
    [
        pytest.param((), id="no details"),
        pytest.param((("grpc-status-details-bin", b"\xff\xff"),), id="details that cannot be read"),
        pytest.param((packed(OURS, code=8),), id="details with another code"),
        pytest.param((packed(error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="else")),), id="another domain"),
        pytest.param((packed(error_details_pb2.DebugInfo(detail="x")),), id="no ErrorInfo"),
    ],
)
def test_a_status_that_is_not_ours_is_none(trailers: tuple[tuple[str, Any], ...]) -> None:
    assert status.from_rpc_error(Ended(grpc.StatusCode.UNAVAILABLE, "no", *trailers)) is None


def test_a_broken_detail_does_not_hide_the_others() -> None:
    wire = status_pb2.Status(code=14, message="no")
    wire.details.add().Pack(OURS)
    wire.details.append(AnyProto(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff"))
    trailer = ("grpc-status-details-bin", wire.SerializeToString())
    back = status.from_rpc_error(Ended(grpc.StatusCode.UNAVAILABLE, "no", trailer))
    assert back is not None
    assert back.reason is Reason.OVERLOADED


def test_a_reason_of_a_newer_service_is_internal() -> None:
    newer = packed(error_details_pb2.ErrorInfo(reason="SOMETHING_NEW", domain=DOMAIN))
    back = status.from_rpc_error(Ended(grpc.StatusCode.UNAVAILABLE, "no", newer))
    assert back is not None
    assert back.reason is Reason.INTERNAL
    number: Any = 999
    assert status.from_proto(errors_pb2.Error(reason=number)).reason is Reason.INTERNAL
    assert status.from_proto(errors_pb2.Error()).reason is Reason.INTERNAL


def test_a_bug_shows_an_id_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    failure = status.unmapped(RuntimeError("the prompt"), where="Generate")
    assert failure.reason is Reason.INTERNAL
    assert failure.metadata["errorId"] in failure.message
    assert "the prompt" not in failure.message
    assert failure.metadata["errorId"] in capsys.readouterr().out


def test_a_quota_that_is_used_up_says_whose_and_when_it_passes() -> None:
    metadata = {"tenant": "tenants/acme", "quota": "requestsPerMinute", "limit": "60"}
    failure = Failure(Reason.QUOTA_EXCEEDED, "tenants/acme has used it.", metadata=metadata, retry_after_s=0.75)
    wire = status.to_status(failure)
    assert [d.TypeName() for d in wire.details] == [
        "google.rpc.ErrorInfo",
        "google.rpc.QuotaFailure",
        "google.rpc.RetryInfo",
    ]
    quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    wire.details[1].Unpack(quota)
    wire.details[2].Unpack(retry)
    assert [(v.subject, v.description) for v in quota.violations] == [("tenants/acme", "tenants/acme has used it.")]
    assert retry.retry_delay.ToMilliseconds() == 750
    back = status.from_rpc_error(sent(failure))
    assert back is not None
    assert (back.reason, back.metadata, back.retry_after_s) == (Reason.QUOTA_EXCEEDED, metadata, 0.75)
