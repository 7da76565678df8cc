"""Artifacts out of files on this machine: what belongs to them, their digests, and what they say of the model.

Large files are hashed side by side in a bounded pool of threads: hashlib lets go of the interpreter's lock.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.problems import EXIT_USAGE, Problem
from headrace.control import gguf, manifest, model_facts
from headrace.control.manifest import FileState
from headrace.control.resources import Artifact, ArtifactFile, FileKind, Labels, ModelFacts

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all), from any thread, one call at a time."""

FILES_MAX = 1000
"""The Registry's own limit: a directory with more was not meant."""
_BLOCK = 4 * 1024 * 1024
_THREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class Source:
    """Files on this machine, by their path below `location`."""

    location: Path
    files: Mapping[str, Path]
    whole: bool = True
    """Whether these are all the files there."""


def source(path: Path, *, signature: str = "") -> Source:
    """The files of a directory, by the rule of `headrace.control.manifest`; or a single file.

    Raises:
        Problem: it is not there, cannot be read, holds nothing, or far too much.
    """
    path = path.expanduser()
    if not path.exists():
        raise Problem(f"{path} does not exist", code=EXIT_USAGE)
    if not path.is_dir():
        real = path.resolve()
        return Source(real.parent, {real.name: real}, whole=False)
    location = path.resolve()
    files = _below(location, signature)
    for file in files.values():
        if not file.is_file():
            raise Problem(f"{file} is no file: a broken link, a socket or a device", code=EXIT_USAGE)
    if not files:
        raise Problem(f"{path} has no files", code=EXIT_USAGE)
    return Source(location, files)


def make(
    found: Source,
    *,
    progress: Progress | None = None,
    labels: Labels = (),
    base_digest: str = "",
    signature: str = "",
    kinds: Mapping[str, FileKind] | None = None,
    states: Mapping[str, FileState] | None = None,
) -> Artifact:
    """Hash the files and read what they say.

    Args:
        found: the files.
        progress: told how far it is.
        labels: of the artifact.
        base_digest: for an adapter, digest of its base.
        signature: path below the location of a signature, "" for none.
        kinds: what certain files are, where that is known better than from their names.
        states: their digests, where they are hashed already.

    Raises:
        Problem: a file cannot be read, changes meanwhile, only stands for one that was never fetched, or is damaged.
    """
    sorts = dict(kinds or {})
    for path, file in found.files.items():
        head = _read(file, manifest.HEAD_BYTES)
        if manifest.is_pointer(head):
            raise Problem(
                f"{file} stands for a large file that was never fetched", hint="git lfs pull", code=EXIT_USAGE
            )
        sorts.setdefault(path, manifest.kind_of(path, head))
    facts = facts_of(found.files, sorts)  # before the long part: a damaged file is told at once
    states = states or hash_files(found.files, progress)
    return Artifact(
        files=tuple(ArtifactFile(p, states[p].size, states[p].sha256, sorts[p]) for p in sorted(states)),
        location=str(found.location),
        labels=labels if found.whole else tuple(sorted({**dict(labels), **dict([manifest.SINGLE_FILES])}.items())),
        facts=model_facts.join([facts, ModelFacts(base_digest=base_digest)]),
        signature=signature,
    )


def hash_files(files: Mapping[str, Path], progress: Progress | None = None) -> dict[str, FileState]:
    """Size and SHA-256 of every file, the largest first, several at a time.

    Raises:
        Problem: a file cannot be read, or changes meanwhile.
    """
    tally = _Tally(sum(_size(file) for file in files.values()), progress)
    order = sorted(files, key=lambda path: -_size(files[path]))
    threads = max(1, min(len(files), os.cpu_count() or 1, _THREADS_MAX))
    pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="hash")
    try:
        waiting = {path: pool.submit(_hash, files[path], tally) for path in order}
        return {path: future.result() for path, future in waiting.items()}
    finally:
        tally.stop.set()  # after a failure or ctrl-C the others end at their next block
        pool.shutdown(cancel_futures=True)


def facts_of(files: Mapping[str, Path], kinds: Mapping[str, FileKind]) -> ModelFacts:
    """What the files say of the model.

    Raises:
        Problem: one of those that say something is damaged.
    """
    said: list[ModelFacts] = []
    order = (FileKind.WEIGHTS, FileKind.QUANTIZATION, FileKind.CONFIG, FileKind.TOKENIZER, FileKind.CHAT_TEMPLATE)
    for kind in order:
        for path in sorted(p for p in files if kinds[p] is kind):
            try:
                said.append(_facts(kind, files[path]))
            except (gguf.BadGguf, model_facts.BadFile) as error:
                raise Problem(f"{files[path]} is damaged: {error}", code=EXIT_USAGE) from None
    return model_facts.join(said)


