"""What a worker of a GPU engine is told: folders instead of files, and how many GPUs share a layer."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.control.resources import Artifact, ArtifactFile, Engine, Execution, FileKind, Revision
from headrace.engine.config import parse_config
from headrace.scheduler.engine_run import engine_config
from headrace.scheduler.settings import SchedulerSettings
from headrace.triton.runtimes import runtime_name

FILES = (
    ArtifactFile("base/model.safetensors", 1, "0" * 64, FileKind.WEIGHTS),
    ArtifactFile("base/config.json", 1, "1" * 64, FileKind.CONFIG),
    ArtifactFile("lora/adapter_model.safetensors", 1, "2" * 64, FileKind.ADAPTER),
)
GPU = [engine for engine in Engine if engine.schedules_itself]


@pytest.mark.parametrize("engine", GPU)
def test_its_model_and_its_adapter_are_folders(engine: Engine) -> None:
    run = dataclasses.replace(Execution(engine, 4096, 8, 16384), tensor_parallel=2, prefill_chunk=256)
    revision = Revision("m", "", "", run)
    config = engine_config(revision, Artifact(FILES, "/models/m"), threads=1, incarnation="i")
    assert (config["engine"], config["model_path"], config["adapter_path"]) == (
        engine.value, "/models/m/base", "/models/m/lora",
    )  # fmt: skip
    parsed = parse_config(config)
    assert (parsed.tensor_parallel, parsed.run_ahead_tokens, parsed.slots) == (2, 1024, 8)


@pytest.mark.parametrize("engine", GPU)
def test_none_of_them_is_on_by_default_and_each_may_be_named(engine: Engine) -> None:
    assert engine.value not in SchedulerSettings().engines
    assert SchedulerSettings(engines=(engine.value,)).engines == (engine.value,)
    assert engine.value in runtime_name(engine)
