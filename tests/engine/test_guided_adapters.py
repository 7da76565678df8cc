"""Guided decoding of the three GPU engines' adapters, over FAKES: what reaches the library, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.test_adapters import Served, _own_environment, serve  # noqa: F401
from headrace.engine.async_engine import choices_as_grammar
from headrace.engine.request import GUIDES
from support import fake_model

GUIDED = {"guided_backend": "xgrammar"}
TEXTS: dict[str, Any] = {
    "json_schema": '{"type": "object"}',
    "json_object": True,
    "regex": "[a-c]+",
    "grammar": 'root ::= "ab"',
    "choice": ["yes", 'no "way"'],
}
SENT: dict[str, dict[str, dict[str, Any]]] = {
    "tensorrt_llm": {
        "json_schema": {"json": TEXTS["json_schema"]},
        "json_object": {"json_object": True},
        "regex": {"regex": "[a-c]+"},
        "grammar": {"grammar": TEXTS["grammar"]},
        "choice": {"grammar": 'root ::= "yes" | "no \\"way\\""'},
    },
    "vllm": {
        "json_schema": {"json": TEXTS["json_schema"]},
        "json_object": {"json_object": True},
        "regex": {"regex": "[a-c]+"},
        "grammar": {"grammar": TEXTS["grammar"]},
        "choice": {"choice": TEXTS["choice"]},
    },
    "sglang": {
        "json_schema": {"json_schema": TEXTS["json_schema"]},
        "json_object": {"json_schema": '{"type": "object"}'},
        "regex": {"regex": "[a-c]+"},
        "grammar": {"ebnf": TEXTS["grammar"]},
        "choice": {"ebnf": 'root ::= "yes" | "no \\"way\\""'},
    },
}


def sent(served: Served) -> dict[str, Any]:
    """What of the last request guides it, as the library got it."""
    params = served.library.requests[-1]["sampling_params"]
    if isinstance(params, dict):
        return {name: value for name, value in params.items() if name in ("json_schema", "regex", "ebnf")}
    given = params.given.get("guided_decoding") or params.given.get("structured_outputs")
    return dict(given.given) if given is not None else {}


def kind_of(served: Served) -> str:
    return served.fake.__name__.removeprefix("support.fake_")


@pytest.mark.parametrize("name", GUIDES)
def test_each_kind_reaches_the_library_in_its_own_words(serve: Callable[..., Served], name: str) -> None:  # noqa: F811
    served = serve(**GUIDED)
    assert served.engine._loop._identity["guided"] == sorted(GUIDES)
    event, _, text = served.answer(1, prompt=" the", max_tokens=30, guided={name: TEXTS[name]})
    assert sent(served) == SENT[kind_of(served)][name]
    assert event["reason"] in ("stop", "length")
    if name == "choice":
        assert (text, event["stop"]) == ("yes", {"kind": "eos", "value": fake_model.END})


def test_a_request_that_is_not_guided_says_nothing_of_it(serve: Callable[..., Served]) -> None:  # noqa: F811
    served = serve(**GUIDED)
    served.answer(1, prompt=" the", max_tokens=2)
    assert sent(served) == {}


def test_what_the_library_does_not_take_is_refused_as_the_caller_s(serve: Callable[..., Served]) -> None:  # noqa: F811
    served = serve(**GUIDED)
    event, _, _ = served.answer(1, prompt=" the", max_tokens=4, guided={"regex": "("})
    assert (event["reason"], event["error"]["reason"], event["error"]["field"]) == (
        "error",
        "INVALID_REQUEST",
        "guided",
    )
    assert "secret" not in str(event)
    assert served.answer(2, prompt=" the", max_tokens=2, ignore_eos=True)[0]["reason"] == "length"


def test_what_fails_later_is_the_engine_s(serve: Callable[..., Served]) -> None:  # noqa: F811
    served = serve(**GUIDED)
    served.generate(1, prompt=" the", max_tokens=400, guided={"choice": ["abc" * 100]})
    served.reader.wait(lambda _: bool(served.reader.output(1)[0]))
    served.library.core.is_failing = True
    event = served.finished(1)
    assert (event["reason"], event["error"]["reason"]) == ("error", "ENGINE_FAILED")


def test_a_schema_that_is_not_json_never_reaches_the_library(serve: Callable[..., Served]) -> None:  # noqa: F811
    served = serve(**GUIDED)
    served.generate(1, prompt=" the", guided={"json_schema": "{"})
    assert served.finished(1)["error"]["field"] == "guided.json_schema"
    assert not served.library.requests


def test_one_without_credit_is_not_taken_up_again(serve: Callable[..., Served]) -> None:  # noqa: F811
    """Its guide would begin anew: it runs on, and what it says is kept."""
    served = serve(run_ahead_tokens=2, **GUIDED)
    served.generate(1, prompt=" the", max_tokens=30, guided={"choice": ["abcdefghijklmnop"]}, credit=1)
    served.generate(2, prompt=" the", max_tokens=20, ignore_eos=True)
    assert served.finished(2)["reason"] == "length"
    served.ask("credit", {"limits": [[1, -1]]})
    assert served.finished(1)["stop"] == {"kind": "eos", "value": fake_model.END}
    assert served.reader.output(1)[1] == "abcdefghijklmnop"
    assert not served.reader.events("preempted", 1)


def test_without_a_backend_it_says_that_it_can_do_none(serve: Callable[..., Served]) -> None:  # noqa: F811
    served = serve(guided_backend="off")
    assert served.engine._loop._identity["guided"] == []
    served.generate(1, prompt=" the", guided={"json_object": True})
    event = served.finished(1)
    assert (event["type"], event["error"]["field"]) == ("refused", "guided.json_object")
    assert "does no guided decoding" in event["error"]["message"]


@pytest.mark.parametrize(("kind", "kinds"), [("tensorrt_llm", GUIDES), ("vllm", GUIDES), ("sglang", ())])
def test_what_is_done_where_nothing_is_set(kind: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """SGLang would need its own tokenizer for it, which is left out otherwise."""
    served = Served(kind, fake_model.write_folder(tmp_path / "model"))
    try:
        assert served.engine._loop._identity["guided"] == sorted(kinds)
    finally:
        served.engine.stop()


def test_llguidance_reads_no_choices_as_a_grammar(tmp_path: Path) -> None:
    served = Served("tensorrt_llm", fake_model.write_folder(tmp_path / "model"), guided_backend="llguidance")
    try:
        assert "choice" not in served.engine._loop._identity["guided"]
        assert served.library.args["guided_decoding_backend"] == "llguidance"
        assert served.library.args["skip_tokenizer_init"] is False
    finally:
        served.engine.stop()


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("", None),
        ("off", None),
        ("xgrammar", {"backend": "xgrammar", "disable_any_whitespace": True}),
        ("outlines", {"backend": "outlines"}),
    ],
)
def test_vllm_has_the_backend_that_is_named(backend: str, expected: object, tmp_path: Path) -> None:
    served = Served("vllm", fake_model.write_folder(tmp_path / "model"), guided_backend=backend)
    try:
        assert served.library.args.structured_outputs_config == expected
    finally:
        served.engine.stop()


def test_choices_are_written_as_literals() -> None:
    assert choices_as_grammar(["a", "é\n", '"']) == 'root ::= "a" | "é\\n" | "\\""'