def differences(artifact: Artifact, location: Path, progress: Progress | None = None) -> manifest.Differences:
    """Hash what is at `location` now, and compare.

    Raises:
        Problem: something there cannot be read.
    """
    below = _below(location, artifact.signature) if location.is_dir() else {}
    wanted = {file.path for file in artifact.files}
    if manifest.SINGLE_FILES in artifact.labels:  # the files beside them were never meant
        below = {path: file for path, file in below.items() if path in wanted}
    found = {path: file for path, file in below.items() if file.is_file()}
    # What is extra differs whatever it holds: it need not be read.
    states = hash_files({path: file for path, file in found.items() if path in wanted}, progress)
    extra = {path: FileState(0, "") for path in found.keys() - wanted}
    return manifest.compare(artifact.files, {**states, **extra})


def adapter_facts(artifact: Artifact) -> ModelFacts:
    """What the artifact's adapter says of itself; nothing if there is none or it cannot be read here."""
    file = artifact.file_of(FileKind.ADAPTER)
    try:
        return _facts(FileKind.WEIGHTS, Path(artifact.location) / file.path) if file is not None else ModelFacts()
    except (Problem, gguf.BadGguf, model_facts.BadFile):
        return ModelFacts()


def chat_template(files: Iterable[ArtifactFile], location: Path) -> str:
    """The model's chat template, the way the engine looks for it; "" if there is none or it cannot be read."""
    where = {file.kind: location / file.path for file in sorted(files, key=lambda f: f.path, reverse=True)}
    try:
        if (path := where.get(FileKind.CHAT_TEMPLATE)) is not None:
            content = _read(path, model_facts.TEXT_BYTES_MAX)
            return model_facts.template_in(content) if path.suffix == ".json" else content.decode("utf-8", "replace")
        if (path := where.get(FileKind.WEIGHTS)) is not None:
            head = _read(path, gguf.HEAD_BYTES_MAX)
            if head.startswith(gguf.MAGIC):
                return str(gguf.read_metadata(head).get("tokenizer.chat_template", ""))
    except (Problem, gguf.BadGguf, model_facts.BadFile):
        return ""
    return ""


def _below(location: Path, signature: str) -> dict[str, Path]:
    """What is in a directory and below it, but for what no artifact takes."""
    found: dict[str, Path] = {}

    def fail(error: OSError) -> None:
        raise Problem(f"cannot read {error.filename}: {error.strerror}", code=EXIT_USAGE)

    for folder, folders, names in os.walk(location, onerror=fail):  # does not enter links
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            file = Path(folder, name)
            path = file.relative_to(location).as_posix()
            if not manifest.is_left_out(path, signature):
                found[path] = file
        if len(found) > FILES_MAX:
            raise Problem(f"{location} has more than {FILES_MAX} files: is it a model's?", code=EXIT_USAGE)
    return found


class _Tally:
    """How many bytes are hashed, and whether to go on."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.stop = threading.Event()
        self._total, self._done, self._progress = total, 0, progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress:
                self._progress(self._done, self._total)


def _hash(path: Path, tally: _Tally) -> FileState:
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            while block := file.read(_BLOCK):
                if tally.stop.is_set():
                    raise Problem("given up")
                digest.update(block)
                size += len(block)
                tally.add(len(block))
            after = os.fstat(file.fileno())
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}", code=EXIT_USAGE) from None
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns) or size != after.st_size:
        raise Problem(f"{path} changed while it was hashed")
    return FileState(size, digest.hexdigest())


def _facts(kind: FileKind, path: Path) -> ModelFacts:
    if kind is FileKind.WEIGHTS:
        head = _read(path, 4)
        if head != gguf.MAGIC:
            return ModelFacts()
        return model_facts.from_gguf(gguf.read_metadata(_read(path, gguf.HEAD_BYTES_MAX)))
    if kind is FileKind.CHAT_TEMPLATE:
        return ModelFacts(has_chat_template=True)
    if path.suffix != ".json":
        return ModelFacts()
    content = _read(path, model_facts.TEXT_BYTES_MAX)
    if kind is FileKind.QUANTIZATION:
        return model_facts.from_quantization(content)
    if kind is FileKind.CONFIG:
        return model_facts.from_config(content)
    if path.name == "tokenizer_config.json":
        return ModelFacts(has_chat_template=bool(model_facts.template_in(content)))
    return model_facts.from_tokenizer(content) if path.name == "tokenizer.json" else ModelFacts()


def _read(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}", code=EXIT_USAGE) from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}", code=EXIT_USAGE) from None
