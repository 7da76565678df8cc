"""Identities: what is stored keeps its name for ever, what only describes is no part of it, and what runs is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.adapters import route_codec
from headrace.control.resources import (
    Artifact,
    ArtifactFile,
    Effort,
    Engine,
    Execution,
    FileKind,
    ModelFacts,
    RequestPolicy,
    Revision,
    Sampling,
)

ARTIFACT = Artifact((ArtifactFile("model.gguf", 5, "ab" * 32, FileKind.WEIGHTS),), "/models/here", 1)
EXECUTION = Execution(Engine.LLAMACPP, 4096, 16, 8192)
REVISION = Revision(
    "gemma",
    ARTIFACT.name,
    ARTIFACT.digest,
    EXECUTION,
    RequestPolicy(100, Sampling(temperature=0.5, top_k=0), frozenset({Effort.LOW, Effort.HIGH}), Effort.LOW),
)
FACTS = ModelFacts("gemma3", 18, 4, 1, 640, 262144, 32768, "q4_k_m", True, "cd" * 32, 262144)


def test_identities_of_what_was_stored_before_do_not_change() -> None:
    assert ARTIFACT.digest == "57706861839045efdbdb471c67026ed4b544fc739c039329213f4b9190b01761"
    assert REVISION.digest == "ceaab85cc9a02f3212f3706d42933c5f87409ff81e01bf4e407bf8d8fd417a65"


@pytest.mark.parametrize(
    "change",
    [
        {"labels": (("team", "search"),)},
        {"facts": FACTS},
        {"signature": "model.sig"},
        {"location": "/elsewhere"},
        {"create_time_ms": 9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_only_describes_an_artifact_is_no_part_of_its_identity(change: dict[str, Any]) -> None:
    assert dataclasses.replace(ARTIFACT, **change).digest == ARTIFACT.digest


@pytest.mark.parametrize(
    "change", [{"path": "x.gguf"}, {"size": 6}, {"sha256": "cd" * 32}, {"kind": FileKind.ADAPTER}], ids=str
)
def test_every_fact_of_a_file_is(change: dict[str, Any]) -> None:
    other = dataclasses.replace(ARTIFACT, files=(dataclasses.replace(ARTIFACT.files[0], **change),))
    assert other.digest != ARTIFACT.digest


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"labels": (("a", "b"),)}, True),
        ({"create_time_ms": 5}, True),
        ({"execution": dataclasses.replace(EXECUTION, tensor_parallel=1, pipeline_parallel=1, device="cpu")}, True),
        ({"runtime": "triton-2.51"}, False),
        ({"policy_version": 1}, False),
        ({"execution": dataclasses.replace(EXECUTION, tensor_parallel=2)}, False),
        ({"execution": dataclasses.replace(EXECUTION, pipeline_parallel=2)}, False),
        ({"execution": dataclasses.replace(EXECUTION, device="cuda-sm90")}, False),
    ],
    ids=str,
)
def test_what_runs_is_a_revisions_identity_and_one_meaning_has_one(change: dict[str, Any], same: bool) -> None:
    assert (dataclasses.replace(REVISION, **change).digest == REVISION.digest) is same


def test_new_fields_survive_their_codec() -> None:
    artifact = dataclasses.replace(ARTIFACT, labels=(("a", "1"), ("b", "")), facts=FACTS, signature="model.sig")
    assert route_codec.artifact_from_proto(route_codec.artifact_to_proto(artifact)) == artifact
    revision = dataclasses.replace(
        REVISION,
        execution=dataclasses.replace(EXECUTION, tensor_parallel=2, pipeline_parallel=3, device="cuda-sm90"),
        labels=(("a", "1"),),
        runtime="triton-2.51",
        policy_version=2,
    )
    message = route_codec.revision_to_proto(revision)
    again = route_codec.revision_from_proto(message, model="gemma", artifact_digest=ARTIFACT.digest)
    assert again == revision
    for kind in FileKind:
        file = dataclasses.replace(ARTIFACT.files[0], kind=kind)
        whole = dataclasses.replace(ARTIFACT, files=(file,))
        assert route_codec.artifact_from_proto(route_codec.artifact_to_proto(whole)) == whole
