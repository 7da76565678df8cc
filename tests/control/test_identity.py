"""Identities: what is stored keeps its name for ever, what only describes is no part of it, and what runs is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.adapters import route_codec
from headrace.adapters.execution_codec import execution_from_proto, execution_to_proto
from headrace.control.resources import (
    Abort,
    Artifact,
    ArtifactFile,
    DraftMethod,
    Effort,
    Engine,
    Execution,
    FileKind,
    ModelFacts,
    RequestPolicy,
    Revision,
    Sampling,
    Speculative,
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
OF_GPUS: dict[str, Any] = {
    "gpus": 2,
    "gpu_memory_fraction": 0.5,
    "dtype": "float16",
    "kv_events": True,
    "abort": Abort.OFF,
    "speculative": Speculative(DraftMethod.NGRAM, 3),
    "eager": True,
}
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
        ({"execution": dataclasses.replace(EXECUTION, gpus=1, gpu_memory_fraction=0.9, dtype="auto")}, True),
        ({"execution": dataclasses.replace(EXECUTION, kv_events=False, abort=None, speculative=None)}, True),
        *(({"execution": dataclasses.replace(EXECUTION, **{name: value})}, False) for name, value in OF_GPUS.items()),
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


@pytest.mark.parametrize("name", OF_GPUS)
def test_each_setting_of_the_gpu_engines_survives_its_codec(name: str) -> None:
    run = dataclasses.replace(EXECUTION, **{name: OF_GPUS[name]})
    message = execution_to_proto(run)
    assert execution_from_proto(message) == run != EXECUTION
    assert [f.name for f, _ in message.ListFields() if f.number >= 13] == [name]  # what is unset is not written


@pytest.mark.parametrize(
    "speculative",
    [
        Speculative(DraftMethod.DRAFT_MODEL, 3, "artifacts/0123456789ab"),
        Speculative(DraftMethod.EAGLE3, 3, "artifacts/0123456789ab"),
        Speculative(DraftMethod.NGRAM, 3, "", 7),
        Speculative(None, 0),
    ],
    ids=str,
)
def test_speculation_survives_its_codec_and_each_part_is_identity(speculative: Speculative) -> None:
    run = dataclasses.replace(EXECUTION, speculative=speculative)
    assert execution_from_proto(execution_to_proto(run)) == run
    digests = {
        dataclasses.replace(REVISION, execution=dataclasses.replace(EXECUTION, speculative=one)).digest
        for one in (speculative, dataclasses.replace(speculative, draft_tokens=9),
                    dataclasses.replace(speculative, draft_artifact="artifacts/ffffffffffff"),
                    dataclasses.replace(speculative, ngram_max=9))
    }  # fmt: skip
    assert len(digests) == 4
    assert Speculative(DraftMethod.NGRAM, 3, "", 4) == Speculative(DraftMethod.NGRAM, 3)  # 4 is what 0 means


def test_an_unknown_number_is_no_record() -> None:
    message = execution_to_proto(EXECUTION)
    message.abort = 99  # type: ignore[assignment]
    with pytest.raises(route_codec.BadRecord, match="abort has the unknown value 99"):
        execution_from_proto(message)


def test_what_drafts_is_an_artifact_that_the_revision_needs() -> None:
    name = "artifacts/0123456789ab"
    run = dataclasses.replace(EXECUTION, speculative=Speculative(DraftMethod.EAGLE3, 3, name))
    assert REVISION.artifacts == (ARTIFACT.name,)
    assert dataclasses.replace(REVISION, execution=run).artifacts == (ARTIFACT.name, name)
