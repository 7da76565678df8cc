"""Settings of the GPU engines from the command line to the published snapshot, by a real Registry and etcd."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli import main
from headrace.control.errors import Reason
from headrace.rpc import status
from support.etcd import etcd_process
from support.registry import Registry, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
Command = Callable[..., Awaitable[tuple[int, str, str]]]
KINDS = resources_pb2.ArtifactFile


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registry(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    # The Registry runs in this process: its log must not get into what a command prints.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    try:
        async with etcd_process(tmp_path_factory.mktemp("etcd")) as etcd, running(etcd.endpoint) as started:
            yield started
    finally:
        structlog.reset_defaults()


@pytest.fixture
def headrace(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command line in a thread, on this test's Registry."""
    monkeypatch.setenv("HEADRACE_REGISTRY", f"127.0.0.1:{registry.port}")

    def run(arguments: tuple[object, ...]) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main.run([str(one) for one in arguments])
        return code, out.getvalue().strip(), err.getvalue()

    return lambda *arguments: asyncio.to_thread(run, arguments)


async def folder(registry: Registry, digit: str, vocabulary: int = 100) -> str:
    """A model's folder, as the Registry sees one; returns the artifact's name."""
    names = {
        "model.safetensors": KINDS.KIND_WEIGHTS, "config.json": KINDS.KIND_CONFIG,
        "tokenizer.json": KINDS.KIND_TOKENIZER,
    }  # fmt: skip
    files = [KINDS(path=path, size=1, sha256=digit * 64, kind=kind) for path, kind in names.items()]
    facts = resources_pb2.ModelFacts(vocabulary=vocabulary)
    artifact = resources_pb2.Artifact(files=files, location=f"/models/{digit}", facts=facts)
    return str((await registry.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=artifact))).artifact.name)


def failure_of(error: grpc.aio.AioRpcError) -> Any:
    failure = status.from_rpc_error(error)
    assert failure is not None
    return failure


async def test_every_setting_is_stored_published_and_part_of_the_name(headrace: Command, registry: Registry) -> None:
    model, draft = await folder(registry, "a"), await folder(registry, "b")
    plain = ("revision", "create", "big", "--artifact", model, "--engine", "vllm", "--device", "cuda-sm90")
    settings = ("--gpus", 2, "--gpu-memory-fraction", 0.5, "--dtype", "float16", "--kv-events", "--abort", "off",
                "--eager", "--speculative", "draft_model", "--draft-tokens", 4, "--draft-artifact", draft)  # fmt: skip
    _, unset, _ = await headrace(*plain)
    # What says the same as saying nothing is the same revision.
    assert await headrace(*plain, "--gpus", 1, "--gpu-memory-fraction", 0.9, "--dtype", "auto") == (0, unset, "")
    code, name, said = await headrace(*plain, *settings, "--alias", "big")
    assert code == 0, said
    assert name != unset
    shown = json.loads((await headrace("revision", "show", name))[1])["execution"]
    assert (shown["gpus"], shown["gpu_memory_fraction"], shown["dtype"]) == (2, 0.5, "float16")
    assert (shown["kv_events"], shown["abort"], shown["eager"]) == (True, "ABORT_OFF", True)
    assert shown["speculative"] == {"method": "METHOD_DRAFT_MODEL", "draft_tokens": 4, "draft_artifact": draft}
    snapshot = await registry.shows(lambda s: name in [r.name for r in s.revisions])
    assert {model, draft} <= {one.name for one in snapshot.artifacts}


async def test_all_reasons_come_at_once_from_the_command_and_from_the_registry(
    headrace: Command, registry: Registry
) -> None:
    model, draft = await folder(registry, "c"), await folder(registry, "d", vocabulary=99)
    code, _, said = await headrace(
        "revision", "create", "broken", "--artifact", model, "--engine", "vllm", "--device", "cuda-sm90", "--gpus", 1,
        "--tensor-parallel", 2, "--speculative", "draft_model", "--draft-artifact", draft, "--ngram-max", 3,
    )  # fmt: skip
    reasons = ("at least the 2 that share", "must be 1 to 64", "only ngram looks anything up", "vocabulary of 99")
    assert code == 2
    assert all(reason in said for reason in reasons), said
    execution = resources_pb2.Execution(
        engine=resources_pb2.Execution.ENGINE_VLLM, context_tokens=64, slots=1, kv_cells=64, device="cuda-sm90",
        gpus=1, tensor_parallel=2, dtype="int3", gpu_memory_fraction=2.0,
    )  # fmt: skip
    execution.speculative.method = resources_pb2.Speculative.METHOD_DRAFT_MODEL
    execution.speculative.draft_artifact = draft
    execution.speculative.ngram_max = 3
    revision = resources_pb2.Revision(artifact=model, execution=execution)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.stub.CreateRevision(pb.CreateRevisionRequest(model="models/broken", revision=revision))
    found = failure_of(caught.value).violations
    at = "revision.execution."
    assert {v.field for v in found} >= {
        at + "gpus", at + "dtype", at + "gpu_memory_fraction", at + "speculative.draft_tokens",
        at + "speculative.draft_artifact", at + "speculative.ngram_max",
    }  # fmt: skip


@pytest.mark.parametrize(("field", "number"), [("abort", 77), ("speculative", 77)])
async def test_a_number_that_is_not_known_is_refused(registry: Registry, field: str, number: int) -> None:
    execution = resources_pb2.Execution(
        engine=resources_pb2.Execution.ENGINE_SYNTHETIC, context_tokens=64, slots=1, kv_cells=64
    )
    if field == "abort":
        execution.abort = number  # type: ignore[assignment]
    else:
        execution.speculative.method = number  # type: ignore[assignment]
    request = pb.CreateRevisionRequest(model="models/m", revision=resources_pb2.Revision(execution=execution))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.stub.CreateRevision(request)
    assert failure_of(caught.value).reason is Reason.INVALID_REQUEST


async def test_what_drafts_must_exist_and_stays_while_a_revision_needs_it(
    headrace: Command, registry: Registry
) -> None:
    model, draft = await folder(registry, "e"), await folder(registry, "f")
    options = ("revision", "create", "drafted", "--artifact", model, "--engine", "vllm", "--device", "cuda-sm90",
               "--speculative", "eagle3", "--draft-tokens", 2, "--draft-artifact")  # fmt: skip
    code, _, said = await headrace(*options, "000000000000")
    assert code != 0
    assert "artifacts/000000000000 does not exist" in said
    code, name, said = await headrace(*options, draft)
    assert code == 0, said
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.stub.DeleteArtifact(pb.DeleteArtifactRequest(name=draft))
    failure = failure_of(caught.value)
    assert (failure.reason, failure.metadata["usedBy"]) == (Reason.RESOURCE_IN_USE, name)
    await registry.stub.DeleteRevision(pb.DeleteRevisionRequest(name=name))
    await registry.stub.DeleteArtifact(pb.DeleteArtifactRequest(name=draft))
