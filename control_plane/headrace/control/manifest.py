"""Manifests: what each file of a model is, and how two states of a directory differ.

What belongs to an artifact made of a directory: every file in it and below it, but for

    hidden files       a name that begins with "." in any part of the path
    the signature      it says from whom the files are, not what they are

A link to a file counts as the file that it leads to (the ecosystem's caches are made of such links); a link to a
directory is not entered. Sans-io.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from headrace.control import gguf, model_facts
from headrace.control.resources import Artifact, ArtifactFile, FileKind

HEAD_BYTES = 64 * 1024
"""As much of a file as `kind_of` wants to see."""
SIGNATURE = "model.sig"
"""Where the signature over a directory is by default."""

SINGLE_FILES = ("headrace/source", "files")
"""Label of an artifact made of single files: what lies beside them was never meant to be a part of it."""

_BY_NAME = (
    ("adapter_*", FileKind.ADAPTER),
    ("hf_quant_config.json", FileKind.QUANTIZATION),
    ("quant*_config.json", FileKind.QUANTIZATION),
    ("config.json", FileKind.CONFIG),
    ("special_tokens_map.json", FileKind.SPECIAL_TOKENS),
    ("added_tokens.json", FileKind.SPECIAL_TOKENS),
    ("chat_template.jinja", FileKind.CHAT_TEMPLATE),
    ("chat_template.json", FileKind.CHAT_TEMPLATE),
    ("tokenizer*.json", FileKind.TOKENIZER),
    ("tokenizer*.model", FileKind.TOKENIZER),
    ("spiece.model", FileKind.TOKENIZER),
    ("vocab.json", FileKind.TOKENIZER),
    ("vocab.txt", FileKind.TOKENIZER),
    ("merges.txt", FileKind.TOKENIZER),
    ("*processor_config.json", FileKind.PROCESSOR),
)
_LFS = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class FileState:
    """Size in bytes and SHA-256 in hex, as found on a disk."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Differences:
    """Paths that differ from a manifest, each list in order."""

    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.missing or self.extra)


def is_left_out(path: str, signature: str = "") -> bool:
    """Whether a file below an artifact's directory is no part of it."""
    return path == signature or any(part.startswith(".") for part in path.split("/"))


def is_pointer(head: bytes) -> bool:
    """Whether a file only stands for a large one that was never fetched (Git LFS)."""
    return head.startswith(_LFS)


def kind_of(path: str, head: bytes) -> FileKind:
    """What a file is, by its name and its first `HEAD_BYTES`.

    A name alone does not make weights: the content must be of the format that the name says, or what was cut short
    or saved by mistake would be loaded.
    """
    if head.startswith(gguf.MAGIC):
        return _gguf_kind(head)
    name = path.rsplit("/", 1)[-1].lower()
    for pattern, kind in _BY_NAME:
        if fnmatchcase(name, pattern):
            return kind
    if name.endswith(".safetensors") and _is_safetensors(head):
        return FileKind.WEIGHTS
    # Both ways in which PyTorch saves: a zip archive, and a bare pickle.
    if name.endswith(".bin") and head.startswith((b"PK\x03\x04", b"\x80")) and name != "training_args.bin":
        return FileKind.WEIGHTS
    return FileKind.OTHER


def compare(files: Iterable[ArtifactFile], found: Mapping[str, FileState]) -> Differences:
    """How what was found differs from the files of a manifest."""
    wanted = {file.path: FileState(file.size, file.sha256) for file in files}
    return Differences(
        changed=tuple(sorted(path for path in wanted.keys() & found.keys() if wanted[path] != found[path])),
        missing=tuple(sorted(wanted.keys() - found.keys())),
        extra=tuple(sorted(found.keys() - wanted.keys())),
    )


def base_of(artifact: Artifact) -> Artifact | None:
    """The artifact without its adapter; None if it has none.

    A folder of the adapter's own goes with it: people lay a README and the tokenizer beside an adapter.
    """
    adapters = [file.path for file in artifact.files if file.kind is FileKind.ADAPTER]
    if not adapters:
        return None
    weights = {folder_of(file.path) for file in artifact.files if file.kind is FileKind.WEIGHTS}
    own = {folder_of(path) for path in adapters} - weights - {""}
    rest = (file for file in artifact.files if file.kind is not FileKind.ADAPTER and folder_of(file.path) not in own)
    return Artifact(tuple(rest), artifact.location)


def folder_of(path: str) -> str:
    """Of a file of an artifact: "" or "a/b/"."""
    return "".join(path.rpartition("/")[:2])


def _gguf_kind(head: bytes) -> FileKind:
    try:
        metadata = gguf.read_metadata(head, whole=False)
    except gguf.BadGguf:
        return FileKind.OTHER
    if model_facts.is_adapter(metadata):
        return FileKind.ADAPTER
    projector = metadata.get("general.type") == "mmproj" or metadata.get("general.architecture") == "clip"
    return FileKind.PROCESSOR if projector else FileKind.WEIGHTS


def _is_safetensors(head: bytes) -> bool:
    """Eight bytes of length, then a JSON object."""
    return len(head) > 8 and head[8:9] == b"{"
