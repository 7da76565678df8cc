"""Manifests: what a file is, what is left out, and how two states of a directory differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control import manifest
from headrace.control.manifest import Differences, FileState
from headrace.control.resources import Artifact, ArtifactFile, FileKind
from support.gguf import SMALL, gguf

TENSORS = (64).to_bytes(8, "little") + b'{"__metadata__"'


@pytest.mark.parametrize(
    ("path", "head", "kind"),
    [
        ("m.gguf", gguf(), FileKind.WEIGHTS),
        ("no-suffix", gguf(), FileKind.WEIGHTS),
        ("m.gguf", gguf()[:60], FileKind.WEIGHTS),
        ("m.gguf", b"<html>", FileKind.OTHER),
        ("m.gguf", b"GGUF" + b"\xff" * 60, FileKind.OTHER),
        ("lora.gguf", gguf({"general.type": "adapter"}), FileKind.ADAPTER),
        ("mmproj.gguf", gguf({**SMALL, "general.type": "mmproj"}), FileKind.PROCESSOR),
        ("model-00001-of-00002.safetensors", TENSORS, FileKind.WEIGHTS),
        ("model.safetensors", b"", FileKind.OTHER),
        ("pytorch_model.bin", b"PK\x03\x04", FileKind.WEIGHTS),
        ("pytorch_model.bin", b"\x80\x02", FileKind.WEIGHTS),
        ("notes.bin", b"hello", FileKind.OTHER),
        ("training_args.bin", b"PK\x03\x04", FileKind.OTHER),
        ("config.json", b"{", FileKind.CONFIG),
        ("sub/config.json", b"{", FileKind.CONFIG),
        ("generation_config.json", b"{", FileKind.OTHER),
        ("tokenizer.json", b"{", FileKind.TOKENIZER),
        ("tokenizer_config.json", b"{", FileKind.TOKENIZER),
        ("tokenizer.model", b"\x0a", FileKind.TOKENIZER),
        ("vocab.json", b"{", FileKind.TOKENIZER),
        ("merges.txt", b"a b", FileKind.TOKENIZER),
        ("special_tokens_map.json", b"{", FileKind.SPECIAL_TOKENS),
        ("chat_template.jinja", b"{%", FileKind.CHAT_TEMPLATE),
        ("chat_template.json", b"{", FileKind.CHAT_TEMPLATE),
        ("adapter_config.json", b"{", FileKind.ADAPTER),
        ("adapter_model.safetensors", TENSORS, FileKind.ADAPTER),
        ("quantize_config.json", b"{", FileKind.QUANTIZATION),
        ("quant_config.json", b"{", FileKind.QUANTIZATION),
        ("hf_quant_config.json", b"{", FileKind.QUANTIZATION),
        ("preprocessor_config.json", b"{", FileKind.PROCESSOR),
        ("processor_config.json", b"{", FileKind.PROCESSOR),
        ("README.md", b"#", FileKind.OTHER),
    ],
)
def test_kinds(path: str, head: bytes, kind: FileKind) -> None:
    assert manifest.kind_of(path, head) is kind


@pytest.mark.parametrize(
    ("path", "out"),
    [
        (".gitattributes", True),
        (".cache/x", True),
        ("a/.b/c", True),
        ("a.b/c", False),
        ("m.sig", True),
        ("n.sig", False),
    ],
)
def test_what_is_left_out(path: str, out: bool) -> None:
    assert manifest.is_left_out(path, "m.sig") is out


def test_a_pointer_of_git_lfs_is_told_from_a_file() -> None:
    assert manifest.is_pointer(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert not manifest.is_pointer(gguf())


STATES = st.dictionaries(
    st.sampled_from("abcde"), st.builds(FileState, st.integers(0, 2), st.sampled_from(["0" * 64, "1" * 64]))
)


@given(before=STATES, after=STATES)
def test_every_difference_is_named_once_and_nothing_else(
    before: dict[str, FileState], after: dict[str, FileState]
) -> None:
    files = [ArtifactFile(path, s.size, s.sha256, FileKind.OTHER) for path, s in before.items()]
    found = manifest.compare(files, after)
    named = [*found.changed, *found.missing, *found.extra]
    assert sorted(named) == sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
    assert set(found.missing) == before.keys() - after.keys()
    assert set(found.extra) == after.keys() - before.keys()
    assert bool(found) is (before != after)


def test_equal_states_do_not_differ() -> None:
    assert manifest.compare([], {}) == Differences()


def test_the_base_of_an_adapter_is_the_rest() -> None:
    weights = ArtifactFile("m.gguf", 1, "0" * 64, FileKind.WEIGHTS)
    adapter = ArtifactFile("lora.gguf", 1, "1" * 64, FileKind.ADAPTER)
    base = manifest.base_of(Artifact((adapter, weights), "/x"))
    assert base is not None
    assert base.digest == Artifact((weights,), "/y").digest
    assert manifest.base_of(Artifact((weights,), "/x")) is None


W, A, R = FileKind.WEIGHTS, FileKind.ADAPTER, FileKind.OTHER


@pytest.mark.parametrize(
    ("files", "base"),
    [
        ({"m.gguf": W, "l.gguf": A, "README.md": R}, {"m.gguf", "README.md"}),
        ({"m.gguf": W, "lora/l.gguf": A, "lora/README.md": R, "README.md": R}, {"m.gguf", "README.md"}),
        ({"m/m.gguf": W, "m/l.gguf": A, "m/README.md": R}, {"m/m.gguf", "m/README.md"}),
        ({"m.gguf": W, "lora/l.gguf": A, "lora/deep/x": R, "lorax/y": R}, {"m.gguf", "lora/deep/x", "lorax/y"}),
    ],
)
def test_what_lies_in_a_folder_of_the_adapter_s_own_is_the_adapter_s(
    files: dict[str, FileKind], base: set[str]
) -> None:
    made = Artifact(tuple(ArtifactFile(path, 1, "1" * 64, kind) for path, kind in files.items()), "/x")
    found = manifest.base_of(made)
    assert found is not None
    assert {file.path for file in found.files} == base
