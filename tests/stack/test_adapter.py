"""A LoRA adapter through the whole stack: an artifact of base and adapter, a revision of it, an answer of its own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from headrace.api.registry.v1 import registry_service_pb2 as registry_pb2
from headrace.api.registry.v1 import resources_pb2
from headrace.api.registry.v1.registry_service_pb2_grpc import RegistryServiceStub
from headrace.cli.weights import default_model
from stack.engine_stats import workers
from stack.test_path import TOKENS, bare_greedy, check_story, greedy, ids_of, read
from stack.waiting import until
from support.gguf import lora, lora_of
from support.stack import MODEL, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

TUNED = "tuned"
EXECUTION = ["--context", "512", "--slots", "2", "--kv-cells", "1024"]
# With the adapter the likeliest token leads by 0.46 in logit or more for all of 24 tokens; one at a time, so that all
# batches are llama.cpp's own. Without it, each has another answer.
PROMPTS = ["1\n2\n3\n4\n5\n6\n", "1900 1901 1902 1903 1904", "1a 2a 3a 4a 5a 6a"]


def said(stack: RunningStack, *arguments: str) -> str:
    """What a command that succeeds prints."""
    done = stack.run(*arguments, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def weights() -> Path:
    return default_model(lambda text: None)


@pytest.fixture(scope="module")
def base(stack: RunningStack, weights: Path) -> str:
    """The artifact that the stack serves already."""
    known = json.loads(said(stack, "artifact", "list", "--json"))
    return next(a["name"] for a in known if [f["path"] for f in a["files"]] == [weights.name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    """Base and adapter side by side; the base is a link."""
    path = tmp_path_factory.mktemp("lora") / "tuned"
    path.mkdir()
    (path / weights.name).symlink_to(weights)
    (path / "lora.gguf").write_bytes(lora_of(weights, layer=2))
    return path


@pytest.fixture(scope="module")
def tuned(stack: RunningStack, folder: Path, base: str) -> Iterator[str]:
    """The revision of base and adapter, while it is served; the name of its artifact."""
    artifact = said(stack, "artifact", "create", str(folder), "--base", base)
    said(stack, "revision", "create", TUNED, "--artifact", artifact, *EXECUTION, "--alias", TUNED)
    yield artifact
    said(stack, "model", "remove", TUNED)


async def test_it_answers_as_llama_cpp_with_that_adapter_and_unlike_its_base(
    stack: RunningStack, folder: Path, weights: Path, tuned: str
) -> None:
    await until(lambda: TUNED in workers(stack) and workers(stack)[TUNED].ready)
    expected = await asyncio.to_thread(bare_greedy, PROMPTS, folder / "lora.gguf")
    for prompt, ids in zip(PROMPTS, expected, strict=True):
        events = await read(stack, **greedy(prompt, TUNED))
        assert events[0].accepted.revision.startswith(f"models/{TUNED}/revisions/")
        assert ids_of(events) == ids, prompt
        assert check_story(events).usage.generated_tokens == TOKENS
        assert ids_of(await read(stack, **greedy(prompt, MODEL))) != ids, "the adapter is not heard"


def test_its_artifact_says_which_base_and_names_both_files(stack: RunningStack, tuned: str, weights: Path) -> None:
    document = json.loads(said(stack, "artifact", "show", tuned, "--json"))
    assert {f["path"]: f["kind"] for f in document["files"]} == {weights.name: "weights", "lora.gguf": "adapter"}
    assert document["facts"]["base_digest"]


async def test_one_that_does_not_fit_its_base_fails_the_load_with_the_reason(
    stack: RunningStack, base: str, weights: Path, tmp_path: Path
) -> None:
    """What no rule sees beforehand."""
    folder = tmp_path / "misshapen"
    folder.mkdir()
    (folder / weights.name).symlink_to(weights)
    a, b = np.ones((2, 64), np.float32), np.ones((64, 2), np.float32)
    (folder / "lora.gguf").write_bytes(lora("gemma3", {"blk.2.ffn_down.weight": (a, b)}, alpha=16.0))
    artifact = said(stack, "artifact", "create", str(folder), "--base", base)
    said(stack, "revision", "create", "misshapen", "--artifact", artifact, *EXECUTION, "--alias", "misshapen")
    try:
        reason = "which is no LoRA adapter of this model"
        await until(lambda: "misshapen" in workers(stack) and reason in workers(stack)["misshapen"].detail)
        await until(lambda: reason in stack.run("status").stdout)
    finally:
        said(stack, "model", "remove", "misshapen")


def test_without_its_base_or_beside_another_one_it_is_refused_with_the_reason(
    stack: RunningStack, folder: Path, base: str, tmp_path: Path
) -> None:
    """By the command, and by the Registry itself, whoever asks."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "renamed.gguf").symlink_to((folder / "lora.gguf").resolve())
    (other / "base.gguf").symlink_to(next(folder.glob("gemma*")).resolve())
    wrong = said(stack, "artifact", "create", str(other), "--base", base)
    refused = stack.run("revision", "create", "wrong", "--artifact", wrong, *EXECUTION)
    assert refused.returncode == 2
    digits = base.removeprefix("artifacts/")
    assert re.search(rf"artifact: has an adapter of {digits}, and its base is [0-9a-f]{{12}}", refused.stderr)
    execution = resources_pb2.Execution(
        engine=resources_pb2.Execution.ENGINE_LLAMACPP, context_tokens=512, slots=2, kv_cells=1024, prefill_chunk=64
    )
    revision = resources_pb2.Revision(artifact=wrong, execution=execution)
    with grpc.insecure_channel(stack.registry) as channel, pytest.raises(grpc.RpcError) as error:
        RegistryServiceStub(channel).CreateRevision(
            registry_pb2.CreateRevisionRequest(model="models/wrong", revision=revision), timeout=10
        )
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
