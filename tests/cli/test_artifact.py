"""`headrace artifact` and `headrace revision` against a real Registry: identity, verification, all reasons at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog

from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.cli import main
from support.etcd import etcd_process
from support.gguf import SMALL, gguf
from support.registry import Registry, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENSORS = (64).to_bytes(8, "little") + b'{"__metadata__":{}}' + b"x" * 200
CONFIG = {
    "model_type": "qwen2", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "hidden_size": 64, "vocab_size": 32, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Awaitable[Result]]


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

    def run(arguments: tuple[object, ...]) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main.run([str(a) for a in arguments])
        return Result(code, out.getvalue(), err.getvalue())

    return lambda *arguments: asyncio.to_thread(run, arguments)


def model(folder: Path, salt: str, **changes: Any) -> Path:
    """A directory as people download it: no two tests have the same identity."""
    tokenizer = {"model": {"vocab": {f"t{i}": i for i in range(changes.pop("tokens", 32))}}, "salt": salt}
    files = {
        "model-00001-of-00002.safetensors": TENSORS,
        "model-00002-of-00002.safetensors": TENSORS + b"2",
        "config.json": json.dumps({**CONFIG, **changes}).encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": b'{"chat_template": "{{ messages[0].content }}"}',
        "special_tokens_map.json": b"{}",
        "README.md": b"# hello",
        ".cache/lock": b"",
        ".gitattributes": b"*",
    }
    for path, content in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


async def created(headrace: Command, path: Path, *options: str) -> str:
    result = await headrace("artifact", "create", path, *options)
    assert result.code == 0, result.err
    return result.out.strip()


async def shown(headrace: Command, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((await headrace("artifact", "show", name)).out)
    return document


async def test_a_directory_becomes_an_artifact_with_kinds_facts_and_labels(headrace: Command, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "create")
    name = await created(headrace, folder, "--label", "team=search", "--label", "stage=test")
    document = await shown(headrace, name)
    assert document["location"] == str(folder)
    assert document["labels"] == {"team": "search", "stage": "test"}
    assert {f["path"]: f["kind"] for f in document["files"]} == {
        "model-00001-of-00002.safetensors": "weights",
        "model-00002-of-00002.safetensors": "weights",
        "config.json": "config",
        "tokenizer.json": "tokenizer",
        "tokenizer_config.json": "tokenizer",
        "special_tokens_map.json": "special_tokens",
        "README.md": "other",
    }
    for file in document["files"]:
        content = (folder / file["path"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert document["facts"] == {
        "architecture": "qwen2", "layers": 6, "heads": 8, "kv_heads": 2, "embedding": 64, "vocabulary": 32,
        "context_tokens": 2048, "weight_type": "bf16", "has_chat_template": True, "tokenizer_vocabulary": 32,
    }  # fmt: skip
    listed = json.loads((await headrace("artifact", "list", "--label", "team=search")).out)
    assert [a["name"] for a in listed] == [name]
    assert json.loads((await headrace("artifact", "list", "--label", "team=other")).out) == []
    assert await created(headrace, folder, "--label", "team=search", "--label", "stage=test") == name
    (folder / ".cache" / "another").touch()
    (folder / "README.md").write_text("# other")
    moved = model(tmp_path / "moved", "create")
    (moved / "tokenizer_config.json").write_text('{"chat_template": "{{ other }}"}')
    assert await created(headrace, moved) != name, "another template is another artifact"


async def test_verify_names_every_file_that_differs(headrace: Command, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "verify")
    name = await created(headrace, folder)
    good = await headrace("artifact", "verify", name)
    assert (good.code, good.out) == (0, ""), good.err
    weights = folder / "model-00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"y")
    (folder / "README.md").write_text("# longer than it was")
    (folder / "config.json").unlink()
    (folder / "sub").mkdir()
    (folder / "sub" / "new.txt").touch()
    (folder / ".hidden").touch()
    bad = await headrace("artifact", "verify", name)
    assert bad.code == 1
    assert bad.out.splitlines() == [
        "changed README.md",
        f"changed {weights.name}",
        "missing config.json",
        "extra sub/new.txt",
    ]
    other = await headrace("artifact", "verify", name.removeprefix("artifacts/"), "--location", tmp_path / "nowhere")
    assert other.code == 1
    assert len(other.out.splitlines()) == 7
    assert (await headrace("artifact", "verify", name, "--location", model(tmp_path / "copy", "verify"))).code == 0


async def test_links_and_signatures(headrace: Command, tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "m"
    blobs.mkdir()
    folder.mkdir()
    (blobs / "0a").write_bytes(gguf({**SMALL, "general.name": "links"}))
    (folder / "model.gguf").symlink_to(blobs / "0a")
    (folder / "elsewhere").symlink_to(blobs)
    (folder / "model.sig").write_text("signed")
    name = await created(headrace, folder)
    document = await shown(headrace, name)
    assert [f["path"] for f in document["files"]] == ["model.gguf"]
    assert document["signature"] == "model.sig"
    assert (await headrace("artifact", "verify", name)).code == 0
    (folder / "broken").symlink_to(tmp_path / "gone")
    refused = await headrace("artifact", "create", folder)
    assert refused.code == 2
    assert "broken link" in refused.err


async def test_what_was_registered_stays_until_it_is_deleted(headrace: Command, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf({**SMALL, "general.name": "deleted"}))
    name = await created(headrace, file, "--label", "a=1")
    again = await headrace("artifact", "create", file, "--label", "a=2")
    assert (again.code, again.out) == (0, f"{name}\n")
    assert "other labels or facts, which stay" in again.err
    assert (await shown(headrace, name))["labels"]["a"] == "1"
    execution = ["--artifact", name, "--context", "512", "--kv-cells", "512"]
    revision = (await headrace("revision", "create", "gone", *execution)).out.strip()
    needed = await headrace("artifact", "delete", name)
    assert needed.code == 1
    assert revision in needed.err
    assert (await headrace("revision", "delete", revision)).code == 0
    assert (await headrace("revision", "show", revision)).code == 1
    assert (await headrace("artifact", "delete", name)).code == 0
    fresh = await headrace("artifact", "create", file, "--label", "a=2")
    assert "which stay" not in fresh.err
    assert (await shown(headrace, name))["labels"]["a"] == "2"


async def test_beside_a_single_file_nothing_is_extra(headrace: Command, tmp_path: Path) -> None:
    file = tmp_path / "one.gguf"
    file.write_bytes(gguf({**SMALL, "general.name": "single"}))
    (tmp_path / "two.gguf").write_bytes(gguf())
    name = await created(headrace, file)
    assert (await headrace("artifact", "verify", name)).code == 0
    file.write_bytes(gguf())
    assert (await headrace("artifact", "verify", name)).out == "changed one.gguf\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "has no files"),
        ({"m.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "never fetched"),
        ({"m.gguf": gguf()[:-5]}, "m.gguf is damaged: it ends in the middle"),
        ({"config.json": b"{"}, "config.json is damaged: it is not valid JSON"),
        (None, "does not exist"),
    ],
    ids=["empty", "pointer", "cut short", "not JSON", "not there"],
)
async def test_what_cannot_be_an_artifact_is_one_sentence(
    headrace: Command, tmp_path: Path, content: dict[str, bytes] | None, says: str
) -> None:
    folder = tmp_path / "m"
    if content is not None:
        folder.mkdir()
        for path, data in content.items():
            (folder / path).write_bytes(data)
    result = await headrace("artifact", "create", folder)
    assert result.code == 2, result.err
    assert says in result.err
    assert result.out == ""


async def test_names_that_are_not_known(headrace: Command) -> None:
    for command in ("show", "verify"):
        result = await headrace("artifact", command, "artifacts/000000000000")
        assert result.code == 1
        assert "artifacts/000000000000 does not exist" in result.err
    assert (await headrace("artifact", "list", "--label", "nothing")).code == 2


async def test_lists_go_on_behind_the_first_page(headrace: Command, registry: Registry) -> None:
    kind = resources_pb2.ArtifactFile.KIND_WEIGHTS
    for index in range(101):
        file = resources_pb2.ArtifactFile(path="m", size=index, sha256="ab" * 32, kind=kind)
        made = resources_pb2.Artifact(files=[file], location="/m", labels={"many": "yes"})
        await registry.stub.CreateArtifact(pb.CreateArtifactRequest(artifact=made))
        execution = resources_pb2.Execution(
            engine=resources_pb2.Execution.ENGINE_SYNTHETIC, context_tokens=16, slots=1, kv_cells=16 + index
        )
        revision = resources_pb2.Revision(execution=execution)
        await registry.stub.CreateRevision(pb.CreateRevisionRequest(model="models/many", revision=revision))
    artifacts = json.loads((await headrace("artifact", "list", "--label", "many=yes")).out)
    assert len({a["name"] for a in artifacts}) == 101
    revisions = json.loads((await headrace("revision", "list", "--model", "many")).out)
    assert len({r["name"] for r in revisions}) == 101


async def test_a_revision_is_created_listed_and_pointed_at(
    headrace: Command, registry: Registry, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf({**SMALL, "general.name": "revision"}))
    name = await created(headrace, file)
    options = ["--artifact", name, "--context", "512", "--slots", "2", "--kv-cells", "1024", "--runtime", "triton-2.51",
               "--policy-version", "3", "--label", "team=search"]  # fmt: skip
    made = await headrace("revision", "create", "chat", *options, "--alias", "chat-prod")
    assert made.code == 0, made.err
    revision = made.out.strip()
    assert revision.startswith("models/chat/revisions/")
    assert (await headrace("revision", "create", "models/chat", *options)).out.strip() == revision
    document = json.loads((await headrace("revision", "show", revision)).out)
    assert document["artifact"] == name
    assert document["execution"]["engine"] == "llamacpp"
    assert (document["runtime"], document["policy_version"], document["labels"]) == (
        "triton-2.51", 3, {"team": "search"},
    )  # fmt: skip
    listed = json.loads((await headrace("revision", "list", "--model", "chat", "--label", "team=search")).out)
    assert [r["name"] for r in listed] == [revision]
    assert json.loads((await headrace("revision", "list", "--model", "other")).out) == []
    aliases = (await registry.stub.ListAliases(pb.ListAliasesRequest())).aliases
    assert [(t.revision, t.weight) for a in aliases if a.name == "aliases/chat-prod" for t in a.targets] == [
        (revision, 1)
    ]
    long = await headrace("revision", "create", "chat", *options, "--runtime", "x" * 201)
    assert long.code == 2
    assert "revision.runtime" in long.err
    synthetic = await headrace("revision", "create", "fake", "--engine", "synthetic", "--decode-rate", "50")
    assert synthetic.code == 0, synthetic.err


async def test_all_reasons_come_at_once_from_the_command_and_from_the_registry(
    headrace: Command, registry: Registry, tmp_path: Path
) -> None:
    folder = model(tmp_path / "m", "reasons", tokens=40)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    name = await created(headrace, folder)
    refused = await headrace(
        "revision", "create", "broken", "--artifact", name, "--context", "4096", "--tensor-parallel", "3",
        "--pipeline-parallel", "4", "--device", "cuda-sm75",
    )  # fmt: skip
    assert refused.code == 2
    for says in (
        "query heads", "KV heads", "6 layers", "llama.cpp runs on the CPU", "loads GGUF files", "bf16 weights",
        "at most 2048", "tokenizer of 40 tokens and a model of 32", "cannot render a plain conversation",
    ):  # fmt: skip
        assert says in refused.err
    assert (await registry.stub.ListRevisions(pb.ListRevisionsRequest(model="models/broken"))).revisions == []
    execution = resources_pb2.Execution(
        engine=resources_pb2.Execution.ENGINE_LLAMACPP, context_tokens=4096, slots=1, kv_cells=4096,
        tensor_parallel=3, pipeline_parallel=4, device="cuda-sm75",
    )  # fmt: skip
    request = pb.CreateRevisionRequest(
        model="models/broken", revision=resources_pb2.Revision(artifact=name, execution=execution)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.stub.CreateRevision(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
    for says in (b"query heads", b"6 layers", b"bf16 weights", b"at most 2048", b"tokenizer of 40"):
        assert says in details


async def test_an_adapter_runs_on_its_own_base_alone(headrace: Command, tmp_path: Path) -> None:
    base, both, wrong = tmp_path / "base", tmp_path / "both", tmp_path / "wrong"
    for folder, salt in ((base, "a"), (both, "a"), (wrong, "b")):
        folder.mkdir()
        (folder / "m.gguf").write_bytes(gguf({**SMALL, "general.name": f"base {salt}"}))
    for folder in (both, wrong):
        (folder / "lora.gguf").write_bytes(gguf({"general.type": "adapter"}))
    known = await created(headrace, base)
    execution = ["--context", "512", "--kv-cells", "512", "--artifact"]
    good = await created(headrace, both, "--base", known)
    assert (await headrace("revision", "create", "tuned", *execution, good)).code == 0
    bad = await headrace("revision", "create", "tuned", *execution, await created(headrace, wrong, "--base", known))
    assert bad.code == 2
    assert f"has an adapter of {known.removeprefix('artifacts/')}" in bad.err
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "m.gguf").write_bytes((base / "m.gguf").read_bytes())
    (foreign / "lora.gguf").write_bytes(gguf({"general.type": "adapter", "general.architecture": "qwen2"}))
    other = await created(headrace, foreign, "--base", known)
    bad = await headrace("revision", "create", "tuned", *execution, other)
    assert bad.code == 2
    assert "artifact: has an adapter for qwen2, and its weights are llama" in bad.err


async def test_model_add_records_facts_and_labels(headrace: Command, tmp_path: Path) -> None:
    file, template = tmp_path / "Added Model.gguf", tmp_path / "chat.jinja"
    file.write_bytes(gguf({**SMALL, "general.name": "added"}))
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    added = await headrace("model", "add", file, "--chat-template", template, "--context", "512", "--slots", "2",
                           "--label", "team=search", "--no-wait")  # fmt: skip
    assert added.code == 0, added.err
    revision = json.loads((await headrace("revision", "show", added.out.strip())).out)
    assert revision["labels"] == {"team": "search"}
    document = await shown(headrace, revision["artifact"])
    assert document["labels"]["team"] == "search"
    assert document["facts"]["layers"] == 6
    assert document["facts"]["has_chat_template"] is True
    assert {f["path"]: f["kind"] for f in document["files"]} == {
        "Added Model.gguf": "weights", "chat.jinja": "chat_template",
    }  # fmt: skip
    again = await headrace("model", "add", file, "--chat-template", template, "--context", "512", "--slots", "2",
                           "--label", "team=search", "--no-wait")  # fmt: skip
    assert again.out == added.out
    labelled = await headrace("alias", "set", "added-model", added.out.strip(), "--label", "env=prod")
    assert labelled.code == 0, labelled.err
    third = await headrace("model", "add", file, "--context", "256", "--slots", "2", "--no-wait")
    assert third.code == 0, third.err
    (alias,) = (a for a in json.loads((await headrace("alias", "list", "--json")).out) if "env" in a["labels"])
    assert alias["targets"][0]["revision"] == third.out.strip()
    file.write_bytes(gguf()[:-4])
    assert "is damaged" in (await headrace("model", "add", file, "--no-wait")).err
