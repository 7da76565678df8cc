"""Who calls: the key in the metadata of every call, TLS, and no key in plain text to another machine."""

from typing import Any

import pytest

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.connect import is_loopback, parse_targets
from support.scripted import Play, Scripted, good

NAME = "requests/r1"


def keys_of(context: Any) -> list[str]:
    return [value for name, value in context.invocation_metadata() if name == "authorization"]


async def test_the_key_is_in_every_call(serve: Any, ask: Any) -> None:
    seen: list[list[str]] = []

    async def looking(play: Play) -> None:
        seen.append(keys_of(play.context))
        await (play.finish() if play.after else good(play))

    service = await serve(looking)
    async with ask.client(service.target, api_key="s3cret") as client:
        assert (await ask.reading(client.generate("hi", model="chat")).rest()).error is None
        assert (await ask.reading(client.resume(NAME, 1)).rest()).error is None
    assert seen == [["Bearer s3cret"]] * 2
    async with ask.client(service.target) as client:
        assert (await ask.reading(client.generate("hi", model="chat")).rest()).error is None
    assert seen[2:] == [[]]


@pytest.mark.parametrize("method", ["get_request", "cancel_request"])
async def test_and_in_questions_about_a_request(serve: Any, ask: Any, method: str, monkeypatch: Any) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(Scripted, "GetRequest", _asked(seen))
    monkeypatch.setattr(Scripted, "CancelRequest", _asked(seen))
    service = await serve(good)
    async with ask.client(service.target, api_key="s3cret") as client:
        await ask.wait(getattr(client, method), NAME)
    assert seen == [["Bearer s3cret"]]


def _asked(seen: list[list[str]]) -> Any:
    async def asked(_self: Any, request: Any, context: Any) -> pb.Request:
        seen.append(keys_of(context))
        return pb.Request(name=request.request)

    return asked


@pytest.mark.parametrize("kind", [sdk.Client, sdk.AsyncClient])
@pytest.mark.parametrize("target", ["models.example:50051", "10.0.0.7:50051", "127.0.0.1:50051,10.0.0.7:50051"])
def test_no_key_goes_to_another_machine_in_plain_text(kind: Any, target: str) -> None:
    with pytest.raises(ValueError, match=r"credentials for TLS, or, .*allow_plaintext_key=True") as caught:
        kind(target, api_key="s3cret")
    assert "s3cret" not in str(caught.value)
    kind(target, api_key="s3cret", allow_plaintext_key=True)
    kind(target)


@pytest.mark.parametrize("key", ["", "with space", "line\n", "ümlaut"])
def test_a_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        sdk.Client(api_key=key)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("127.0.0.1:50051", True),
        ("127.9.9.9:1", True),
        ("localhost:50051", True),
        ("LOCALHOST:50051", True),
        ("[::1]:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("ipv6:[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("unix:/run/headrace.sock", True),
        ("10.0.0.1:50051", False),
        ("[2001:db8::1]:50051", False),
        ("0.0.0.0:50051", False),
        ("localhost.example:50051", False),
        ("dns:///models.example:50051", False),
        ("127.0.0.1.example:50051", False),
    ],
)
def test_what_stays_on_this_machine(target: str, expected: bool) -> None:
    assert is_loopback(target) is expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [("a:1", ["a:1"]), ("a:1, b:2", ["a:1", "b:2"]), (["a:1", "b:2"], ["a:1", "b:2"]), (("a:1",), ["a:1"])],
)
def test_addresses(target: Any, expected: list[str]) -> None:
    assert parse_targets(target) == expected


@pytest.mark.parametrize("target", ["", ",", []])
def test_no_address(target: Any) -> None:
    with pytest.raises(ValueError, match="at least one"):
        sdk.Client(target)
