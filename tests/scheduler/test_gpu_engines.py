"""What a worker of a GPU engine is told, and which GPUs it gets: never one that another worker has."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
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
from headrace.scheduler.fleet import Fleet, choose_kept, choose_workers
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
    ("held", "places", "gpus", "kept"),
    [
        ({"a": 1, "b": 1}, 0, 0, "abc"),
        ({"a": 1, "b": 1}, 1, 0, "bc"),
        ({"b": 1}, 0, 1, "ac"),
        ({"a": 1, "b": 1}, 0, 2, "c"),
        ({"a": 1, "b": 1}, 0, 3, "abc"),
        ({"a": 1, "b": 1}, 1, 1, "bc"),
    ],
    ids=[
        "nothing is lacking",
        "a place is",
        "who has a GPU goes for one",
        "as many as it takes",
        "not in vain",
        "both",
    ],
)
def test_who_was_good_last_makes_room(held: dict[str, int], places: int, gpus: int, kept: str) -> None:
    assert "".join(choose_kept("abc", held, places=places, gpus=gpus)) == kept


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


def snapshot(*models: tuple[str, int], names: str, last: str = "") -> RoutingSnapshot:
    """Revisions "a", "b", ... that need so many GPUs; `names` are those that an alias names, `last` was good last."""
    revisions = tuple(
        Revision(model, "", "", Execution(Engine.VLLM, 64, 1, 64, tensor_parallel=count, device="cuda-sm90"))
        for model, count in models
    )
    good = tuple(AliasTarget(r.name, 1) for r in revisions if r.model in last)
    aliases = tuple(
        Alias(f"aliases/{r.model}", (AliasTarget(r.name, 1),), last_good=good) for r in revisions if r.model in names
    )
    return RoutingSnapshot(incarnation="i", version=1, revisions=revisions, aliases=aliases)


@contextlib.asynccontextmanager
async def fleet_of(monkeypatch: pytest.MonkeyPatch, gpus: str, workers_max: int = 8) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(fleet, "Worker", Stand)
    monkeypatch.setattr(Stand, "all", [])
    monkeypatch.setattr(Stand, "goes", asyncio.Event())
    relay: Any = SimpleNamespace(ledger=SimpleNamespace(revoked=frozenset()))
    machine: Any = None
    identity = Identity("schedulers/s", FailureDomain())
    settings = SchedulerSettings(name="s", engines="vllm", gpus=gpus, workers_max=workers_max)
    async with Fleet(settings, identity=identity, machine=machine, relay=relay, records=relay) as running:
        yield running
        Stand.goes.set()
        running.drain(0.0)


def held() -> dict[str, tuple[str, ...]]:
    return {worker.revision.split("/")[1]: worker.gpus for worker in Stand.all}


async def until(count: int) -> None:
    for _ in range(2000):
        if len(Stand.all) == count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(held())


async def test_no_two_workers_ever_have_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    models = (("a", 2), ("b", 1), ("c", 2))
    async with fleet_of(monkeypatch, "0,1,2") as running:
        running.apply(snapshot(*models, names="abc"))
        assert held() == {"a": ("0", "1"), "b": ("2",)}
        running.apply(snapshot(*models, names="bc"))  # a goes, but has not gone yet
        await asyncio.sleep(0.01)
        assert set(held()) == {"a", "b"}
        Stand.goes.set()
        await until(3)
        assert held() == {"a": ("0", "1"), "b": ("2",), "c": ("0", "1")}


@pytest.mark.parametrize("workers_max", [1, 8])
@pytest.mark.parametrize(("needed", "stays"), [(1, False), (2, True)], ids=["it can be had", "it can never be had"])
async def test_who_was_good_last_gives_its_gpu_to_its_successor_and_not_in_vain(
    monkeypatch: pytest.MonkeyPatch, needed: int, stays: bool, workers_max: int
) -> None:
    models = (("a", 1), ("b", needed))
    async with fleet_of(monkeypatch, "7", workers_max) as running:
        running.apply(snapshot(*models, names="a"))
        assert held() == {"a": ("7",)}
        running.apply(snapshot(*models, names="b", last="a"))
        assert Stand.all[0].is_ending is not stays
        if not stays:
            Stand.goes.set()
            await until(2)
            assert held() == {"a": ("7",), "b": ("7",)}


async def test_no_more_are_given_up_than_are_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    models = (("a", 1), ("b", 2), ("c", 1))
    async with fleet_of(monkeypatch, "0,1,2") as running:
        running.apply(snapshot(*models, names="ac"))
        assert held() == {"a": ("0",), "c": ("1",)}
        running.apply(snapshot(*models, names="b", last="ac"))  # one is free already
        assert {worker.revision.split("/")[1]: worker.is_ending for worker in Stand.all} == {"a": True, "c": False}
