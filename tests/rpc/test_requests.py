"""Requests that cannot be read: refused with the field at fault, by bounds and not by luck."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import InvalidRequest, Reason
from headrace.rpc.requests import Refused, bounded, invalid_utf8_field, largest_field

READ = bounded(pb.GenerateRequest, 1000)
GOOD = pb.GenerateRequest(model="m", prompt="hello", stop=pb.StopConditions(strings=["ab"]))


def refused(data: bytes) -> Any:
    result = READ(data)
    assert isinstance(result, Refused)
    return result.failure


def test_a_good_request_is_parsed() -> None:
    assert READ(GOOD.SerializeToString()) == GOOD


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(model="m", prompt="x" * 1000), "prompt"),
        (pb.GenerateRequest(model="m" * 1000, prompt="x"), "model"),
        (pb.GenerateRequest(stop=pb.StopConditions(strings=["ab"] * 1000)), "stop"),
        (pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.Message(content="y" * 999)])), "conversation"),
        (pb.GenerateRequest(tokens=pb.TokenInput(ids=[2**30] * 999)), "tokens"),
    ],
)
def test_a_request_that_is_too_large_names_its_largest_field(message: pb.GenerateRequest, field: str) -> None:
    data = message.SerializeToString()
    failure = refused(data)
    assert (failure.reason, failure.field) == (Reason.REQUEST_TOO_LARGE, field)
    assert failure.metadata == {"limitBytes": "1000", "requestBytes": str(len(data))}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(model="m", prompt="a@@b"), "prompt"),
        (pb.GenerateRequest(model="@@", prompt="ab"), "model"),
        (pb.GenerateRequest(stop=pb.StopConditions(strings=["ok", "@@"])), "stop.strings"),
        (
            pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.Message(role=2, content="@@")])),
            "conversation.messages.content",
        ),
    ],
)
def test_invalid_utf8_names_its_field(message: pb.GenerateRequest, field: str) -> None:
    failure = refused(message.SerializeToString().replace(b"@@", b"\xff\xfe"))
    assert isinstance(failure, InvalidRequest)
    assert [v.field for v in failure.violations] == [field]
    assert failure.violations[0].description == "must be valid UTF-8"


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x7f", b"\x07", b"\x0b" * 40])
def test_what_is_no_message_is_an_invalid_request(data: bytes) -> None:
    assert refused(data).reason is Reason.INVALID_REQUEST


def test_groups_without_end_do_not_exhaust_the_stack() -> None:
    data = b"\x1a\xe0\x07" + b"\x0b" * 992
    assert refused(data[:1000]).reason is Reason.INVALID_REQUEST


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_fail(data: bytes) -> None:
    assert isinstance(READ(data), (pb.GenerateRequest, Refused))
    assert isinstance(largest_field(data, pb.GenerateRequest.DESCRIPTOR), str)
    assert isinstance(invalid_utf8_field(data, pb.GenerateRequest.DESCRIPTOR), str)
