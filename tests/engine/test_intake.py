"""From bytes to the loop's inbox: every refusal is a sentence with a reason and a field, none is an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.harness import ListSink
from headrace.engine.chat import ChatTemplate
from headrace.engine.intake import Intake, Published
from headrace.engine.operations import Cancel, Grant, OpenStream, Operation, Submit
from headrace.engine.request import Rejected
from headrace.engine.sequence import Prepared
from headrace.engine.synthetic import SyntheticBackend

CONTEXT = 32


class Desk:
    """An intake with an inbox that the test can look into."""

    def __init__(self, template: str | None = None, *, is_open: bool = True) -> None:
        self.inbox: list[Operation] = []
        self.has_room = True
        self.failure: str | None = None
        self.sink = ListSink()
        chat = None
        if template is not None:
            chat = ChatTemplate(template, begin_text="<b>", end_text="<e>", characters_max=200)
        self.intake = Intake(
            SyntheticBackend(),
            context_tokens=CONTEXT,
            template=chat,
            submit=self._submit,
            published=lambda: Published(0, {"active": 0}, self.failure),
            draw_seed=lambda: 4711,
            clock=lambda: 5_000_000,
        )
        if is_open:
            assert self.ask("events", {"owner": "test"}) is None
            self.inbox.clear()

    def _submit(self, operation: Operation) -> bool:
        if self.has_room:
            self.inbox.append(operation)
        return self.has_room

    def ask(self, op: str, document: Any = None, tokens: tuple[int, ...] = ()) -> dict[str, Any] | None:
        data = b"" if document is None else json.dumps(document).encode()
        return self.intake.handle(op.encode(), data, list(tokens), lambda: self.sink)

    def generate(self, *, tokens: tuple[int, ...] = (), **fields: Any) -> Prepared | Rejected:
        reply = self.ask("generate", {"requests": [{"seq": 1, **fields}]}, tokens)
        assert reply == {"ok": True}
        (operation,) = self.inbox
        assert isinstance(operation, Submit)
        (entry,) = operation.entries
        return entry

    def refused(self, *, tokens: tuple[int, ...] = (), **fields: Any) -> tuple[str, str, dict[str, Any]]:
        entry = self.generate(tokens=tokens, **fields)
        assert isinstance(entry, Rejected)
        assert entry.error.message.endswith(".")
        return entry.error.reason, entry.error.field, entry.error.metadata


def test_a_request_is_prepared() -> None:
    entry = Desk().generate(prompt=" the", deadline_ms=3)
    assert isinstance(entry, Prepared)
    assert entry.max_tokens == CONTEXT - len(entry.prompt), "null means what the context leaves"
    assert entry.sampling.seed == 4711
    assert (entry.received_ns, entry.deadline_ns) == (5_000_000, 8_000_000)
    assert (entry.queue_until_ns, entry.execution_ns) == (0, 0)


def test_limits_of_time_are_counted_from_receipt_or_last_from_the_admission() -> None:
    entry = Desk().generate(prompt="x", queue_ms=2, execution_ms=3)
    assert isinstance(entry, Prepared)
    assert (entry.deadline_ns, entry.queue_until_ns, entry.execution_ns) == (0, 7_000_000, 3_000_000)
    entry = Desk().generate(prompt="x", execution_ms=0)
    assert isinstance(entry, Prepared)
    assert entry.execution_ns == 1, "0 ms is a limit, 0 ns is none"


def test_a_cap_bounds_only_an_unset_limit() -> None:
    entry = Desk().generate(prompt=" the", max_tokens_cap=5)
    assert isinstance(entry, Prepared)
    assert entry.max_tokens == 5
    entry = Desk().generate(prompt=" the", max_tokens=9, max_tokens_cap=5)
    assert isinstance(entry, Prepared)
    assert entry.max_tokens == 9


@pytest.mark.parametrize(
    ("tokens", "fields", "expected"),
    [
        ((), {"prompt": ""}, ("INVALID_REQUEST", "prompt", {})),
        (
            (1,) * CONTEXT,
            {"prompt_tokens": CONTEXT},
            ("CONTEXT_LENGTH_EXCEEDED", "prompt", {"limitTokens": 32, "requestedTokens": 33}),
        ),
        (
            (1,) * 30,
            {"prompt_tokens": 30, "max_tokens": 3},
            ("CONTEXT_LENGTH_EXCEEDED", "max_tokens", {"limitTokens": 32, "requestedTokens": 33}),
        ),
        ((-1,), {"prompt_tokens": 1}, ("INVALID_REQUEST", "tokens", {})),
        ((10**6,), {"prompt_tokens": 1}, ("INVALID_REQUEST", "tokens", {})),
        ((), {"prompt": "x", "stop_token_ids": [10**6]}, ("INVALID_REQUEST", "stop_token_ids", {})),
        ((), {"messages": [{"role": "user", "content": "x"}]}, ("CHAT_TEMPLATE_MISSING", "messages", {})),
        ((), {"prompt": "x", "sampling": {"top_p": 2}}, ("INVALID_REQUEST", "sampling.top_p", {})),
    ],
)
def test_a_refusal_names_reason_and_field(
    tokens: tuple[int, ...], fields: dict[str, Any], expected: tuple[str, str, dict[str, Any]]
) -> None:
    assert Desk().refused(tokens=tokens, **fields) == expected


@pytest.mark.parametrize(("given", "priority"), [({}, 3), ({"priority": None}, 3), ({"priority": 1}, 1)])
def test_who_names_no_priority_has_the_middle_one(given: dict[str, Any], priority: int) -> None:
    entry = Desk().generate(tokens=(65,), prompt_tokens=1, **given)
    assert isinstance(entry, Prepared)
    assert entry.priority == priority


@pytest.mark.parametrize("priority", [0, 5, "high", True, 2.5])
def test_a_priority_is_one_of_four_numbers(priority: object) -> None:
    assert Desk().refused(tokens=(65,), prompt_tokens=1, priority=priority)[:2] == ("INVALID_REQUEST", "priority")


def test_a_continuation_takes_its_tokens_behind_the_prompts_own() -> None:
    given = {"continuation": {"tokens": 2, "text_bytes": 1}, "cache_salt": "tenants/a"}
    entry = Desk().generate(tokens=(7, 8, 65, 66), prompt_tokens=2, **given)
    assert isinstance(entry, Prepared)
    assert entry.known is not None
    assert (entry.prompt, entry.known.tokens, entry.known.text) == ([7, 8], [65, 66], b"B")
    assert entry.cache_salt == "tenants/a"
    entry = Desk().generate(tokens=(65, 66), prompt="xyz", **given)
    assert isinstance(entry, Prepared)
    assert entry.known is not None
    assert entry.known.tokens == [65, 66]


def test_continuations_keep_the_shares_of_several_requests_apart() -> None:
    desk = Desk()
    requests = [
        {"seq": 1, "prompt_tokens": 1, "continuation": {"tokens": 2, "text_bytes": 0}},
        {"seq": 2, "prompt": "x", "continuation": {"tokens": 1, "text_bytes": 99}},  # faulty, and spoils no other
        {"seq": 3, "prompt_tokens": 2},
    ]
    assert desk.ask("generate", {"requests": requests}, (1, 65, 66, 67, 2, 3)) == {"ok": True}
    (operation,) = desk.inbox
    assert isinstance(operation, Submit)
    first, faulty, last = operation.entries
    assert isinstance(first, Prepared)
    assert isinstance(faulty, Rejected)
    assert isinstance(last, Prepared)
    assert first.known is not None
    assert (first.prompt, first.known.tokens, faulty.seq, last.prompt) == ([1], [65, 66], 2, [2, 3])


@pytest.mark.parametrize(
    ("tokens", "fields", "expected"),
    [
        (
            (65,) * 32,
            {},
            ("CONTEXT_LENGTH_EXCEEDED", "continuation.tokens", {"limitTokens": 32, "requestedTokens": 33}),
        ),
        ((65,) * 5, {"max_tokens": 4}, ("INVALID_REQUEST", "continuation.tokens", {})),
        ((65,) * 5, {"max_tokens_cap": 4}, ("INVALID_REQUEST", "continuation.tokens", {})),
        ((-1,), {}, ("INVALID_REQUEST", "continuation.tokens", {})),
        ((10**6,), {}, ("INVALID_REQUEST", "continuation.tokens", {})),
        ((65,), {"text_bytes": 2}, ("INVALID_REQUEST", "continuation.text_bytes", {})),
        ((65,), {"text_bytes": -1}, ("INVALID_REQUEST", "continuation.text_bytes", {})),
        ((65,), {"text_bytes": None}, ("INVALID_REQUEST", "continuation.text_bytes", {})),
        ((65,), {"cache_salt": "x" * 257}, ("INVALID_REQUEST", "cache_salt", {})),
        ((65,), {"cache_salt": 5}, ("INVALID_REQUEST", "cache_salt", {})),
    ],
    ids=[
        "the context", "max_tokens", "the cap", "below the vocabulary", "above it", "more text than there is",
        "less than none", "no text_bytes", "a long salt", "a salt that is no text",
    ],
)  # fmt: skip
def test_an_impossible_continuation_is_refused(
    tokens: tuple[int, ...], fields: dict[str, Any], expected: tuple[str, str, dict[str, Any]]
) -> None:
    fields = dict(fields)
    continuation = {"tokens": len(tokens), "text_bytes": fields.pop("text_bytes", 0)}
    assert Desk().refused(tokens=tokens, prompt="x", continuation=continuation, **fields) == expected


@pytest.mark.parametrize("continuation", [{"tokens": 2}, {"tokens": 0}, {"tokens": "1"}, {}, [1], 5])
def test_a_continuation_that_hides_its_share_spoils_the_operation(continuation: Any) -> None:
    reply = Desk().ask("generate", {"requests": [{"seq": 1, "prompt": "x", "continuation": continuation}]}, (65,))
    assert reply is not None
    assert not reply["ok"]
    assert reply["error"]["field"].startswith("requests[0].continuation")


@pytest.mark.parametrize(
    ("op", "data", "field"),
    [
        (b"dance", b"", "op"),
        (b"\xff", b"", "op"),
        (b"generate", b"{", "request"),
        (b"generate", b"\xff", "request"),
        (b"generate", b"[" * 100_000, "request"),
        (b"generate", b"[]", "request"),
        (b"generate", b"{}", "requests"),
        (b"credit", b"{}", "limits"),
        (b"cancel", b"{}", "seqs"),
        (b"events", b'{"owner": 5}', "owner"),
        (b"events", b'{"goes_on": 1}', "goes_on"),
        (b"run", b'{"seq": 1}', "prompt"),
    ],
)
def test_an_unusable_operation_is_answered(op: bytes, data: bytes, field: str) -> None:
    desk = Desk()
    reply = desk.intake.handle(op, data, [], lambda: pytest.fail("no stream may be opened"))
    assert reply is not None
    assert (reply["ok"], reply["error"]["reason"], reply["error"]["field"]) == (False, "INVALID_REQUEST", field)
    assert desk.inbox == []


def test_operations_reach_the_loop_in_order() -> None:
    desk = Desk()
    assert desk.ask("credit", {"limits": [[1, 5]]}) == {"ok": True}
    assert desk.ask("cancel", {"seqs": [1], "reason": "deadline"}) == {"ok": True}
    assert desk.ask("events", {}) is None
    assert desk.ask("run", {"seq": 1, "prompt": "x"}) is None
    credit, cancel, stream, run = desk.inbox
    assert credit == Grant(((1, 5),))
    assert cancel == Cancel((1,), "deadline")
    assert isinstance(stream, OpenStream)
    assert isinstance(run, Submit)
    assert run.sink is desk.sink


def test_without_an_event_stream_nothing_is_taken() -> None:
    desk = Desk(is_open=False)
    reply = desk.ask("generate", {"requests": [{"seq": 1, "prompt": "x"}]})
    assert reply is not None
    assert not reply["ok"]
    desk = Desk()
    desk.sink.is_lost = True
    reply = desk.ask("generate", {"requests": [{"seq": 1, "prompt": "x"}]})
    assert reply is not None
    assert not reply["ok"]


def test_a_full_inbox_is_said() -> None:
    desk = Desk()
    desk.has_room = False
    reply = desk.ask("cancel", {"seqs": []})
    assert reply is not None
    assert reply["error"]["reason"] == "OVERLOADED"


def test_ping_and_stats_answer_from_what_was_published_and_a_failed_engine_says_so() -> None:
    desk = Desk()
    assert desk.ask("ping") == {"ok": True, "loop_age_ms": 5}
    assert desk.ask("stats") == {"ok": True, "stats": {"active": 0}}
    desk.failure = "abc"
    for op in ("ping", "stats", "events", "generate"):
        reply = desk.ask(op, {})
        assert reply is not None
        assert reply["error"]["reason"] == "ENGINE_FAILED"
        assert reply["error"]["metadata"] == {"errorId": "abc"}


def test_a_conversation_goes_through_the_template() -> None:
    desk = Desk("{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}")
    entry = desk.generate(messages=[{"role": "u", "content": "hi"}])
    assert isinstance(entry, Prepared)
    assert entry.prompt == SyntheticBackend().tokenize("<b>u:hi")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "INVALID_REQUEST"),
        ("{{ messages[9].content + 1 }}", "INVALID_REQUEST"),
        ("{{ 1 / 0 }}", "INVALID_REQUEST"),
        ("{{ messages.__class__.__mro__ }}", "INVALID_REQUEST"),
        ("{{ messages.append(1) }}", "INVALID_REQUEST"),
        ("{% for i in range(99999) %}xxxx{% endfor %}", "CONTEXT_LENGTH_EXCEEDED"),
    ],
)
def test_a_template_can_refuse_but_not_escape(template: str, reason: str) -> None:
    found, field, _ = Desk(template).refused(messages=[{"role": "u", "content": "private words"}])
    assert (found, field) == (reason, "messages")


def test_a_broken_template_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"The chat template is not valid Jinja: .*"):
        ChatTemplate("{% for %}", begin_text="", end_text="", characters_max=9)
