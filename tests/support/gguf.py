"""GGUF files for tests: a head of metadata, and tensors where a test needs some."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.control.gguf import read_metadata

ALIGNMENT = 32
SMALL: Mapping[str, object] = {
    "general.architecture": "llama",
    "general.type": "model",
    "general.file_type": 15,
    "llama.block_count": 6,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.scores": [0.0, 1.0, 2.0],
}


def gguf(
    metadata: Mapping[str, object] = SMALL,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    *,
    version: int = 3,
) -> bytes:
    """The bytes of a file with these keys: str, bool, int (u32), float (f32), lists of str, of float and of int (i32).

    `tensors` are stored as 32-bit floats; the last axis of an array is the first dimension of GGUF.
    """
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(v) for key, v in metadata.items())
    data = b""
    for name, array in tensors.items():
        dimensions = array.shape[::-1]
        head += text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, 0, len(data))
        data += padded(np.ascontiguousarray(array, "<f4").tobytes())
    return padded(head) + data if tensors else head


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def lora(
    architecture: str, weights: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]], *, alpha: float
) -> bytes:
    """An adapter: for the weight of each name, A (rank x in) and B (out x rank)."""
    metadata = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    tensors = {}
    for name, (a, b) in weights.items():
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    return gguf(metadata, tensors)


def lora_of(model: Path, *, layer: int, seed: int = 3, rank: int = 2) -> bytes:
    """An adapter of the model in that file: random numbers for one of its weights, large enough to be heard."""
    with model.open("rb") as file:
        facts = read_metadata(file.read(16 * 1024 * 1024), whole=False)
    kind = str(facts["general.architecture"])
    width, inner = int(str(facts[f"{kind}.embedding_length"])), int(str(facts[f"{kind}.feed_forward_length"]))
    dice = np.random.default_rng(seed)
    a = dice.normal(size=(rank, inner)).astype(np.float32)
    b = dice.normal(size=(width, rank)).astype(np.float32)
    return lora(kind, {f"blk.{layer}.ffn_down.weight": (a, b)}, alpha=16.0)


def text(content: str) -> bytes:
    data = content.encode()
    return struct.pack("<Q", len(data)) + data


def value(content: object) -> bytes:
    if isinstance(content, bool):
        return struct.pack("<I?", 7, content)
    if isinstance(content, str):
        return struct.pack("<I", 8) + text(content)
    if isinstance(content, int):
        return struct.pack("<II", 4, content)
    if isinstance(content, float):
        return struct.pack("<If", 6, content)
    assert isinstance(content, list)
    if content and all(isinstance(item, int) for item in content):
        return struct.pack(f"<IIQ{len(content)}i", 9, 5, len(content), *content)
    strings = any(isinstance(item, str) for item in content)
    body = b"".join(text(item) if strings else struct.pack("<f", item) for item in content)
    return struct.pack("<IIQ", 9, 8 if strings else 6, len(content)) + body
