"""Snapshots: cannot be inconsistent, keep what holds together, never go back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.control.errors import Failure
from headrace.control.resources import (
    Alias,
    AliasTarget,
    Artifact,
    ArtifactFile,
    DraftMethod,
    Effort,
    Engine,
    Execution,
    FileKind,
    Replica,
    ReplicaState,
    RequestPolicy,
    Revision,
    Sampling,
    Speculative,
)
from headrace.control.revocation import Revocation
from headrace.control.shards import MODELS, cut
from headrace.control.snapshot import InconsistentSnapshot, RoutingSnapshot, check_successor, compile_snapshot

FILE = ArtifactFile("model.gguf", 5, "ab" * 32, FileKind.WEIGHTS)
ARTIFACT = Artifact((FILE,), "/models/here", 1)
REVISION = Revision(
    "gemma",
    ARTIFACT.name,
    ARTIFACT.digest,
    Execution(Engine.LLAMACPP, 4096, 16, 8192),
    RequestPolicy(100, Sampling(temperature=0.5, top_k=0), frozenset({Effort.LOW, Effort.HIGH}), Effort.LOW),
)
ALIAS = Alias("aliases/chat", (AliasTarget(REVISION.name, 1),), "3")
REPLICA = Replica("replicas/r", REVISION.name, "schedulers/s", "h:1", ReplicaState.READY, 7, 16, 8192)
WHOLE = RoutingSnapshot("here", 3, (ARTIFACT,), (REVISION,), (ALIAS,), (REPLICA,))


@pytest.mark.parametrize(
    "change",
    [
        {"artifacts": ()},
        {"revisions": ()},
        {"aliases": (dataclasses.replace(ALIAS, targets=()),)},
        {"aliases": (dataclasses.replace(ALIAS, targets=(AliasTarget(REVISION.name, 0),)),)},
        {"replicas": (REPLICA, REPLICA)},
        {"replicas": (dataclasses.replace(REPLICA, revision="models/x/revisions/000000000000"),)},
    ],
    ids=[
        "artifact gone",
        "revision gone",
        "alias without target",
        "weight of zero",
        "twice the name",
        "foreign replica",
    ],
)
def test_an_inconsistent_snapshot_cannot_be_made(change: dict[str, object]) -> None:
    with pytest.raises(InconsistentSnapshot):
        dataclasses.replace(WHOLE, **change)


def test_compile_leaves_out_what_does_not_resolve_and_says_so() -> None:
    lost = dataclasses.replace(ALIAS, name="aliases/lost", targets=(AliasTarget("models/x/revisions/000000000000", 1),))
    snapshot, problems = compile_snapshot(
        incarnation="here",
        version=3,
        artifacts=[ARTIFACT],
        revisions=[REVISION],
        aliases=[lost, ALIAS],
        replicas=[REPLICA],
    )
    assert snapshot == WHOLE
    assert len(problems) == 1
    assert "aliases/lost" in problems[0]


def test_identity_is_the_content_and_not_the_place_or_time() -> None:
    assert dataclasses.replace(ARTIFACT, location="/elsewhere", create_time_ms=9).digest == ARTIFACT.digest
    changed = dataclasses.replace(FILE, sha256="cd" * 32)
    assert dataclasses.replace(ARTIFACT, files=(changed,)).digest != ARTIFACT.digest
    assert dataclasses.replace(REVISION, policy=RequestPolicy(101)).digest != REVISION.digest


def test_a_revocation_is_found_by_name() -> None:
    revoked = dataclasses.replace(WHOLE, revocations=(Revocation(REPLICA.name, "it lies"),))
    assert revoked.is_revoked(REPLICA.name)
    assert not revoked.is_revoked(REVISION.name)
    with pytest.raises(InconsistentSnapshot):
        dataclasses.replace(revoked, revocations=revoked.revocations * 2)


@pytest.mark.parametrize(
    ("version", "incarnation", "fine"), [(4, "here", True), (3, "here", False), (2, "here", False), (1, "new", True)]
)
def test_versions_never_go_back_within_an_incarnation(version: int, incarnation: str, fine: bool) -> None:
    new = dataclasses.replace(WHOLE, version=version, incarnation=incarnation)
    check_successor(None, new)
    if fine:
        check_successor(WHOLE, new)
    else:
        with pytest.raises(Failure):
            check_successor(WHOLE, new)


def test_what_drafts_for_a_revision_belongs_to_the_snapshot_and_to_its_model_s_shard() -> None:
    draft = Artifact((dataclasses.replace(FILE, sha256="cd" * 32),), "/models/draft")
    speculative = Speculative(DraftMethod.DRAFT_MODEL, 3, draft.name)
    drafted = dataclasses.replace(REVISION, execution=dataclasses.replace(REVISION.execution, speculative=speculative))
    with pytest.raises(InconsistentSnapshot, match=f"needs {draft.name}"):
        RoutingSnapshot("here", 3, (ARTIFACT,), (drafted,))
    common: dict[str, Any] = {
        "incarnation": "here",
        "version": 3,
        "revisions": [drafted],
        "aliases": [],
        "replicas": [],
    }
    without, problems = compile_snapshot(artifacts=[ARTIFACT], **common)
    assert (without.revisions, problems) == ((), (f"{drafted.name} was left out: {draft.name} does not exist",))
    whole, problems = compile_snapshot(artifacts=[ARTIFACT, draft], **common)
    assert problems == ()
    assert set(cut(whole, {})[f"{MODELS}gemma"].artifacts) == {ARTIFACT, draft}
