"""Guided decoding in the SDK and on the command line: what is sent, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client.test_commands import run

from headrace import client as sdk
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.request import build_request
from headrace.control.errors import Failure, Reason
from support.scripted import Play

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("options", "guided"),
    [
        ({"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ("yes", "no")}, {"choice": pb.Choice(strings=["yes", "no"])}),
        ({"choice": []}, {"choice": pb.Choice()}),
        ({"grammar": 'root ::= "x"'}, {"grammar": 'root ::= "x"'}),
    ],
)
def test_a_guide_is_sent(options: Any, guided: dict[str, Any]) -> None:
    expected = pb.GenerateRequest(model="chat", prompt="hi", guided_decoding=pb.GuidedDecoding(**guided))
    assert build_request("chat", "hi", options) == expected
    others = {name: None for name in ("json_schema", "regex", "choice", "grammar") if name not in options}
    assert build_request("chat", "hi", {"json_object": False, **others, **options}) == expected


def test_without_a_guide_nothing_is_sent() -> None:
    assert not build_request("chat", "hi", {"json_object": False, "regex": None}).HasField("guided_decoding")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": {"a": object()}}, "guided_decoding.json_schema"),
        ({"json_schema": 7}, "guided_decoding.json_schema"),
        ({"regex": b"\xff"}, "guided_decoding.regex"),
        ({"choice": "yes"}, "guided_decoding.choice"),
        ({"choice": [1]}, "guided_decoding.choice.strings"),
    ],
)
def test_what_cannot_be_sent_names_its_field(options: Any, field: str) -> None:
    with pytest.raises(sdk.InvalidRequest) as caught:
        build_request("chat", "hi", options)
    assert caught.value.field == field


def test_of_two_guides_neither_is_sent() -> None:
    with pytest.raises(TypeError, match="at most one of json_object, regex"):
        build_request("chat", "hi", {"json_object": True, "regex": "a"})


async def unsupported(play: Play) -> None:
    raise Failure(
        Reason.GUIDED_DECODING_UNSUPPORTED,
        "The revision's workers do not guide decoding by regex; they do choice.",
        field="guided_decoding.regex",
        metadata={"requestedKind": "regex", "supportedKinds": "choice"},
    )


async def test_a_kind_that_nobody_can_do_is_an_invalid_request(serve: Any, ask: Any) -> None:
    service = await serve(unsupported)
    error = (await ask(service.target, regex="a")).error
    assert type(error) is sdk.InvalidRequest
    assert (error.reason, error.metadata["supportedKinds"]) == (Reason.GUIDED_DECODING_UNSUPPORTED, "choice")


async def said(play: Play) -> None:
    await play.accept()
    await play.delta("yes", 1)
    await play.finish()


async def test_the_command_reads_files_and_sends_each_guide(serve: Any, tmp_path: Path) -> None:
    service = await serve(said)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    (tmp_path / "rules.gbnf").write_text('root ::= "yes"', encoding="utf-8")
    for arguments, guided in (
        (["--json-schema", str(tmp_path / "schema.json")], {"json_schema": json.dumps(SCHEMA)}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "yes|no"], {"regex": "yes|no"}),
        (["--choice", "yes", "--choice", "no"], {"choice": pb.Choice(strings=["yes", "no"])}),
        (["--grammar", str(tmp_path / "rules.gbnf")], {"grammar": 'root ::= "yes"'}),
        ([], None),
    ):
        code, output, errors = await run(service, "generate", "hi", "--model", "chat", "--quiet", *arguments)
        assert (code, output.strip()) == (0, "yes"), errors
        asked = service.requests[-1]
        assert asked.HasField("guided_decoding") is (guided is not None)
        if guided is not None:
            assert asked.guided_decoding == pb.GuidedDecoding(**guided)


async def test_the_command_refuses_two_guides_and_a_file_that_is_not_there(serve: Any, tmp_path: Path) -> None:
    service = await serve(said)
    base = ("generate", "hi", "--model", "chat")
    code, _, errors = await run(service, *base, "--regex", "a", "--choice", "b")
    assert (code, "--regex and --choice exclude each other" in errors) == (2, True)
    code, _, errors = await run(service, *base, "--json-schema", str(tmp_path / "none.json"))
    assert (code, "--json-schema: cannot read" in errors) == (2, True)
    assert not service.requests
