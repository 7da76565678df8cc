"""The artifact's adapter reaches the engine; what lies outside the artifact does not."""

import pytest

from headrace.control.resources import Artifact, ArtifactFile, Engine, Execution, FileKind, Revision
from headrace.scheduler.artifacts import ArtifactFault
from headrace.scheduler.engine_config import engine_config

WEIGHTS = ArtifactFile("m.gguf", 1, "0" * 64, FileKind.WEIGHTS)
RUN = Revision("m", "", "", Execution(Engine.LLAMACPP, context_tokens=64, slots=4, kv_cells=256))


def adapter(path: str) -> Artifact:
    return Artifact((WEIGHTS, ArtifactFile(path, 1, "1" * 64, FileKind.ADAPTER)), "/models/tuned")


def test_the_engine_is_told_where_the_adapter_is():
    document = engine_config(RUN, adapter("lora/a.gguf"), threads=1, incarnation="i")
    assert document["model_path"] == "/models/tuned/m.gguf"
    assert document["adapter_path"] == "/models/tuned/lora/a.gguf"


def test_an_artifact_without_one_says_nothing_of_it():
    document = engine_config(RUN, Artifact((WEIGHTS,), "/models/base"), threads=1, incarnation="i")
    assert "adapter_path" not in document


def test_an_adapter_outside_the_artifact_is_not_loaded():
    with pytest.raises(ArtifactFault, match="outside its location"):
        engine_config(RUN, adapter("../other/a.gguf"), threads=1, incarnation="i")
