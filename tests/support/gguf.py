"""GGUF files for tests: a head of metadata, and no tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping

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


def gguf(metadata: Mapping[str, object] = SMALL, *, version: int = 3) -> bytes:
    """The bytes of a file with these keys: str, bool, int (u32), float (f32), lists of str and of float."""
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(metadata))
    return head + b"".join(text(key) + value(v) for key, v in metadata.items())


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
    strings = any(isinstance(item, str) for item in content)
    body = b"".join(text(item) if strings else struct.pack("<f", item) for item in content)
    return struct.pack("<IIQ", 9, 8 if strings else 6, len(content)) + body
