"""What a worker of a GPU engine is told, and which GPUs it gets: never one that another worker has."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.control.resources import (
    Abort,
    Alias,
    AliasTarget,
    Artifact,
    ArtifactFile,
    DraftMethod,
    Engine,
    Execution,
    FailureDomain,
    FileKind,
    Revision,
    Speculative,
)
from headrace.control.snapshot import RoutingSnapshot
from headrace.engine.config import EngineConfig, parse_config
from headrace.engine.config import Speculative as Told
from headrace.scheduler import fleet
from headrace.scheduler.artifacts import ArtifactFault
from headrace.scheduler.engine_config import engine_config
from headrace.scheduler.fleet import Fleet, choose_workers
from headrace.scheduler.gpus import visible_gpus
from headrace.scheduler.settings import SchedulerSettings
from headrace.scheduler.worker import Identity
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


DRAFT = Artifact((ArtifactFile("small/model.safetensors", 1, "5" * 64, FileKind.WEIGHTS),), "/models/d")


def told(draft: Artifact | None = None, gpus: tuple[str, ...] = (), **settings: Any) -> EngineConfig:
    run = dataclasses.replace(Execution(Engine.VLLM, 4096, 8, 16384), **settings)
    model = Artifact(FILES, "/models/m")
    revision = Revision("m", model.name, model.digest, run)
    return parse_config(engine_config(revision, model, threads=1, incarnation="i", draft=draft, gpus=gpus))


def test_every_setting_of_the_revision_reaches_the_engine_and_what_is_unset_is_its_default() -> None:
    config = told(
        gpus=("2", "3"), gpu_memory_fraction=0.4, dtype="float16", kv_events=True, abort=Abort.OFF, eager=True,
        speculative=Speculative(DraftMethod.NGRAM, 3, "", 7),
    )  # fmt: skip
    assert (config.gpus, config.gpu_memory_fraction, config.dtype) == ("2,3", 0.4, "float16")
    assert (config.kv_events, config.abort, config.eager) == (True, "off", True)
    assert config.speculative == Told("ngram", 3, "", 7)
    plain = EngineConfig("vllm", model_path="/models/m/base")
    for name in ("gpus", "gpu_memory_fraction", "dtype", "kv_events", "abort", "eager", "speculative"):
        assert getattr(told(), name) == getattr(plain, name)


def test_what_drafts_is_a_folder_of_its_own_artifact() -> None:
    asked = Speculative(DraftMethod.DRAFT_MODEL, 3, DRAFT.name)
    assert told(DRAFT, speculative=asked).speculative == Told("draft_model", 3, "/models/d/small")
    with pytest.raises(ArtifactFault, match="which drafts, is not in the snapshot"):
        told(None, speculative=asked)


@pytest.mark.parametrize(
    ("needs", "free", "running", "chosen"),
    [
        ({"a": 1, "b": 1, "c": 1}, 1, "", "a"),
        ({"a": 4, "b": 1}, 2, "", "bc"),
        ({"a": 4}, 0, "a", "ab"),
        ({}, 0, "", "ab"),
    ],
    ids=["as many as there are", "who needs too many is passed over", "who runs has its own", "who needs none"],
)
def test_who_gets_a_place_with_gpus(needs: dict[str, int], free: int, running: str, chosen: str) -> None:
    assert "".join(choose_workers("abc", running, 2, gpus=needs, free_gpus=free)) == chosen


@pytest.mark.parametrize(
    ("variable", "devices", "found"),
    [
        (None, ["nvidia1", "nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm"], ("0", "1", "2")),
        (None, ["nvidia2", "nvidiactl"], ("0",)),
        (None, [], ()),
        ("2, 3", ["nvidia0"], ("2", "3")),
        ("GPU-a,GPU-b", [], ("GPU-a", "GPU-b")),
        ("", ["nvidia0"], ()),
        ("1,-1,2", ["nvidia0"], ("1",)),
    ],
)
def test_gpus_of_the_machine(variable: str | None, devices: list[str], found: tuple[str, ...], tmp_path: Path) -> None:
    for name in devices:
        (tmp_path / name).touch()
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environ, tmp_path) == found


class Stand:
    """In place of a worker: it runs until it is drained, and then for as long as the test says."""

    all: list[Stand] = []  # noqa: RUF012
    goes = asyncio.Event()

    def __init__(self, name: str, *, revision: Revision, gpus: tuple[str, ...], **_: Any) -> None:
        self.name, self.revision, self.gpus = name, revision.name, gpus
        self.is_ending = False
        self.life = SimpleNamespace(restarts=0)
        Stand.all.append(self)

    def drain(self, _grace_s: float) -> None:
        self.is_ending = True

    async def run(self) -> None:
        while not (self.is_ending and Stand.goes.is_set()):
            await asyncio.sleep(0.001)


def snapshot(*models: tuple[str, int], names: str) -> RoutingSnapshot:
    """Revisions "a", "b", ... that need so many GPUs; `names` are those that an alias names."""
    revisions = tuple(
        Revision(model, "", "", Execution(Engine.VLLM, 64, 1, 64, tensor_parallel=count, device="cuda-sm90"))
        for model, count in models
    )
    aliases = tuple(Alias(f"aliases/{r.model}", (AliasTarget(r.name, 1),)) for r in revisions if r.model in names)
    return RoutingSnapshot(incarnation="i", version=1, revisions=revisions, aliases=aliases)


async def test_no_two_workers_ever_have_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "Worker", Stand)
    monkeypatch.setattr(Stand, "all", [])
    monkeypatch.setattr(Stand, "goes", asyncio.Event())
    settings = SchedulerSettings(name="s", engines="vllm", gpus="0,1,2", workers_max=8)
    relay: Any = SimpleNamespace(ledger=SimpleNamespace(revoked=frozenset()))
    machine: Any = None
    models = (("a", 2), ("b", 1), ("c", 2))
    async with Fleet(
        settings, identity=Identity("schedulers/s", FailureDomain()), machine=machine, relay=relay, records=relay
    ) as all_workers:
        all_workers.apply(snapshot(*models, names="abc"))
        assert {w.revision.split("/")[1]: w.gpus for w in Stand.all} == {"a": ("0", "1"), "b": ("2",)}
        all_workers.apply(snapshot(*models, names="bc"))  # a goes, but has not gone yet
        await asyncio.sleep(0.01)
        assert [w.revision.split("/")[1] for w in Stand.all] == ["a", "b"]
        Stand.goes.set()
        for _ in range(1000):
            if len(Stand.all) == 3:
                break
            await asyncio.sleep(0.001)
        assert {w.revision.split("/")[1]: w.gpus for w in Stand.all[1:]} == {"b": ("2",), "c": ("0", "1")}
        all_workers.drain(0.0)
