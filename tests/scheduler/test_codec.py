"""What the Scheduler makes of the engine's words."""

from __future__ import annotations

import pytest

from headrace.control.errors import Reason
from headrace.scheduler.codec import engine_failure


@pytest.mark.parametrize(
    ("engine", "public"),
    [
        ("tokens", "tokens.ids"),
        ("stop[2]", "stop.strings[2]"),
        ("messages[1].role", "conversation.messages[1].role"),
        ("stop_token_ids", "stop.token_ids"),
        ("sampling.top_p", "sampling.top_p"),
        ("", ""),
    ],
)
def test_a_refusal_names_the_field_as_the_caller_knows_it(engine: str, public: str) -> None:
    failure = engine_failure({"reason": "INVALID_REQUEST", "message": "Wrong.", "field": engine})
    assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, public)


def test_an_unknown_reason_is_the_engines_failure() -> None:
    assert engine_failure({"reason": "SOMETHING_NEW"}).reason is Reason.ENGINE_FAILED
