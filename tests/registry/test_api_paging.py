"""Listings of the Registry: pages, tokens, labels; and what is got one by one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control.errors import InvalidRequest, Reason
from headrace.registry import paging
from support.registry_api import Api, artifact, names, refused, revision, set_alias


async def all_pages(method: Any, request: Any, field: str) -> list[list[str]]:
    pages = []
    while True:
        answer = await method(request)
        pages.append(names(getattr(answer, field)))
        if not answer.next_page_token:
            return pages
        request.page_token = answer.next_page_token


async def test_pages_hold_everything_once_in_order_and_the_last_has_no_token(api: Api) -> None:
    made = sorted([await api.artifact(size) for size in range(1, 8)])
    for size, counts in ((3, [3, 3, 1]), (7, [7]), (8, [7]), (1, [1] * 7)):
        pages = await all_pages(api.stub.ListArtifacts, pb.ListArtifactsRequest(page_size=size), "artifacts")
        assert [len(page) for page in pages] == counts
        assert [name for page in pages for name in page] == made
    assert await all_pages(api.stub.ListAliases, pb.ListAliasesRequest(), "aliases") == [[]]


async def test_what_is_written_and_deleted_between_pages_moves_nothing_else(api: Api) -> None:
    target = await api.revision()
    for name in "bdf":
        await api.alias(name, target)
    first = await api.stub.ListAliases(pb.ListAliasesRequest(page_size=2))
    await api.alias("a", target)
    await api.alias("e", target)
    await api.stub.DeleteAlias(pb.DeleteAliasRequest(name="aliases/d"))
    second = await api.other.ListAliases(pb.ListAliasesRequest(page_size=9, page_token=first.next_page_token))
    assert names(first.aliases) == ["aliases/b", "aliases/d"]
    assert names(second.aliases) == ["aliases/e", "aliases/f"]


async def test_revisions_are_listed_of_one_model_or_all(api: Api) -> None:
    made = [await api.revision(model, slots=slots) for model in ("a", "a-b", "b") for slots in (1, 2)]
    listed = await all_pages(api.stub.ListRevisions, pb.ListRevisionsRequest(page_size=4), "revisions")
    assert sorted(made) == [name for page in listed for name in page]
    only = await all_pages(api.stub.ListRevisions, pb.ListRevisionsRequest(model="models/a"), "revisions")
    assert only == [sorted(made[:2])]
    assert (await refused(api.stub.ListRevisions(pb.ListRevisionsRequest(model="a")))).field == "model"


async def test_a_token_continues_its_own_request_only(api: Api) -> None:
    for slots in (1, 2, 3):
        await api.revision("m", slots=slots, labels={"team": "red"})
    labelled = {"labels": {"team": "red"}}
    token = (await api.stub.ListRevisions(pb.ListRevisionsRequest(page_size=1, **labelled))).next_page_token
    again = pb.ListRevisionsRequest(page_size=1000, page_token=token, **labelled)
    assert len((await api.stub.ListRevisions(again)).revisions) == 2, "another page_size is no other request"
    flipped = token[:-1] + ("A" if token[-1] != "A" else "B")
    for call in (
        api.stub.ListRevisions(pb.ListRevisionsRequest(page_token=token)),
        api.stub.ListRevisions(pb.ListRevisionsRequest(page_token=token, model="models/m", **labelled)),
        api.stub.ListArtifacts(pb.ListArtifactsRequest(page_token=token, **labelled)),
        api.stub.ListAliases(pb.ListAliasesRequest(page_token="revisions/m")),
        api.stub.ListAuditRecords(pb.ListAuditRecordsRequest(page_token=token)),
        api.stub.ListRevisions(pb.ListRevisionsRequest(page_token=flipped, **labelled)),
    ):
        failure = await refused(call)
        assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, "page_token")


@settings(deadline=None)
@example("=", "ListAliases", {}, "k")
@example("==", "ListAliases", {}, "ke")
@given(st.text(), st.text(), st.dictionaries(st.text(), st.text()), st.text(min_size=1))
def test_a_token_is_read_back_and_no_text_passes_for_one(text: str, listing: str, filters: Any, key: str) -> None:
    token = paging.make_token(listing, filters, key)
    assert paging.read_token(token, listing, filters) == key
    for other in (text, text + token, token + text):
        if other not in ("", token):
            with pytest.raises(InvalidRequest):
                paging.read_token(other, listing, filters)
    with pytest.raises(InvalidRequest):
        paging.read_token(token, listing + "x", filters)


async def test_a_page_ends_before_it_outgrows_a_message(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sorted([await api.artifact(size) for size in range(1, 5)])
    monkeypatch.setattr("headrace.registry.records.PAGE_BYTES_MAX", 300)
    pages = await all_pages(api.stub.ListArtifacts, pb.ListArtifactsRequest(page_size=4), "artifacts")
    assert len(pages) > 1
    assert all(pages)
    assert [name for page in pages for name in page] == made


def test_the_size_of_a_page_has_a_default_and_a_limit() -> None:
    assert [paging.page_size(asked) for asked in (0, 1, 1000, 1001, 4_000_000_000)] == [100, 1, 1000, 1000, 1000]


async def test_a_filter_finds_what_has_all_labels_across_many_batches(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.registry.records._READ", 2)
    for slots in range(1, 12):
        team = {"team": "red" if slots % 5 == 0 else "blue", "slots": str(slots)}
        await api.revision("m", slots=slots, labels=team)
    red = await all_pages(api.stub.ListRevisions, pb.ListRevisionsRequest(labels={"team": "red"}, page_size=1),
                          "revisions")  # fmt: skip
    assert [len(page) for page in red] == [1, 1], "no empty page at the end"
    both = pb.ListRevisionsRequest(labels={"team": "red", "slots": "5"})
    (found,) = (await api.stub.ListRevisions(both)).revisions
    assert found.execution.slots == 5
    assert not (await api.stub.ListRevisions(pb.ListRevisionsRequest(labels={"team": "green"}))).revisions
    assert not (await api.stub.ListRevisions(pb.ListRevisionsRequest(labels={"absent": ""}))).revisions


async def test_labels_are_set_at_creation_and_are_no_identity(api: Api) -> None:
    first = (await api.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=artifact(labels={"a": "1"})))).artifact
    again = (await api.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=artifact(labels={"a": "2"})))).artifact
    assert dict(first.labels) == {"a": "1"}
    assert again == first, "the same content answers with what is stored"
    request = pb.CreateRevisionRequest(model="models/m", revision=revision(labels={"b": "1"}))
    one = (await api.stub.CreateRevision(request)).revision
    request.revision.labels["b"] = "2"
    assert (await api.stub.CreateRevision(request)).revision == one
    assert dict(one.labels) == {"b": "1"}


async def test_labels_of_an_alias_change_with_it(api: Api) -> None:
    target = await api.revision()
    first = await api.alias("chat", target, labels={"env": "prod"})
    second = await api.alias("chat", target, labels={"env": "test"})
    assert dict(second.labels) == {"env": "test"}
    assert second.etag != first.etag
    assert await api.alias("chat", target, labels={"env": "test"}) == second
    (listed,) = (await api.stub.ListAliases(pb.ListAliasesRequest(labels={"env": "test"}))).aliases
    assert listed == second


@pytest.mark.parametrize(
    ("labels", "field"),
    [
        ({"Team": "x"}, ""),
        ({"": "x"}, ""),
        ({"-a": "x"}, ""),
        ({"a" * 64: "x"}, ""),
        ({"a": "x" * 257}, "[a]"),
        ({"a": "é" * 129}, "[a]"),
        ({"a": "line\nline"}, "[a]"),
        ({f"k{i}": "" for i in range(65)}, ""),
        ({f"k{i}": "x" * 256 for i in range(9)}, ""),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_labels_that_are_none_are_refused_wherever_they_are(api: Api, labels: dict[str, str], field: str) -> None:
    target = await api.revision()
    for call, at in (
        (api.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=artifact(labels=labels))), "artifact.labels"),
        (api.stub.CreateRevision(pb.CreateRevisionRequest(model="models/m", revision=revision(labels=labels))),
         "revision.labels"),
        (api.stub.SetAlias(set_alias("a", target, labels=labels)), "alias.labels"),
        (api.stub.ListAliases(pb.ListAliasesRequest(labels=labels)), "labels"),
    ):  # fmt: skip
        failure = await refused(call)
        assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, at + field)


async def test_labels_up_to_the_limits_are_taken(api: Api) -> None:
    labels = {"example.com/owner_team-1": "Ä " * 20, "a": "", "a" * 63: "x" * 256}
    assert dict((await api.alias("a", await api.revision(), labels=labels)).labels) == labels


async def test_get_returns_what_was_created_or_says_what_is_missing(api: Api) -> None:
    name = await api.artifact(labels={"a": "1"})
    found = (await api.stub.GetArtifact(pb.GetArtifactRequest(name=name))).artifact
    assert (found.name, dict(found.labels)) == (name, {"a": "1"})
    made = await api.revision("m")
    assert (await api.stub.GetRevision(pb.GetRevisionRequest(name=made))).revision.name == made
    for call, missing in (
        (api.stub.GetArtifact(pb.GetArtifactRequest(name="artifacts/0123456789ab")), "artifacts/0123456789ab"),
        (api.stub.GetRevision(pb.GetRevisionRequest(name="models/m/revisions/0123456789ab")),
         "models/m/revisions/0123456789ab"),
        (api.stub.DeleteArtifact(pb.DeleteArtifactRequest(name="artifacts/0123456789ab")), "artifacts/0123456789ab"),
    ):  # fmt: skip
        failure = await refused(call)
        assert (failure.reason, failure.metadata["resourceName"]) == (Reason.NOT_FOUND, missing)
    for call in (
        api.stub.GetArtifact(pb.GetArtifactRequest(name="../aliases/x")),
        api.stub.GetRevision(pb.GetRevisionRequest(name="models/m")),
        api.stub.DeleteRevision(pb.DeleteRevisionRequest(name="")),
        api.stub.DeleteArtifact(pb.DeleteArtifactRequest(name="artifacts/..")),
    ):
        failure = await refused(call)
        assert (failure.reason, failure.field) == (Reason.INVALID_REQUEST, "name")


async def test_one_thing_created_by_many_at_once_is_created_once(api: Api) -> None:
    stubs = [api.stub, api.other] * 8
    for size in range(1, 11):
        request = pb.CreateArtifactRequest(artifact=artifact(size))
        answers = await asyncio.gather(*(stub.CreateArtifact(request) for stub in stubs))
        assert len({a.artifact.SerializeToString(deterministic=True) for a in answers}) == 1
        (record,) = await api.audit(resource=answers[0].artifact.name)
        assert record.method == "CreateArtifact"
    assert len((await api.stub.ListArtifacts(pb.ListArtifactsRequest())).artifacts) == 10


async def test_a_damaged_record_is_left_out_of_a_list_and_named_by_a_get(api: Api) -> None:
    name = await api.artifact()
    await api.store.put("artifacts/000000000000", b"\xff\xff")
    assert names((await api.stub.ListArtifacts(pb.ListArtifactsRequest())).artifacts) == [name]
    failure = await refused(api.stub.GetArtifact(pb.GetArtifactRequest(name="artifacts/000000000000")))
    assert failure.reason is Reason.INTERNAL
    await api.store.put("aliases/bad", b"\xff\xff")
    target = await api.revision()
    await api.alias("bad", target)
    (stored,) = (await api.stub.ListAliases(pb.ListAliasesRequest())).aliases
    assert stored.targets[0] == resources_pb2.AliasTarget(revision=target, weight=1)
