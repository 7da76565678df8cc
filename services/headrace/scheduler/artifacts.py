"""Before an engine loads an artifact: are these the bytes that were registered?

Every file's size and SHA-256 is compared. Hashing gigabytes takes minutes, so a verdict is kept in the state
directory and holds for as long as path, size, modification time and inode are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import threading
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from headrace.control.resources import Artifact, ArtifactFile

_CHUNK_BYTES = 1024 * 1024
_VERDICTS_MAX = 10_000


class ArtifactFault(Exception):
    """An artifact's files are not what was registered; the message is a sentence that names the file."""


class ArtifactVerifier:
    """Verifies artifacts, one at a time; remembers verdicts in `state_dir`/verified.json."""

    def __init__(self, state_dir: Path) -> None:
        self._store = state_dir / "verified.json"
        self._verdicts: dict[str, list[object]] | None = None
        self._turn = asyncio.Lock()

    async def verify(self, artifact: Artifact) -> None:
        """Check every file of `artifact`, hashing in a thread where no verdict holds.

        Raises:
            ArtifactFault: a file is missing, cannot be read, or differs.
        """
        async with self._turn:
            stop = threading.Event()
            try:
                await asyncio.to_thread(self._verify, artifact, stop)
            finally:
                stop.set()  # a thread cannot be cancelled: it looks at this between chunks

    def _verify(self, artifact: Artifact, stop: threading.Event) -> None:
        verdicts = self._load()
        before = dict(verdicts)
        for file in artifact.files:
            path = file_path(artifact, file)
            try:
                with path.open("rb") as content:
                    self._check(artifact, file, path, content, stop)
            except FileNotFoundError:
                raise ArtifactFault(f"the file {path} of {artifact.name} does not exist") from None
            except OSError as error:
                raise ArtifactFault(f"the file {path} of {artifact.name} cannot be read: {error.strerror}") from None
        if verdicts != before:
            self._save(verdicts)

    def _check(
        self, artifact: Artifact, file: ArtifactFile, path: Path, content: BinaryIO, stop: threading.Event
    ) -> None:
        verdicts = self._load()
        stat = os.fstat(content.fileno())
        if stat.st_size != file.size:
            raise ArtifactFault(
                f"the file {path} has {stat.st_size} bytes, but {artifact.name} was registered with {file.size}"
            )
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = verdicts.get(str(path))
        if known is None or known[:3] != mark:
            digest = _sha256(content, stop)
            if os.fstat(content.fileno()).st_mtime_ns != stat.st_mtime_ns:
                raise ArtifactFault(f"the file {path} changed while it was verified")
            known = verdicts[str(path)] = [*mark, digest]
        if known[3] != file.sha256:
            raise ArtifactFault(
                f"the file {path} is not what {artifact.name} was registered with: its SHA-256 is "
                f"{str(known[3])[:12]}..., not {file.sha256[:12]}..."
            )

    def _load(self) -> dict[str, list[object]]:
        if self._verdicts is None:
            self._verdicts = {}
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self._store.read_text(encoding="utf-8"))
                self._verdicts = {str(k): list(v) for k, v in found.items() if isinstance(v, list) and len(v) == 4}
        return self._verdicts

    def _save(self, verdicts: dict[str, list[object]]) -> None:
        while len(verdicts) > _VERDICTS_MAX:
            del verdicts[next(iter(verdicts))]
        with contextlib.suppress(OSError):  # without the memory the next start hashes again
            self._store.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._store.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(verdicts), encoding="utf-8")
            scratch.replace(self._store)


def file_path(artifact: Artifact, file: ArtifactFile) -> Path:
    """Where a file of an artifact is.

    Raises:
        ArtifactFault: its path leads out of the artifact's location.
    """
    relative = PurePosixPath(file.path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        raise ArtifactFault(f"{artifact.name} names a file outside its location: {file.path}")
    return Path(artifact.location, *relative.parts)


def _sha256(content: BinaryIO, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    while chunk := content.read(_CHUNK_BYTES):
        if stop.is_set():
            raise ArtifactFault("the verification was given up")
        digest.update(chunk)
    return digest.hexdigest()
