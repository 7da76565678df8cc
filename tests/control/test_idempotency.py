"""Idempotency keys: what makes two requests the same, and what a second one does."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.idempotency import (
    Answer,
    BadRecord,
    Content,
    Decision,
    Ending,
    Lifetime,
    Origin,
    Record,
    Slice,
    SlicedCount,
    Verdict,
    decide,
    decode,
    digest,
    judge,
    key_violations,
    store_key,
)

HERE = Origin("routers/a", "1")
SUCCESSOR = Origin("routers/a", "2")
THERE = Origin("routers/b", "7")
BASE = Content("tenants/t", "chat", prompt="hello")


def record(**changes: Any) -> Record:
    base = Record(
        "requests/1", HERE, "h:1", digest(BASE.fingerprint(), "low"), "models/m/revisions/r", "low", 1_000, 9_000
    )
    return dataclasses.replace(base, **changes)


def test_a_digest_is_the_same_in_every_version() -> None:
    """If one of these changes, calls that repeat a key across an upgrade are refused as REUSED."""
    rich = Content(
        "tenants/t",
        "aliases/chat",
        messages=((1, "be brief"), (2, "héllo")),
        max_tokens=7,
        sampling={"temperature": 0.5, "seed": 3},
        stop_strings=("\n", "END"),
        stop_token_ids=(5,),
        ignore_eos=True,
        top_logprobs=0,
    )
    found = [digest(content.fingerprint(), effort) for content, effort in ((BASE, ""), (rich, "high"))]
    assert found == [
        "0acba114cd6181296b85f88d39cafc80e8a3cd92eafbe85dd8c1caff556fe67f",
        "d2c142110724fdff4628443b110aac02d7379d27a45c4c441d09d971f9bb5bbb",
    ]
    assert store_key("tenants/t", "k") == "idempotency/40d0951a033069198320b86fd45619706e9b5d186655c6bfe98b4f803253979e"


SAME = {
    "an alias by its full name": ({"model": "aliases/chat"}, True),
    "another tenant": ({"tenant": "tenants/u"}, False),
    "another alias": ({"model": "chat2"}, False),
    "a revision": ({"model": "models/m/revisions/0123456789ab"}, False),
    "another prompt": ({"prompt": "hello "}, False),
    "an empty prompt instead of none": ({"prompt": ""}, False),
    "the prompt as a message": ({"prompt": None, "messages": ((2, "hello"),)}, False),
    "the prompt as tokens": ({"prompt": None, "token_ids": (1,)}, False),
    "a limit": ({"max_tokens": 1}, False),
    "a temperature of zero": ({"sampling": {"temperature": 0.0}}, False),
    "a seed": ({"sampling": {"seed": 0}}, False),
    "a stop string": ({"stop_strings": ("x",)}, False),
    "a stop token": ({"stop_token_ids": (1,)}, False),
    "past the end of generation": ({"ignore_eos": True}, False),
    "log probabilities, no alternatives": ({"top_logprobs": 0}, False),
    "a schema": ({"guide": (("json_schema", "{}"),)}, False),
    "an object": ({"guide": (("json_object", ""),)}, False),
    "no guide": ({"guide": ()}, True),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_the_digest(name: str) -> None:
    changes, same = SAME[name]
    assert (dataclasses.replace(BASE, **changes).fingerprint() == BASE.fingerprint()) is same


def test_the_effective_effort_is_part_of_the_digest() -> None:
    print_ = BASE.fingerprint()
    assert len({digest(print_, effort) for effort in ("", "none", "low", "high")}) == 4


texts = st.text(max_size=6)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
contents = st.builds(
    Content,
    tenant=texts,
    model=texts.filter(lambda t: not t.startswith("aliases/")),
    prompt=st.none() | texts,
    messages=st.lists(st.tuples(st.integers(1, 3), texts), max_size=3).map(tuple),
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    max_tokens=st.none() | st.integers(1, 99),
    sampling=st.dictionaries(st.sampled_from(["temperature", "top_p"]), floats.map(lambda x: x + 0.0)),
    stop_strings=st.lists(texts, max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    guide=st.lists(st.tuples(st.sampled_from(["choice", "regex"]), texts), max_size=2).map(tuple),
    top_logprobs=st.none() | st.integers(0, 20),
)


@given(contents, contents)
def test_two_contents_have_one_digest_only_if_they_are_equal(one: Content, other: Content) -> None:
    assert (one.fingerprint() == other.fingerprint()) == (one == other)


@given(contents, st.data())
def test_a_change_of_any_field_changes_the_digest(content: Content, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(Content)]))
    other = dataclasses.replace(content, **{name: getattr(data.draw(contents), name)})
    assert (content.fingerprint() == other.fingerprint()) == (content == other)


@given(texts, texts, texts, texts)
def test_keys_of_two_tenants_never_meet(tenant: str, key: str, other: str, other_key: str) -> None:
    assert (store_key(tenant, key) == store_key(other, other_key)) == ((tenant, key) == (other, other_key))


def test_the_store_sees_neither_tenant_nor_key_nor_prompt() -> None:
    stored = store_key("acme-corp", "order-4711") + record().encode().decode()
    assert not [secret for secret in ("acme", "4711", "hello", "tenants/t") if secret in stored]


@pytest.mark.parametrize(
    ("key", "ok"),
    [("k", True), ("a b~!", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("ä", False), ("a\n", False),
     ("a\x7f", False)],
)  # fmt: skip
def test_keys_that_callers_may_make(key: str, ok: bool) -> None:
    found = key_violations(key)
    assert (not found) is ok
    assert all(violation.field == "idempotency_key" for violation in found)


@pytest.mark.parametrize("ending", [None, Ending("STOP", output_tokens=4, at_ms=2_000), Ending("FAILED", "REVOKED")])
def test_a_record_comes_back_as_it_was(ending: Ending | None) -> None:
    written = record(ending=ending)
    assert decode(written.encode()) == written
    later = json.loads(written.encode()) | {"a_later_field": {"x": 1}}
    assert decode(json.dumps(later).encode()) == written


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"1", b"\xff", b'{"version":2}', b'{"version":1,"ending":null}'])
def test_a_record_of_another_version_is_not_understood(data: bytes) -> None:
    with pytest.raises(BadRecord):
        decode(data)


DECISIONS = {
    "no record": (None, Decision.NEW),
    "it runs here": (record(), Decision.ATTACH_HERE),
    "it ended here": (record(ending=Ending("STOP")), Decision.ATTACH_HERE),
    "it runs elsewhere": (record(origin=THERE), Decision.ATTACH_THERE),
    "it ran here, before this process": (record(origin=SUCCESSOR), Decision.ORIGIN_LOST),
    "other content": (record(digest="0"), Decision.REUSED),
    "other content, elsewhere": (record(digest="0", origin=THERE), Decision.REUSED),
    "other content, past its time": (record(digest="0", expires_ms=5_000), Decision.EXPIRED),
    "a moment before its time": (record(expires_ms=5_001), Decision.ATTACH_HERE),
    "elsewhere, past its time": (record(origin=THERE, expires_ms=4_999), Decision.EXPIRED),
    "refused here, not yet taken back": (record(request="requests/refused"), Decision.UNSTARTED),
    "refused here, other content": (record(request="requests/refused", digest="0"), Decision.UNSTARTED),
    "refused elsewhere": (record(request="requests/refused", origin=THERE), Decision.UNSTARTED),
    "another default effort then": (record(default_effort="high"), Decision.REUSED),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_what_a_call_with_a_key_does(name: str) -> None:
    found, expected = DECISIONS[name]
    decision = decide(
        found,
        digest_with=lambda effort: digest(BASE.fingerprint(), effort),
        here=HERE,
        unstarted={"requests/refused"},
        now_ms=5_000,
    )
    assert decision is expected
    assert decision.runs is (expected in (Decision.NEW, Decision.EXPIRED, Decision.UNSTARTED))


@pytest.mark.parametrize(
    ("answer", "registered", "silent_s", "expected"),
    [
        (Answer.SUCCESSOR, "7", 0.0, Verdict.LOST),
        (Answer.SUCCESSOR, None, 0.0, Verdict.LOST),
        (Answer.SILENT, "8", 0.0, Verdict.LOST),
        (Answer.SILENT, "", 0.9, Verdict.TRY_AGAIN),
        (Answer.SILENT, "", 1.0, Verdict.LOST),
        (Answer.SILENT, "7", 19.0, Verdict.TRY_AGAIN),
        (Answer.SILENT, "7", 20.0, Verdict.UNREACHABLE),
        (Answer.SILENT, None, 19.0, Verdict.TRY_AGAIN),
        (Answer.SILENT, None, 20.0, Verdict.UNREACHABLE),
    ],
)
def test_a_router_is_lost_only_when_it_is_known_to_be(
    answer: Answer, registered: str | None, silent_s: float, expected: Verdict
) -> None:
    assert judge(THERE, answer, registered, silent_s=silent_s) is expected


@pytest.mark.parametrize(
    ("ttl_s", "remaining_s", "ended_ms", "at_start_ms", "after_end_ms"),
    [
        (1800.0, 600.0, 5_000, 1_800_000, 1_800_000),
        (1800.0, 4000.0, 5_000, 4_060_000, 1_800_000),
        (1800.0, 4000.0, 3_900_000, 4_060_000, 3_960_000),
        (10.0, 600.0, 5_000, 660_000, 65_000),
        (10.0, 600.0, 700_000, 660_000, 660_000),
    ],
    ids=["short", "a long deadline", "ended late", "a short ttl", "ended after its time"],
)
def test_how_long_a_key_lives(
    ttl_s: float, remaining_s: float, ended_ms: int, at_start_ms: int, after_end_ms: int
) -> None:
    lifetime = Lifetime(ttl_s, kept_s=60.0)
    assert lifetime.at_start(0, remaining_s) == at_start_ms
    running = record(created_ms=0, expires_ms=at_start_ms)
    assert running.ended(Ending("STOP", at_ms=ended_ms), lifetime).expires_ms == after_end_ms


@given(st.floats(1, 1e5), st.floats(1e-3, 1e8))
def test_a_lease_outlives_its_keys(ttl_s: float, life_s: float) -> None:
    doublings = Lifetime(ttl_s, 60.0).doublings(life_s)
    assert ttl_s * 2**doublings >= life_s * (1 - 1e-9)
    assert doublings == 0 or ttl_s * 2 ** (doublings - 1) < life_s


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=40))
def test_keys_are_counted_within_a_slice(steps: list[tuple[float, bool]]) -> None:
    count, now = SlicedCount(ttl_s=10.0, slice_s=2.0), 0.0
    live: list[tuple[float, Slice]] = []
    for pause_s, gives_back in steps:
        now += pause_s
        if gives_back and live:
            count.take_back(live.pop()[1])
        else:
            live.append((now, count.add(now)))
        certain = sum(1 for at, _ in live if now - at < 10.0)
        possible = sum(1 for at, _ in live if now - at <= 12.0)
        assert certain <= count.total(now) <= possible
    assert count.total(now + 12.1) == 0


def test_a_record_takes_what_the_settings_say_of_it() -> None:
    """The bound on keys is chosen by it: some 700 bytes, with the longest usual names."""
    whole = record(
        request=f"requests/{'a' * 32}",
        origin=Origin("routers/router-7f9c4d5b8-x2x4z", "0123456789abcdef"),
        admin_endpoint="10.100.200.30:50061",
        revision="models/gemma-3-270m-instruct/revisions/0123456789ab",
        default_effort="UNSPECIFIED",
        created_ms=1_764_460_800_000,
        expires_ms=1_764_462_600_000,
        ending=Ending("INTERRUPTED", "STREAM_INTERRUPTED", 8192, 1_764_460_900_000),
    )
    size = len(store_key("tenants/acme", "k")) + len(whole.encode())
    assert 500 < size <= 700
