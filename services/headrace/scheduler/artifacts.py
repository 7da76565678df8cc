"""Before an engine loads an artifact: are these the bytes that were registered?

Every file's size and SHA-256 is compared, and all that differ are named; files beside them are nobody's business here.
Hashing gigabytes takes minutes, so a verdict is kept in the state directory and holds for as long as path, size,
modification time and inode are the same. Where policy asks for it, a signature says from whom the files are.
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
from headrace.scheduler.signatures import BadSignature, Signatures

_CHUNK_BYTES = 1024 * 1024
_VERDICTS_MAX = 10_000
_NAMED_MAX = 5
"""Files at fault that one message names."""


class ArtifactFault(Exception):
    """An artifact's files are not what was registered; the message names those at fault."""


class _Differs(ArtifactFault):
    """One file is not what was registered."""


class ArtifactVerifier:
    """Verifies artifacts, one at a time; remembers verdicts in `state_dir`/verified.json.

    Args:
        state_dir: this Scheduler's own directory.
        signatures: what must be signed by whom; None: nothing.
    """

    def __init__(self, state_dir: Path, signatures: Signatures | None = None) -> None:
        self._signatures = signatures
        self._store = state_dir / "verified.json"
        self._verdicts: dict[str, list[object]] | None = None
        self._turn = asyncio.Lock()

    async def verify(self, artifact: Artifact) -> None:
        """Check every file of `artifact`, hashing in a thread where no verdict holds.

        Raises:
            ArtifactFault: files are missing, cannot be read, or differ; or the signature that must be there is not
                there, not good, or not over all of them.
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
        faults = []
        try:
            for file in artifact.files:
                path = file_path(artifact, file)
                try:
                    with path.open("rb") as content:
                        self._check(artifact, file, path, content, stop)
                except _Differs as fault:
                    faults.append(str(fault))
                except FileNotFoundError:
                    faults.append(f"the file {path} of {artifact.name} does not exist")
                except OSError as error:
                    faults.append(f"the file {path} of {artifact.name} cannot be read: {error.strerror}")
            if faults:
                more = f"; and {len(faults) - _NAMED_MAX} more" if len(faults) > _NAMED_MAX else ""
                raise ArtifactFault("; ".join(faults[:_NAMED_MAX]) + more)
            if self._signatures is not None:
                self._check_signature(self._signatures, artifact)
        finally:
            if verdicts != before:
                self._save(verdicts)

    def _check_signature(self, signatures: Signatures, artifact: Artifact) -> None:
        """The package hashes all files again: remember for which bytes, signature and key it said yes."""
        path = artifact.location, artifact.signature
        try:
            mark = signatures.mark(*path)
            key = f"signature {artifact.digest}"
            if self._load().get(key) != [*mark, "", "good"]:
                signatures.check(*path, [file.path for file in artifact.files])
                self._load()[key] = [*mark, "", "good"]
        except BadSignature as fault:
            raise ArtifactFault(f"{artifact.name}: {fault}") from None

    def _check(
        self, artifact: Artifact, file: ArtifactFile, path: Path, content: BinaryIO, stop: threading.Event
    ) -> None:
        verdicts = self._load()
        stat = os.fstat(content.fileno())
        if stat.st_size != file.size:
            raise _Differs(
                f"the file {path} has {stat.st_size} bytes, but {artifact.name} was registered with {file.size}"
            )
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = verdicts.get(str(path))
        if known is None or known[:3] != mark:
            digest = _sha256(content, stop)
            if os.fstat(content.fileno()).st_mtime_ns != stat.st_mtime_ns:
                raise _Differs(f"the file {path} changed while it was verified")
            known = verdicts[str(path)] = [*mark, digest]
        if known[3] != file.sha256:
            raise _Differs(
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
